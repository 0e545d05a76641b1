//! `rtvirtio contract`.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_arguments::print_error;
use rtvirtio_console::{CONFLICT, Global, INFEASIBLE, Ui, need_root, show};
use rtvirtio_daemon::api::{Client, ClientError};
use rtvirtio_daemon::contract_files::ContractFileError;
use rtvirtio_daemon::linux::{Fit, Places, fit, look_once};
use rtvirtio_daemon::observe::{ObservedTargets, WaitsObservation};
use rtvirtio_daemon::{
    ArrivalAnswer, CONFIG_FILE, Config, PlanSnapshot, Snapshot, VmSnapshot, VmState, contract_files,
};
use rtvirtio_kernel::trusted::{DATA_LIMIT, read_config_text};
use rtvirtio_report::terminal;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::libvirt::{Virsh, set_contract};
use rtvirtio_workflow::Progress as _;
use serde_json::{Value, json};

use super::service::{self, vm_lines};
use super::waits;
use crate::args::{ContractArgs, ContractCommand, PlanAnswer};

/// Timeout of `set` and `remove` for the service's reaction.
const TAKEN_UP: Duration = Duration::from_secs(2);
/// Message when no service runs that would apply the contract.
const NOT_KEPT: &str =
    "rtvirtiod does not run: the contract is kept once it does (`systemctl start rtvirtiod`)";

pub fn run(args: &ContractArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    match &args.command {
        ContractCommand::Set { vm, spec, libvirt, dry_run } => {
            return set(args, (vm, spec), *libvirt, *dry_run, global, ui);
        }
        ContractCommand::Remove { vm, libvirt: Some(uri) } => {
            need_root("contract remove")?;
            set_contract(&Virsh::new(uri), vm, None)?;
            show(ui, &json!({ "vm": vm, "domain": vm }), || {
                format!("removed the contract from the metadata of domain {vm}\n")
            })?;
        }
        ContractCommand::Remove { vm, libvirt: None } => {
            need_root("contract remove")?;
            let place = Place::find(args, global, ui)?;
            let file = contract_files::remove(&place.dir, vm)?;
            if let Some(client) = &place.service {
                let is_gone = client.wait_for_no_contract(vm, TAKEN_UP).unwrap_or_else(|e| {
                    ui.warn(&e.to_string());
                    false
                });
                if !is_gone {
                    ui.step(&format!(
                        "rtvirtiod is processing it: `rtvirtio contract show {vm}` shows what is left"
                    ));
                }
            }
            if !place.runs {
                ui.step("rtvirtiod does not run: what is in force for the VM stays until it does, or until `rtvirtio revert`");
            }
            show(ui, &json!({ "vm": vm, "file": file }), || {
                format!("removed {vm} from {}\n", file.display())
            })?;
        }
        ContractCommand::Accept { vm } => {
            let client = Client::running(&global.run_dir)?;
            let answer: Value = client.post(&format!("/v1/vms/{vm}/accept"))?;
            show(ui, &answer, || format!("{vm}: accepted\n"))?;
        }
        ContractCommand::Reserve { file, vm, hold } => {
            return reserve((file, vm.as_deref()), *hold, global, ui);
        }
        ContractCommand::Release { vm } => {
            let released = Client::running(&global.run_dir)?.release(vm)?;
            anyhow::ensure!(
                released,
                "nothing is reserved for a VM `{vm}`: `rtvirtio status` names those that are about to arrive"
            );
            show(ui, &json!({ "vm": vm, "given_back": true }), || format!("{vm}: the room is given back\n"))?;
        }
        ContractCommand::Plan { answer: Some(answer) } => {
            let client = Client::running(&global.run_dir)?;
            let (path, word) = match answer {
                PlanAnswer::Accept => ("/v1/plan/accept", "accepted"),
                PlanAnswer::Refuse => ("/v1/plan/refuse", "refused"),
            };
            let said: Value = client.post(path)?;
            show(ui, &said, || format!("the plan is {word}\n"))?;
        }
        ContractCommand::Plan { answer: None } => {
            let client = Client::running(&global.run_dir)?;
            let plan: PlanSnapshot = client.get("/v1/plan")?;
            show(ui, &plan, || service::plan_text(&plan, true))?;
            return Ok(if plan.is_whole() { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) });
        }
        ContractCommand::Waits { vm } => {
            let client = Client::running(&global.run_dir)?;
            let mut seen: WaitsObservation = client.get("/v1/waits")?;
            seen.rows.retain(|row| vm.as_ref().is_none_or(|vm| row.vm == *vm));
            show(ui, &seen, || waits::text(&seen))?;
        }
        ContractCommand::Show { vm } => {
            let status = state(args, global, ui)?;
            let chosen: Vec<&VmSnapshot> =
                status.vms.iter().filter(|one| vm.as_ref().is_none_or(|vm| one.name == *vm)).collect();
            anyhow::ensure!(
                vm.is_none() || !chosen.is_empty(),
                "no contract names a VM `{}`: `rtvirtio contract show` lists those that there are",
                vm.as_deref().unwrap_or_default()
            );
            let seen = observed(global);
            let value: Vec<Value> = chosen
                .iter()
                .map(|vm| {
                    let mut value = serde_json::to_value(vm)?;
                    value["observed"] = seen
                        .as_ref()
                        .map_or(Ok(Value::Null), |seen| serde_json::to_value(seen.vms.get(&vm.name)))?;
                    Ok(value)
                })
                .collect::<Result<_, serde_json::Error>>()?;
            show(ui, &value, || chosen.iter().map(|vm| service::shown(vm, &seen)).collect())?;
            return Ok(service::exit_code(&status));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `rtvirtio contract reserve`: nothing is reserved for a contract that does not fit.
fn reserve(
    (file, vm): (&Path, Option<&str>),
    hold: Option<Nanos>,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    let described = if file == Path::new("-") {
        let mut text = String::new();
        io::stdin().take(DATA_LIMIT).read_to_string(&mut text).context("standard input")?;
        text
    } else {
        read_config_text(file, DATA_LIMIT).with_context(|| file.display().to_string())?
    };
    let answer = match Client::running(&global.run_dir)?.reserve(&described, vm, hold) {
        Err(ClientError::Refused { status: 409, why }) => {
            if ui.json {
                show(ui, &json!({ "state": "refused", "why": why }), String::new)?;
            }
            print_error(&format!("rtvirtio: {}", terminal(&why, false)));
            return Ok(ExitCode::from(INFEASIBLE));
        }
        answer => answer?,
    };
    show(ui, &answer, || match &answer {
        ArrivalAnswer::NoContract => {
            "the VM has no contract: it may come, and nothing is reserved\n".to_owned()
        }
        ArrivalAnswer::Reserved { vm, until } => format!("{}: reserved until {until}\n", terminal(vm, false)),
        ArrivalAnswer::Counted { vm, contract } => {
            let [vm, contract] = [vm, contract].map(|text| terminal(text, false));
            format!("{vm}: {contract} counts on this host, and is admitted\n")
        }
        ArrivalAnswer::Observed => {
            "the service only observes: the VM may come, and nothing is reserved\n".to_owned()
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// `rtvirtio contract set`: a contract that does not fit is not written.
fn set(
    args: &ContractArgs,
    (vm, spec): (&str, &Path),
    libvirt: bool,
    dry_run: bool,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    need_root("contract set")?;
    let place = if libvirt { None } else { Some(Place::find(args, global, ui)?) };
    let fit = fits(args, (vm, spec), place.as_ref(), global)?;
    for (other, why) in &fit.gives_way {
        ui.warn(&format!("the contract of {other} gives way to it: {why}"));
    }
    if let Some(why) = fit.refused {
        let error = ContractFileError::DoesNotFit { vm: vm.to_owned(), why: why.clone() };
        if ui.json {
            show(ui, &json!({ "vm": vm, "fits": false, "why": why }), String::new)?;
        }
        print_error(&format!("rtvirtio: {}", terminal(&error.to_string(), false)));
        return Ok(ExitCode::from(INFEASIBLE));
    }
    if let Some(why) = &fit.uncounted {
        ui.warn(why);
    }
    if dry_run {
        let gives_way: Vec<&String> = fit.gives_way.iter().map(|(vm, _)| vm).collect();
        let value = json!({ "vm": vm, "fits": true, "gives_way": gives_way, "uncounted": fit.uncounted });
        show(ui, &value, || format!("the contract of {vm} fits; nothing was written\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(place) = place else { return set_in_metadata(vm, spec, global, ui) };
    let file = contract_files::set(&place.dir, vm, spec)?;
    let id = contract_files::contract_id(&file, vm)?;
    // The file is written, even if the service cannot be asked.
    let stands = place.service.as_ref().and_then(|client| {
        client.wait_for_contract(vm, &id, TAKEN_UP).unwrap_or_else(|e| {
            ui.warn(&e.to_string());
            None
        })
    });
    if place.service.is_some() && stands.is_none() {
        ui.step(&format!("rtvirtiod is processing it: `rtvirtio contract show {vm}` shows its state"));
    }
    if !place.runs {
        ui.step(NOT_KEPT);
    }
    show(ui, &json!({ "vm": vm, "file": file, "service": stands }), || {
        let stands: Vec<&VmSnapshot> = stands.iter().collect();
        format!("wrote {}\n{}", file.display(), vm_lines(&stands, false))
    })?;
    Ok(match stands.map(|vm| vm.state) {
        Some(VmState::Refused) => ExitCode::from(INFEASIBLE),
        Some(VmState::Failed) => ExitCode::from(CONFLICT),
        _ => ExitCode::SUCCESS,
    })
}

/// Whether a VM's part of a spec is admitted next to the existing contracts.
fn fits(
    args: &ContractArgs,
    (vm, spec): (&str, &Path),
    place: Option<&Place>,
    global: &Global,
) -> anyhow::Result<Fit> {
    let new = contract_files::candidate(vm, spec)?;
    let status = Client::status_of(&global.run_dir).ok().flatten();
    let contracts = place.map_or_else(
        || contract_files::directory(args.contracts.as_deref(), status.as_ref()).0,
        |place| place.dir.clone(),
    );
    let mut config = Config::load(Path::new(CONFIG_FILE))?;
    if let Some(status) = status {
        config.libvirt = status.libvirt;
    }
    let places = Places { dirs: global.dirs(), contracts, specs: Vec::new() };
    fit(&places, &config, vm, &new)
        .map_err(|why| anyhow::anyhow!("whether the contract of {vm} fits cannot be determined: {why}"))
}

fn set_in_metadata(vm: &str, spec: &Path, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let service = Client::status_of(&global.run_dir);
    let domain = contract_files::set_in_metadata(|uri| Box::new(Virsh::new(uri)), vm, spec)?;
    ui.step(&match service {
        Ok(None) => NOT_KEPT.to_owned(),
        Ok(Some(Snapshot { libvirt: Some(uri), .. })) => {
            format!(
                "rtvirtiod reads the metadata of {uri} every 15 s; a contract file of the VM counts before it"
            )
        }
        Ok(Some(_)) => "rtvirtiod does not read it: its configuration has no `libvirt`".to_owned(),
        Err(e) => e.to_string(),
    });
    show(ui, &json!({ "vm": vm, "domain": domain }), || format!("wrote the metadata of domain {domain}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Service that keeps the contracts of this state directory and listens in another run directory;
/// `None` where none does.
fn elsewhere(global: &Global) -> anyhow::Result<Option<String>> {
    let run = std::path::absolute(&global.run_dir)?;
    Ok(rtvirtio_daemon::running(&global.dirs())?.map(|service| {
        let words = service.description();
        if service.is_elsewhere(&run) {
            format!("{words} manages the contracts of this state directory: use its --run-dir")
        } else {
            format!("{words} runs but does not listen: it is starting or stopping, try again")
        }
    }))
}

/// Directory for contract files, and its service.
struct Place {
    dir: PathBuf,
    /// Whether a service runs.
    runs: bool,
    /// Service that reads the directory; `None` for another directory.
    service: Option<Client>,
}

impl Place {
    /// A service that does not answer may read any directory, so `--contracts` is required then.
    fn find(args: &ContractArgs, global: &Global, ui: &Ui) -> anyhow::Result<Self> {
        let named = args.contracts.as_deref();
        let found = Client::find(&global.run_dir).and_then(|client| {
            let status = client.as_ref().map(Client::status).transpose()?;
            Ok((client, status))
        });
        let (client, status) = match (found, named) {
            (Ok(found), _) => found,
            (Err(e), Some(dir)) => {
                ui.warn(&format!("{e}; whether it reads {} is not known", dir.display()));
                return Ok(Self { dir: dir.to_owned(), runs: true, service: None });
            }
            (Err(e), None) => {
                return Err(anyhow::Error::new(e)
                    .context("which directory rtvirtiod reads is not known: name it with --contracts"));
            }
        };
        if client.is_none() {
            if let Some(why) = elsewhere(global)? {
                let Some(dir) = named else {
                    anyhow::bail!("{why}; or name the directory that it reads with --contracts");
                };
                ui.warn(&format!("{why}; whether it reads {} is not known", dir.display()));
                return Ok(Self { dir: dir.to_owned(), runs: true, service: None });
            }
        }
        let (dir, other) = contract_files::directory(named, status.as_ref());
        if let Some(other) = &other {
            ui.warn(&format!(
                "rtvirtiod reads the contracts in {}, not those in {}: without --contracts the command uses the former",
                other.display(),
                dir.display()
            ));
        }
        Ok(Self { dir, runs: client.is_some(), service: client.filter(|_| other.is_none()) })
    }
}

/// Observed targets of the service, or why there are none.
fn observed(global: &Global) -> Result<ObservedTargets, String> {
    match Client::find(&global.run_dir) {
        Ok(Some(client)) => client.get("/v1/observation").map_err(|e| e.to_string()),
        Ok(None) => Err("rtvirtiod does not run".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

/// State of the contracts: as the service reports it, or from a single pass over the host where
/// none runs.
fn state(args: &ContractArgs, global: &Global, ui: &Ui) -> anyhow::Result<Snapshot> {
    if let Some(status) = Client::status_of(&global.run_dir)? {
        ui.step(&format!("as rtvirtiod (process {}) keeps them", status.pid));
        return Ok(status);
    }
    if let Some(why) = elsewhere(global)? {
        anyhow::bail!(why);
    }
    let (contracts, _) = contract_files::directory(args.contracts.as_deref(), None);
    ui.step(&format!(
        "rtvirtiod does not run: the contracts in {}, and the host as it is",
        contracts.display()
    ));
    let config = Config::load(Path::new(CONFIG_FILE))?;
    Ok(look_once(&Places { dirs: global.dirs(), contracts, specs: Vec::new() }, &config))
}
