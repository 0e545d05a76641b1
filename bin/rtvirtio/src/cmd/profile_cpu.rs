//! `rtvirtio profile cpu`: throughput of a VM over its CPU budget, alone and beside a loaded neighbour (the reservations paper's Figs. 1b and 2).

mod load;
mod steps;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_apply::Session;
use rtvirtio_cpu::{
    Backend, CPU_PROFILE_SCHEMA, Contract, CpuProfile, Neighbour, Order, Point, Probe, Run, Setup,
    Surroundings, choose, probe, tick,
};
use rtvirtio_kernel::{Root, process};
use rtvirtio_report::text::{Column, Table};
use rtvirtio_spec::{CpuNeed, Priorities, Spec};
use rtvirtio_units::{Iops, Nanos};
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, Thread, VmHandle};

use self::load::{Background, Load};
use self::steps::{Step, steps};
use super::verify::generated;
use super::{apply, show, style, write_result};
use crate::args::{Global, ProfileCpuArgs};
use crate::contracts::{Contracts, Wanted};
use crate::cpu_plan;
use crate::site::{self, kernel_release};
use crate::ui::Ui;
use crate::vm_threads;

/// The paper's period, where no deadline asks for another one.
const PERIOD: Nanos = Nanos::from_millis(100);
/// A measurement shorter than so many periods counts parts of them.
const LEAST_PERIODS: u64 = 10;
/// Periods of a contract: the spec's.
const PERIODS: [Nanos; 2] = [Nanos::from_millis(1), Nanos::from_millis(1000)];
/// Shortest budget: the spec's.
const LEAST_BUDGET: Nanos = Nanos::from_millis(1);

/// A VM that is measured.
struct Vm {
    name: String,
    handle: VmHandle,
    order: Order,
    load: Load,
}

impl Vm {
    fn threads(&self) -> anyhow::Result<Vec<Thread>> {
        let threads = discover(&Root::default(), &self.handle);
        threads.with_context(|| format!("{}: is it still running?", self.name))
    }

    /// CPU time used so far: that of its processes, in which threads that have ended are counted too, and of the kernel's threads that work for it.
    fn cpu_time(&self) -> anyhow::Result<Duration> {
        let mut sum = self.threads()?.iter().filter(|t| t.kernel).map(|t| t.cpu_time).sum();
        for pid in &self.handle.pids {
            sum += process::cpu_time(&Root::default(), *pid)?;
        }
        Ok(sum)
    }
}

/// CPU time that these threads used since `before` was read; one that has ended meanwhile is left out.
fn used(before: &[Thread], now: &[Thread]) -> Vec<(u32, Duration)> {
    let since = |t: &Thread| {
        let old = before.iter().find(|b| (b.tid, b.start) == (t.tid, t.start));
        (t.tid, t.cpu_time.saturating_sub(old.map_or(Duration::ZERO, |b| b.cpu_time)))
    };
    now.iter().map(since).collect()
}

/// `rtvirtio profile cpu`; root was asked for.
pub fn run(args: &ProfileCpuArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let _lock = site::lock(global)?;
    let spec = args.spec.as_deref().map(site::load_spec).transpose()?;
    let load = load_of(args.url.as_deref(), args.load.as_deref(), args.connections)?;
    let vm = find(&args.vm, load, spec.as_ref(), args, global, ui)?;
    let neighbour = match &args.neighbour {
        None => None,
        Some(name) => {
            let load =
                load_of(args.neighbour_url.as_deref(), args.neighbour_load.as_deref(), args.connections)
                    .context("say how the neighbour is loaded: --neighbour-url or --neighbour-load")?;
            Some(find(name, load, spec.as_ref(), args, global, ui)?)
        }
    };
    if neighbour.as_ref().is_some_and(|n| n.handle.pids == vm.handle.pids) {
        bail!("the neighbour is {} itself: name another VM", vm.name);
    }
    let probe = probe(&Root::default())?;
    let backend = backend(&probe, vm.order)?;
    let setup = setup(args, &vm, neighbour.as_ref(), spec.as_ref(), &probe, backend, ui)?;
    let path = args.out.clone().unwrap_or_else(|| cpu_plan::profile_path(global, &vm.name));

    let session = Session::open(&global.state_dir)?;
    if session.in_force()? {
        bail!(
            "a plan is in force, and the VM must be measured as it is without one: `rtvirtio revert` first"
        );
    }
    // What is journaled from here on belongs to no plan.
    apply::forget_plan(&global.state_dir)?;
    let contracts = Contracts::new(session, probe, backend);
    let length = Duration::from_nanos(args.length.0);
    let mut bench = Bench { vm, neighbour, contracts, setup, length, split: Vec::new() };
    let profile = bench.measure(&path, global, ui)?;
    let json = profile.to_json()?;
    // Shown first: a full disk must not cost the measurement.
    show(ui, &json, || text(&profile))?;
    write_result(&path, serde_json::to_string_pretty(&json)?.as_bytes(), global)?;
    // It holds nothing more than the profile.
    let _ = std::fs::remove_file(partial(&path));
    ui.step(&format!("saved {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

/// What loads a VM.
fn load_of(url: Option<&str>, command: Option<&str>, connections: usize) -> anyhow::Result<Load> {
    match (url, command) {
        (Some(url), _) => Load::http(url, connections),
        (None, Some(command)) => Load::command(command),
        (None, None) => bail!("nothing loads the VM"),
    }
}

/// A VM of the spec or the lab by its name, or any by its process.
fn find(
    name: &str,
    load: Load,
    spec: Option<&Spec>,
    args: &ProfileCpuArgs,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<Vm> {
    let of_spec = spec.and_then(|s| s.vms.iter().find(|v| v.name == name));
    let order = match of_spec.and_then(|v| v.cpu.priorities) {
        Some(Priorities::Rt) => Order::Rt,
        None => Order::Contract,
    };
    let file = args.spec.as_deref().map(Path::to_string_lossy);
    let (target, only, saved) = match name.parse::<u32>() {
        Ok(_) if of_spec.is_none() => (Some(name), None, format!("pid-{name}")),
        _ => (file.as_deref(), Some(name), name.to_owned()),
    };
    let found = vm_threads::find(target, only, global, ui)?;
    let one = found.into_iter().next().context("no such VM")?;
    Ok(Vm { name: saved, handle: one.handle, order, load })
}

/// The mechanism that `apply` would take.
fn backend(probe: &Probe, order: Order) -> anyhow::Result<Backend> {
    match choose(probe, None, order == Order::Rt).map(|f| f.backend) {
        Some(backend) if backend != Backend::Throttle => Ok(backend),
        _ => {
            let why: Vec<String> = probe.missing.iter().map(|(b, why)| format!("{b}: {why}")).collect();
            bail!("no mechanism of this kernel gives such a VM a budget: {}", why.join("; "))
        }
    }
}

/// What is to be measured, with what cannot be left out.
fn setup(
    args: &ProfileCpuArgs,
    vm: &Vm,
    neighbour: Option<&Vm>,
    spec: Option<&Spec>,
    probe: &Probe,
    backend: Backend,
    ui: &Ui,
) -> anyhow::Result<Setup> {
    let need = spec.and_then(|s| s.vms.iter().find(|v| v.name == vm.name)).and_then(|v| v.cpu.need);
    let period = match (args.period, need) {
        (Some(period), _) => period,
        (None, Some(CpuNeed::Demand { deadline, .. })) => {
            let period = Surroundings { backend, tick: tick(), others: 0 }.period_for(deadline);
            ui.step(&format!("period {period}, for the deadline of {deadline}"));
            period
        }
        (None, Some(CpuNeed::Contract { period, .. })) => period,
        (None, None) => PERIOD,
    };
    if !(PERIODS[0]..=PERIODS[1]).contains(&period) {
        bail!("a period of {period}: it is {} to {}", PERIODS[0], PERIODS[1]);
    }
    if args.length.0 < period.0 * LEAST_PERIODS {
        bail!("{} is less than {LEAST_PERIODS} periods of {period}: measure longer with --for", args.length);
    }
    if args.repeat == 0 || args.budgets.is_empty() {
        bail!("nothing is to be measured: at least one budget and --repeat 1");
    }
    let all = args.budgets.iter().chain(neighbour.iter().flat_map(|_| &args.neighbour_budgets));
    if let Some(wrong) = all.clone().find(|b| !(1..=100).contains(*b)) {
        bail!("a budget of {wrong} %: it is 1 to 100 % of the period");
    }
    let free = choose(probe, Some(backend), false).map_or(0.0, |f| f.grant.free());
    let fits =
        |percent: u64| percent as f64 / 100.0 <= free + 1e-6 && period.0 * percent / 100 >= LEAST_BUDGET.0;
    let keep = |budgets: &[u64]| {
        let mut kept: Vec<u64> = budgets.iter().copied().filter(|b| fits(*b)).collect();
        kept.sort_unstable();
        kept.dedup();
        kept
    };
    let budgets = keep(&args.budgets);
    let left_out: Vec<String> =
        args.budgets.iter().filter(|b| !budgets.contains(b)).map(ToString::to_string).collect();
    let limits = format!("budgets are {LEAST_BUDGET} or more, and {:.0} % of each CPU is free", free * 100.0);
    if budgets.is_empty() {
        bail!("none of the budgets can be given in a period of {period}: {limits}");
    }
    if !left_out.is_empty() {
        ui.step(&format!("left out: {} % ({limits})", left_out.join(", ")));
    }
    let root = Root::default();
    let cpuinfo = root.read("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    let vcpus = vm.threads()?.iter().filter(|t| matches!(t.role, Role::Vcpu(_))).count();
    Ok(Setup {
        vm: vm.name.clone(),
        kernel: kernel_release(),
        cpu_model: model.map_or("unknown", |m| m.1.trim()).to_owned(),
        cpus: probe.cpus,
        vcpus,
        backend,
        order: vm.order,
        period_us: period.0 / 1000,
        seconds: args.length.as_secs_f64(),
        load: vm.load.to_string(),
        neighbour: neighbour.map(|n| Neighbour {
            vm: n.name.clone(),
            load: n.load.to_string(),
            budgets: keep(&args.neighbour_budgets),
        }),
        budgets,
        repeat: args.repeat,
    })
}

/// Where a measurement that is not finished lies.
fn partial(path: &Path) -> PathBuf {
    path.with_extension("partial.json")
}

/// VMs, contracts and what is to be measured.
struct Bench {
    vm: Vm,
    neighbour: Option<Vm>,
    contracts: Contracts,
    setup: Setup,
    length: Duration,
    /// CPU time of the VM's threads under load, for a split by use.
    split: Vec<(u32, Duration)>,
}

impl Bench {
    /// All of it, or what is left of an earlier one.
    fn measure(&mut self, path: &Path, global: &Global, ui: &Ui) -> anyhow::Result<CpuProfile> {
        let free = choose(self.contracts.probe(), Some(self.setup.backend), false);
        let all = steps(&self.setup, free.map_or(0.0, |f| f.grant.free()));
        let each = self.vm.load.warm_up() + self.length;
        let minutes = (each * u32::try_from(all.len() + 1).unwrap_or(u32::MAX)).as_secs().div_ceil(60);
        ui.step(&format!("{} measurements of {:.1} s, about {minutes} min", all.len(), each.as_secs_f64()));
        // Before any contract: that the load works, which thread does how much, and what a contract could give at most.
        let before = self.vm.threads()?;
        let free = self.vm.load.measure(self.length, ui, &mut || Ok(Duration::ZERO))?;
        if free.requests_per_s <= 0.0 {
            bail!("{}: its load answers nothing, without any contract: {}", self.vm.name, self.vm.load);
        }
        self.split = used(&before, &self.vm.threads()?);
        let mut profile = CpuProfile {
            schema: CPU_PROFILE_SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            generated: generated(),
            setup: self.setup.clone(),
            free_requests_per_s: free.requests_per_s,
            runs: Vec::new(),
        };
        let partial = partial(path);
        if let Ok(old) = CpuProfile::load(&partial) {
            if old.setup == self.setup && old.runs.iter().zip(&all).all(|(run, step)| step.is(run)) {
                ui.step(&format!("going on after {} measurements of {}", old.runs.len(), old.generated));
                profile = old;
            }
        }
        let mut bar = ui.bar(&format!("throughput of {} over its budget", self.vm.name), all.len() as u64);
        for (i, step) in all.iter().enumerate().skip(profile.runs.len()) {
            bar.set(i as u64);
            profile.runs.push(self.step(*step, ui).with_context(|| step.to_string())?);
            write_result(&partial, &serde_json::to_vec(&profile)?, global)?;
        }
        self.contracts.release()?;
        Ok(profile)
    }

    /// One measurement.
    fn step(&mut self, step: Step, ui: &Ui) -> anyhow::Result<Run> {
        ui.check_cancelled()?;
        let period = Nanos(self.setup.period_us * 1000);
        let part = |percent: u64| {
            Contract::new(Nanos(period.0 * percent / 100), period).context("a budget above its period")
        };
        let mut wanted = vec![Wanted {
            vm: &self.vm.name,
            handle: self.vm.handle.clone(),
            vcpus_only: false,
            contract: part(step.budget)?,
            order: self.vm.order,
            used: self.split.clone(),
        }];
        let beside = match (step.neighbour, &self.neighbour) {
            (Some(percent), Some(neighbour)) => {
                // First: of two equal periods it stands above, and the VM is measured where it has more to lose.
                let first = Wanted {
                    vm: &neighbour.name,
                    handle: neighbour.handle.clone(),
                    vcpus_only: false,
                    contract: part(percent)?,
                    order: neighbour.order,
                    used: Vec::new(),
                };
                wanted.insert(0, first);
                Some(neighbour)
            }
            _ => None,
        };
        self.contracts.hold(&wanted)?;
        let beside = beside.map(|n| n.load.background(self.length)).transpose()?;
        let vm = &self.vm;
        let mut last = None;
        let mut cpu = || {
            let now = vm.cpu_time()?;
            let since = now.saturating_sub(last.unwrap_or(now));
            last = Some(now);
            Ok(since)
        };
        let begin = Instant::now();
        let got = vm.load.measure(self.length, ui, &mut cpu)?;
        let neighbour = beside.map(|b| Background::finish(b, begin.elapsed())).transpose()?;
        Ok(Run {
            round: step.round,
            budget_percent: step.budget,
            neighbour_percent: step.neighbour,
            requests_per_s: got.requests_per_s,
            cpu: got.cpu,
            neighbour_requests_per_s: neighbour.flatten(),
        })
    }
}

fn text(profile: &CpuProfile) -> String {
    let s = &profile.setup;
    let mut table = Table::new(vec![
        Column::word("beside"),
        Column::number("budget"),
        Column::number("answered"),
        Column::number("sd"),
        Column::number("at least (95 %)"),
        Column::number("n"),
        Column::number("CPU of one"),
    ]);
    let row = |p: &Point| {
        vec![
            p.neighbour_percent.map_or_else(|| "nobody".to_owned(), |n| format!("{n} %")).into(),
            format!("{} %", p.budget_percent).into(),
            Iops(p.mean).to_string().into(),
            Iops(p.sd).to_string().into(),
            p.lower.map_or_else(|| "-".to_owned(), |l| Iops(l).to_string()).into(),
            p.n.to_string().into(),
            p.cpu_per_request.map_or_else(|| "-".to_owned(), |c| Nanos::from_secs_f64(c).to_string()).into(),
        ]
    };
    for point in profile.points() {
        table.row(row(&point));
    }
    format!(
        "{}: requests answered over its budget in a period of {}, held by {} ({} without a contract)\n{}",
        s.vm,
        profile.period(),
        s.backend,
        Iops(profile.free_requests_per_s),
        table.draw(&style())
    )
}
