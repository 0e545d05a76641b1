//! `rtvirtio contract`.

use std::process::ExitCode;

use rtvirtio_console::{CONFLICT, Global, Ui, need_root, show};
use rtvirtio_daemon::api::Client;
use rtvirtio_daemon::observe::WaitsObservation;
use rtvirtio_daemon::{PlanSnapshot, Snapshot, VmSnapshot, contract_files, socket};
use rtvirtio_vmm::libvirt::{Virsh, set_contract};
use rtvirtio_workflow::Progress as _;
use serde_json::{Value, json};

use super::service::{self, vm_lines};
use super::waits;
use crate::args::{ContractArgs, ContractCommand, PlanAnswer};

/// `rtvirtio contract`.
pub fn run(args: &ContractArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let dir = &args.contracts;
    let running = Client::find(&global.run_dir).is_some();
    let client = || Client::new(socket(&global.run_dir));
    let hint = || {
        if !running {
            ui.step(
                "rtvirtiod does not run: the contract is kept once it does (`systemctl start rtvirtiod`)",
            );
        }
    };
    match &args.command {
        ContractCommand::Set { vm, spec, libvirt: true } => {
            need_root("contract set")?;
            let domain = contract_files::set_in_metadata(|uri| Box::new(Virsh::new(uri)), vm, spec)?;
            hint();
            ui.step("the service reads it where its configuration has `libvirt`; a file of contracts.d counts before it");
            show(ui, &json!({ "vm": vm, "domain": domain }), || {
                format!("wrote the metadata of domain {domain}\n")
            })?;
        }
        ContractCommand::Set { vm, spec, libvirt: false } => {
            need_root("contract set")?;
            let file = contract_files::set(dir, vm, spec)?;
            hint();
            show(ui, &json!({ "vm": vm, "file": file }), || format!("wrote {}\n", file.display()))?;
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
            let file = contract_files::remove(dir, vm)?;
            if !running {
                ui.step("rtvirtiod does not run: what is in force for the VM stays until it does, or until `rtvirtio revert`");
            }
            show(ui, &json!({ "vm": vm, "file": file }), || {
                format!("removed {vm} from {}\n", file.display())
            })?;
        }
        ContractCommand::Accept { vm } => {
            let answer: Value = client().post(&format!("/v1/vms/{vm}/accept"))?;
            show(ui, &answer, || format!("{vm}: accepted\n"))?;
        }
        ContractCommand::Plan { answer: Some(answer) } => {
            let (path, word) = match answer {
                PlanAnswer::Accept => ("/v1/plan/accept", "accepted"),
                PlanAnswer::Refuse => ("/v1/plan/refuse", "refused"),
            };
            let said: Value = client().post(path)?;
            show(ui, &said, || format!("the plan is {word}\n"))?;
        }
        ContractCommand::Plan { answer: None } => {
            let plan: PlanSnapshot = client().get("/v1/plan")?;
            show(ui, &plan, || service::plan_text(&plan, true))?;
            return Ok(if plan.is_whole() { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) });
        }
        ContractCommand::Waits { vm } => {
            let mut seen: WaitsObservation = client().get("/v1/waits")?;
            seen.rows.retain(|row| vm.as_ref().is_none_or(|vm| row.vm == *vm));
            show(ui, &seen, || waits::text(&seen))?;
        }
        ContractCommand::Show { vm } => {
            let status: Snapshot = client().get("/v1/status")?;
            let chosen: Vec<&VmSnapshot> =
                status.vms.iter().filter(|one| vm.as_ref().is_none_or(|vm| one.name == *vm)).collect();
            anyhow::ensure!(
                vm.is_none() || !chosen.is_empty(),
                "no contract names a VM `{}`: `rtvirtio contract show` lists those that there are",
                vm.as_deref().unwrap_or_default()
            );
            show(ui, &chosen, || vm_lines(&chosen, true))?;
            return Ok(service::exit_code(&status));
        }
    }
    Ok(ExitCode::SUCCESS)
}
