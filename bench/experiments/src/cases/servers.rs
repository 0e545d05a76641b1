//! Budget servers for I/O: the mimic of RT-Xen's CPU servers that the RT-VirtIO paper compares with
//! (its section VII-B).
//!
//! RT-Xen (Xi, Wilson, Lu, Gill, EMSOFT 2011) gives each VM a server with a budget per period and
//! runs the servers in rate-monotonic order. Here a budget is a number of requests. A VM that has
//! used its budget up is held back by a throttle limit until its period ends and the budget is
//! replenished in full (the deferrable server of Lehoczky, Sha and Strosnider, 1987). Order comes
//! from BFQ weights, shortest period first, because nothing on a stock kernel dispatches I/O by
//! fixed priority between cgroups.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_apply::Binding;
use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::{Cgroups, Hierarchy, HostError, Root};
use rtvirtio_learn::rig::{Regulator, RegulatorError};
use rtvirtio_spec::Spec;
use rtvirtio_units::{Iops, Nanos};

/// Interval of checks of consumption. A VM may overdraw its budget by its work in this time.
const TICK: Duration = Duration::from_millis(2);
/// Most attempts to lift a limit at the end.
const RELEASES: usize = 50;
/// The limit of a VM whose budget is used up, per second and direction: the least that the kernel
/// takes.
const HELD: u64 = 1;

/// Budget of one VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    /// Requests of the VM in each period.
    pub budget: u64,
    /// Interval between replenishments.
    pub period: Nanos,
}

impl Server {
    /// Periods are half of the tightest target, so that a request that just missed its budget waits
    /// for one replenishment and has the other half to be served; budgets are the requests of a
    /// period at `rate` and one more, so that rounding never starves.
    #[must_use]
    pub fn for_target(target: Nanos, rate: Iops) -> Self {
        let period = Nanos((target.0 / 2).max(TICK.as_nanos() as u64 * 5));
        Self { budget: (rate.0 * period.as_secs_f64()).ceil() as u64 + 1, period }
    }
}

/// A budget server per VM, in spec order.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerPerVm(pub Vec<Server>);

impl Regulator for ServerPerVm {
    fn start(&self, binding: &Binding, spec: &Spec) -> Result<Box<dyn Any + Send>, RegulatorError> {
        Ok(Box::new(Servers::start(&self.0, binding, spec)?))
    }
}

/// Thread that runs the servers. Dropping it lifts their limits.
#[derive(Debug)]
pub struct Servers {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Consumption and limits of one VM, kept by the controlling thread.
struct Account {
    server: Server,
    /// File that counts the VM's requests.
    count: PathBuf,
    /// Throttle limits of the VM, reads and writes.
    limits: Vec<PathBuf>,
    spent_at: u64,
    due: Instant,
    held: bool,
}

impl Servers {
    /// Starts serving; one server per VM in spec order.
    ///
    /// # Errors
    /// When a VM's cgroup or its files are not there, or no thread can be started.
    pub fn start(servers: &[Server], binding: &Binding, spec: &Spec) -> Result<Self, RegulatorError> {
        let root = Root::default();
        let cgroups = match &binding.cgroups {
            Some(cgroups) => cgroups.clone(),
            None => Cgroups::detect(&root)?,
        };
        let dev = binding.stack.device.dev.clone();
        let now = Instant::now();
        let mut accounts = Vec::new();
        for (vm, server) in spec.vms.iter().zip(servers) {
            let Some(cgroup) = binding.vms.get(&vm.name).and_then(|b| b.cgroup.as_ref()) else { continue };
            let count = cgroups.dir(cgroup)?.join(match cgroups.hierarchy {
                Hierarchy::V1 => "blkio.throttle.io_serviced",
                Hierarchy::V2 => "io.stat",
            });
            let limits = vec![
                cgroups.limit_file(cgroup, Limit::ReadIops)?,
                cgroups.limit_file(cgroup, Limit::WriteIops)?,
            ];
            // Since Linux 6.10 requests are counted and held back only after a first write of a
            // limit (`blk_throtl_init`).
            lift(&root, &dev, cgroups.hierarchy, &limits)?;
            let spent_at = requests(&root.read(&count)?, &dev, cgroups.hierarchy);
            let due = now + Duration::from_nanos(server.period.0);
            accounts.push(Account { server: *server, count, limits, spent_at, due, held: false });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("servers".to_owned())
            .spawn(move || serve(&root, &dev, cgroups.hierarchy, accounts, &flag))
            .map_err(RegulatorError::Thread)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread has no way to panic; the limits are lifted at its end.
            let _ = thread.join();
        }
    }
}

fn serve(root: &Root, dev: &str, hierarchy: Hierarchy, mut accounts: Vec<Account>, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        for a in &mut accounts {
            // A file that cannot be read now is read at the next tick.
            let Ok(text) = root.read(&a.count) else { continue };
            let total = requests(&text, dev, hierarchy);
            if now >= a.due {
                a.spent_at = total;
                while a.due <= now {
                    a.due += Duration::from_nanos(a.server.period.0);
                }
                hold(root, dev, hierarchy, a, false);
            } else if total.saturating_sub(a.spent_at) >= a.server.budget {
                hold(root, dev, hierarchy, a, true);
            }
        }
        std::thread::sleep(TICK);
    }
    for a in &mut accounts {
        // A limit that stayed would hold back every later run, so it is lifted whatever `held`
        // says. Each write is tried a few times.
        a.held = true;
        for _ in 0..RELEASES {
            hold(root, dev, hierarchy, a, false);
            if !a.held {
                break;
            }
            std::thread::sleep(TICK);
        }
    }
}

fn hold(root: &Root, dev: &str, hierarchy: Hierarchy, account: &mut Account, held: bool) {
    if account.held == held {
        return;
    }
    // From the first write on, so that a release is never skipped.
    account.held |= held;
    let values = limit_values(dev, hierarchy, held);
    // Tried again at the next tick: `held` stays as it is.
    if account.limits.iter().zip(values).all(|(file, value)| root.write(file, &value).is_ok()) {
        account.held = held;
    }
}

/// Removes the throttle limits of a VM.
fn lift(root: &Root, dev: &str, hierarchy: Hierarchy, limits: &[PathBuf]) -> Result<(), HostError> {
    let values = limit_values(dev, hierarchy, false);
    limits.iter().zip(values).try_for_each(|(file, value)| root.write(file, &value))
}

/// Values of the limits of reads and of writes.
fn limit_values(dev: &str, hierarchy: Hierarchy, held: bool) -> [String; 2] {
    ["riops", "wiops"].map(|key| match (hierarchy, held) {
        (Hierarchy::V1, true) => format!("{dev} {HELD}"),
        // v1 takes 0 for "no limit".
        (Hierarchy::V1, false) => format!("{dev} 0"),
        (Hierarchy::V2, true) => format!("{dev} {key}={HELD}"),
        (Hierarchy::V2, false) => format!("{dev} {key}=max"),
    })
}

/// Requests of a device so far, from `blkio.throttle.io_serviced` (v1: `8:0 Read 5` lines) or
/// `io.stat` (v2: `8:0 rbytes=.. rios=..`).
fn requests(text: &str, dev: &str, hierarchy: Hierarchy) -> u64 {
    let lines = text.lines().filter_map(|l| l.strip_prefix(dev)?.strip_prefix(' '));
    match hierarchy {
        Hierarchy::V1 => lines
            .filter_map(|l| l.split_once(' '))
            .filter(|(what, _)| matches!(*what, "Read" | "Write"))
            .filter_map(|(_, n)| n.trim().parse::<u64>().ok())
            .sum(),
        Hierarchy::V2 => lines
            .flat_map(|l| l.split(' '))
            .filter_map(|pair| pair.split_once('='))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .filter(|(key, _)| matches!(*key, "rios" | "wios"))
            .filter_map(|(_, n)| n.parse::<u64>().ok())
            .sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_on_both_hierarchies() {
        let v1 = "7:0 Read 5\n7:0 Write 2\n7:0 Sync 7\n7:0 Total 7\n7:01 Read 90\nTotal 7\n";
        assert_eq!(requests(v1, "7:0", Hierarchy::V1), 7);
        let v2 = "7:0 rbytes=4096 wbytes=0 rios=3 wios=4 dbytes=0 dios=9\n7:16 rios=50 wios=1\n";
        assert_eq!(requests(v2, "7:0", Hierarchy::V2), 7);
        assert_eq!(requests("", "7:0", Hierarchy::V2), 0);
    }

    #[test]
    fn a_server_lets_the_declared_rate_through() {
        let server = Server::for_target(Nanos::from_millis(300), Iops(600.0));
        assert_eq!(server.period, Nanos::from_millis(150));
        assert_eq!(server.budget, 91);
        // A short target does not make a period that the controller cannot hold.
        assert_eq!(Server::for_target(Nanos::from_millis(5), Iops(100.0)).period, Nanos::from_millis(10));
    }
}
