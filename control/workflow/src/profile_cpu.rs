//! Throughput of a VM over its CPU budget, alone and next to a loaded neighbour (the reservations
//! paper's Figs. 1b and 2).

mod load;
mod steps;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_apply::Session;
use rtvirtio_cpu::{
    Backend, CPU_PROFILE_SCHEMA, Contract, CpuProfile, Neighbour, Order, Probe, Run, Setup, Surroundings,
    choose, probe, tick,
};
use rtvirtio_kernel::{Root, process};
use rtvirtio_spec::{CpuNeed, Priorities, Vm as SpecVm};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, Thread, VmHandle};

use self::load::{Background, Load};
use self::steps::{Step, steps};
use crate::acting;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::find;
use crate::host::{cpu_model, kernel_release};
use crate::in_force;
use crate::progress::Progress;
use crate::scope_files;
use crate::scoped_contracts::{ScopedContracts, VmContract};

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
    fn threads(&self) -> Result<Vec<Thread>> {
        let threads = discover(&Root::default(), &self.handle);
        threads.with_context(|| format!("{}: is it still running?", self.name))
    }

    /// CPU time used so far: that of its processes, in which threads that have ended are counted
    /// too, and of the kernel's threads that work for it.
    fn cpu_time(&self) -> Result<Duration> {
        let mut sum = self.threads()?.iter().filter(|t| t.kernel).map(|t| t.cpu_time).sum();
        for pid in &self.handle.pids {
            sum += process::cpu_time(&Root::default(), *pid)?;
        }
        Ok(sum)
    }
}

/// CPU time that these threads used since `before` was read; one that has ended meanwhile is left
/// out.
fn used(before: &[Thread], now: &[Thread]) -> Vec<(u32, Duration)> {
    let since = |t: &Thread| {
        let old = before.iter().find(|b| (b.tid, b.start) == (t.tid, t.start));
        (t.tid, t.cpu_time.saturating_sub(old.map_or(Duration::ZERO, |b| b.cpu_time)))
    };
    now.iter().map(since).collect()
}

/// Load of a measured VM, as the user gives it.
#[derive(Clone, Copy, Debug)]
pub enum LoadWith<'a> {
    /// Requests to this web server, which follow each other at once.
    Url(&'a str),
    /// A shell command whose last printed word is the number of answered requests per second.
    Command(&'a str),
}

/// Options of the measurement.
pub struct ProfileCpuOptions<'a> {
    /// The VM: its name in the spec or in the lab that is up, or the process id of its VMM.
    pub vm: &'a str,
    /// The VMs of the spec, and its file.
    pub spec: Option<(&'a [SpecVm], &'a Path)>,
    /// Load of the VM.
    pub load: LoadWith<'a>,
    /// Connections at a time to a web server.
    pub connections: usize,
    /// A VM that is loaded meanwhile, and its load.
    pub neighbour: Option<(&'a str, LoadWith<'a>)>,
    /// The neighbour's budgets, percent of the period.
    pub neighbour_budgets: &'a [u64],
    /// The VM's budgets, percent of the period.
    pub budgets: &'a [u64],
    /// Period of the contracts; `None` for what the spec's demand allows, else 100 ms.
    pub period: Option<Nanos>,
    /// Length of each measurement.
    pub length: Nanos,
    /// Number of measurements of each budget.
    pub repeat: usize,
    /// Time and version, as text for the profile.
    pub generated: &'a str,
    /// Path of the profile; `None` for the one in the state directory.
    pub out: Option<&'a Path>,
    /// Saves the measurements so far, so that the same call continues there.
    pub write: &'a dyn Fn(&Path, &[u8]) -> Result<()>,
}

/// Measures a VM; contracts are applied, journaled and put back. The profile is not saved yet:
/// [`partial`] is to be removed once it is.
///
/// # Errors
/// [`Kind::InForce`](crate::Kind::InForce) while a plan is in force, or the service keeps a
/// contract of one of the VMs; [`Kind::Cancelled`](crate::Kind::Cancelled) when the user stops it.
pub fn profile_cpu(
    options: &ProfileCpuOptions<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<(CpuProfile, PathBuf)> {
    let vm = find_vm(options.vm, options.load, options, dirs, progress)?;
    let neighbour = match options.neighbour {
        None => None,
        Some((name, load)) => Some(find_vm(name, load, options, dirs, progress)?),
    };
    if neighbour.as_ref().is_some_and(|n| n.handle.pids == vm.handle.pids) {
        bail!(Argument, "the neighbour is {} itself: name another VM", vm.name);
    }
    let probe = probe(&Root::default())?;
    let backend = backend(&probe, vm.order)?;
    let spec = options.spec.map(|(vms, _)| vms);
    let setup = setup(options, &vm, neighbour.as_ref(), spec, &probe, backend, progress)?;
    let path = options.out.map_or_else(|| dirs.cpu_profile(&vm.name), Path::to_owned);
    let session = Session::open(&dirs.state)?;
    if session.in_force()? {
        bail!(
            InForce,
            "a plan is in force, and the VM must be measured as it is without one: `rtvirtio revert` first"
        );
    }
    for vm in [&vm].into_iter().chain(&neighbour) {
        refuse_kept(vm, dirs)?;
    }
    // What is journaled from here on belongs to no plan.
    in_force::forget(&dirs.state)?;
    acting::note(dirs)?;
    let contracts = ScopedContracts::new(session, probe, backend, progress);
    let length = Duration::from_nanos(options.length.0);
    let mut bench = Bench { vm, neighbour, contracts, setup, length, split: Vec::new() };
    let measured = bench.measure(&path, options, progress);
    drop(bench);
    acting::settle(dirs)?;
    Ok((measured?, path))
}

/// Refuses a VM whose contract the service keeps: it would be measured too, and captured as what
/// was there before.
fn refuse_kept(vm: &Vm, dirs: &Dirs) -> Result<()> {
    for name in scope_files::vms(dirs)? {
        let Some(kept) = scope_files::in_force(dirs, &name)? else { continue };
        if kept.processes.iter().any(|process| vm.handle.pids.contains(&process.pid) && process.is_alive()) {
            bail!(
                InForce,
                "rtvirtiod keeps the contract of {name}, and the VM must be measured as it is without one: `rtvirtio contract remove {name}` first, \
                 or stop it and `rtvirtio revert`"
            );
        }
    }
    Ok(())
}

/// File of an unfinished measurement.
#[must_use]
pub fn partial(path: &Path) -> PathBuf {
    path.with_extension("partial.json")
}

/// A VM of the spec or the lab by its name, or any by its process.
fn find_vm(
    name: &str,
    load: LoadWith<'_>,
    options: &ProfileCpuOptions<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Vm> {
    let load = match load {
        LoadWith::Url(url) => Load::http(url, options.connections)?,
        LoadWith::Command(command) => Load::command(command)?,
    };
    let of_spec = options.spec.and_then(|(vms, _)| vms.iter().find(|vm| vm.name == name));
    let order = match of_spec.and_then(|v| v.cpu.priorities) {
        Some(Priorities::Rt) => Order::Rt,
        None => Order::Contract,
    };
    let file = options.spec.map(|(_, file)| file.to_string_lossy());
    let (target, only, saved) = match name.parse::<u32>() {
        Ok(_) if of_spec.is_none() => (Some(name), None, format!("pid-{name}")),
        _ => (file.as_deref(), Some(name), name.to_owned()),
    };
    let one = find::find(target, only, dirs)?.into_iter().next().context("no such VM")?;
    Ok(Vm { name: saved, handle: one.handle(progress)?, order, load })
}

/// The mechanism that `apply` would take.
fn backend(probe: &Probe, order: Order) -> Result<Backend> {
    match choose(probe, None, order == Order::Rt).map(|f| f.backend) {
        Some(backend) if backend != Backend::Throttle => Ok(backend),
        _ => {
            let why: Vec<String> = probe.missing.iter().map(|(b, why)| format!("{b}: {why}")).collect();
            bail!(System, "no mechanism of this kernel gives such a VM a budget: {}", why.join("; "))
        }
    }
}

/// The measurement: its set-up with all that it depends on.
fn setup(
    options: &ProfileCpuOptions<'_>,
    vm: &Vm,
    neighbour: Option<&Vm>,
    spec: Option<&[SpecVm]>,
    probe: &Probe,
    backend: Backend,
    progress: &dyn Progress,
) -> Result<Setup> {
    let need = spec.and_then(|vms| vms.iter().find(|v| v.name == vm.name)).and_then(|v| v.cpu.need);
    let period = match (options.period, need) {
        (Some(period), _) => period,
        (None, Some(CpuNeed::Demand { deadline, .. })) => {
            let period = Surroundings { backend, tick: tick(), others: 0 }.period_for(deadline);
            progress.step(&format!("period {period}, for the deadline of {deadline}"));
            period
        }
        (None, Some(CpuNeed::Contract { period, .. })) => period,
        (None, None) => PERIOD,
    };
    if !(PERIODS[0]..=PERIODS[1]).contains(&period) {
        bail!(Argument, "a period of {period}: it is {} to {}", PERIODS[0], PERIODS[1]);
    }
    if options.length.0 < period.0 * LEAST_PERIODS {
        bail!(
            Argument,
            "{} is less than {LEAST_PERIODS} periods of {period}: measure longer with --for",
            options.length
        );
    }
    if options.repeat == 0 || options.budgets.is_empty() {
        bail!(Argument, "nothing is to be measured: at least one budget and --repeat 1");
    }
    let all = options.budgets.iter().chain(neighbour.iter().flat_map(|_| options.neighbour_budgets));
    if let Some(wrong) = all.clone().find(|b| !(1..=100).contains(*b)) {
        bail!(Argument, "a budget of {wrong} %: it is 1 to 100 % of the period");
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
    let budgets = keep(options.budgets);
    let left_out: Vec<String> =
        options.budgets.iter().filter(|b| !budgets.contains(b)).map(ToString::to_string).collect();
    let limits = format!("budgets are {LEAST_BUDGET} or more, and {:.0} % of each CPU is free", free * 100.0);
    if budgets.is_empty() {
        bail!(Argument, "none of the budgets can be given in a period of {period}: {limits}");
    }
    if !left_out.is_empty() {
        progress.step(&format!("left out: {} % ({limits})", left_out.join(", ")));
    }
    let vcpus = vm.threads()?.iter().filter(|t| matches!(t.role, Role::Vcpu(_))).count();
    Ok(Setup {
        vm: vm.name.clone(),
        kernel: kernel_release(),
        cpu_model: cpu_model().to_owned(),
        cpus: probe.cpus,
        vcpus,
        backend,
        order: vm.order,
        period_us: period.0 / 1000,
        seconds: options.length.as_secs_f64(),
        load: vm.load.to_string(),
        neighbour: neighbour.map(|n| Neighbour {
            vm: n.name.clone(),
            load: n.load.to_string(),
            budgets: keep(options.neighbour_budgets),
        }),
        budgets,
        repeat: options.repeat,
    })
}

/// Contract of a measured VM; `used` is the CPU time of its threads, for a split by use.
fn contract_of(vm: &Vm, contract: Contract, used: Vec<(u32, Duration)>) -> VmContract<'_> {
    let (handle, order) = (vm.handle.clone(), vm.order);
    VmContract { vm: &vm.name, handle, vcpus_only: false, contract, order, used, urgency: None }
}

/// VMs, contracts and what is to be measured.
struct Bench<'a> {
    vm: Vm,
    neighbour: Option<Vm>,
    contracts: ScopedContracts<'a>,
    setup: Setup,
    length: Duration,
    /// CPU time of the VM's threads under load, for a split by use.
    split: Vec<(u32, Duration)>,
}

impl Bench<'_> {
    /// All measurements, or those that an interrupted measurement lacks.
    fn measure(
        &mut self,
        path: &Path,
        options: &ProfileCpuOptions<'_>,
        progress: &dyn Progress,
    ) -> Result<CpuProfile> {
        let free = choose(self.contracts.probe(), Some(self.setup.backend), false);
        let all = steps(&self.setup, free.map_or(0.0, |f| f.grant.free()));
        let each = self.vm.load.warm_up() + self.length;
        let minutes = (each * u32::try_from(all.len() + 1).unwrap_or(u32::MAX)).as_secs().div_ceil(60);
        progress.step(&format!(
            "{} measurements of {:.1} s, about {minutes} min",
            all.len(),
            each.as_secs_f64()
        ));
        // Before any contract: that the load works, which thread does how much, and what a contract
        // could give at most.
        let before = self.vm.threads()?;
        let free = self.vm.load.measure(self.length, progress, &mut || Ok(Duration::ZERO))?;
        if free.requests_per_s <= 0.0 {
            bail!(
                NotRunning,
                "{}: its load answers nothing, without any contract: {}",
                self.vm.name,
                self.vm.load
            );
        }
        self.split = used(&before, &self.vm.threads()?);
        let mut profile = CpuProfile {
            schema: CPU_PROFILE_SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            generated: options.generated.to_owned(),
            setup: self.setup.clone(),
            free_requests_per_s: free.requests_per_s,
            runs: Vec::new(),
        };
        let partial = partial(path);
        if let Ok(old) = CpuProfile::load(&partial) {
            if old.setup == self.setup && old.runs.iter().zip(&all).all(|(run, step)| step.is(run)) {
                progress.step(&format!(
                    "going on after {} measurements of {}",
                    old.runs.len(),
                    old.generated
                ));
                profile = old;
            }
        }
        let mut bar =
            progress.bar(&format!("throughput of {} over its budget", self.vm.name), all.len() as u64);
        for (i, step) in all.iter().enumerate().skip(profile.runs.len()) {
            bar.set(i as u64);
            profile.runs.push(self.step(*step, progress).with_context(|| step.to_string())?);
            (options.write)(&partial, &serde_json::to_vec(&profile)?)?;
        }
        self.contracts.release()?;
        Ok(profile)
    }

    /// Measures one step, under its contracts.
    fn step(&mut self, step: Step, progress: &dyn Progress) -> Result<Run> {
        progress.check_cancelled()?;
        let period = Nanos(self.setup.period_us * 1000);
        let part = |percent: u64| {
            Contract::new(Nanos(period.0 * percent / 100), period).context("a budget above its period")
        };
        let mut vm_contracts = vec![contract_of(&self.vm, part(step.budget)?, self.split.clone())];
        let loaded = match (step.neighbour, &self.neighbour) {
            (Some(percent), Some(neighbour)) => {
                // First: of two equal periods it stands above, and the VM is measured where it has
                // more to lose.
                vm_contracts.insert(0, contract_of(neighbour, part(percent)?, Vec::new()));
                Some(neighbour)
            }
            _ => None,
        };
        self.contracts.set(&vm_contracts)?;
        let loaded = loaded.map(|n| n.load.background(self.length)).transpose()?;
        let vm = &self.vm;
        let mut last = None;
        let mut cpu = || {
            let now = vm.cpu_time()?;
            let since = now.saturating_sub(last.unwrap_or(now));
            last = Some(now);
            Ok(since)
        };
        let begin = Instant::now();
        let throughput = vm.load.measure(self.length, progress, &mut cpu)?;
        let neighbour = loaded.map(|b| Background::finish(b, begin.elapsed())).transpose()?;
        Ok(Run {
            round: step.round,
            budget_percent: step.budget,
            neighbour_percent: step.neighbour,
            requests_per_s: throughput.requests_per_s,
            cpu: throughput.cpu,
            neighbour_requests_per_s: neighbour.flatten(),
        })
    }
}
