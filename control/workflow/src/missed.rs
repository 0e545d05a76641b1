//! Facts of a run that show why a target was missed, from counters before and after it.

use std::collections::BTreeMap;
use std::time::Duration;

use rtvirtio_blame::{DeviceUse, Facts, Limit as LimitFact, Stops, causes};
use rtvirtio_kernel::cgroup::{Cgroups, Limit, SetLimit};
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::pressure::{Throttled, throttled};
use rtvirtio_kernel::{HostError, Root, task};
use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::standstill::Standstills;
use rtvirtio_measure::workload::VmLoad;
use rtvirtio_measure::{TaskResult, Verdict};
use rtvirtio_units::Nanos;

use crate::progress::Progress;
use crate::site::Site;
use crate::uncovered::UncoveredKind;

/// Bytes of a sector in `/sys/block/*/stat` (`Documentation/block/stat.rst`).
const SECTOR: f64 = 512.0;

/// Counters of one VM.
#[derive(Clone, Debug, Default)]
struct VmCounters {
    /// Time that each thread was ready without a CPU; `None` where some thread has no such count.
    ready: Option<BTreeMap<u32, Duration>>,
    /// Stops by CPU quotas of its cgroup and those above it.
    quota: Option<Throttled>,
    /// Bytes at the device; `None` where the kernel does not count them for this VM alone.
    bytes: Option<f64>,
}

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct DeviceCounters {
    requests: f64,
    /// Seconds that its requests spent in the block layer.
    waited: f64,
    bytes: f64,
}

/// All counters of one device's site at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counters {
    vms: BTreeMap<String, VmCounters>,
    device: Option<DeviceCounters>,
}

impl Counters {
    /// Reads the current values; what cannot be read is absent.
    pub fn read(site: &Site, progress: &dyn Progress) -> Self {
        let root = site.root();
        let vms = site.host_vms().map(|vm| {
            let pids = vm.lasting_pids(progress).unwrap_or_default();
            let counters = VmCounters {
                ready: ready(root, &pids).ok().flatten(),
                quota: pids.first().and_then(|pid| quota(root, *pid).ok().flatten()),
                bytes: bytes(site, &vm.name),
            };
            (vm.name.clone(), counters)
        });
        let vms = vms.collect();
        let stat = root.read(site.stack.device.sysfs().join("stat")).ok();
        Self { vms, device: stat.as_deref().and_then(of_stat) }
    }
}

fn ready(root: &Root, pids: &[u32]) -> Result<Option<BTreeMap<u32, Duration>>, HostError> {
    let mut all = BTreeMap::new();
    for pid in pids {
        for tid in task::tids(root, *pid)? {
            match task::run_delay(root, *pid, tid) {
                Ok(Some(waited)) => drop(all.insert(tid, waited)),
                // A thread that has not run has not waited, or the kernel does not count it.
                Ok(None) => {}
                Err(e) if e.is_gone() => {}
                Err(e) => return Err(e),
            }
        }
    }
    Ok((!all.is_empty()).then_some(all))
}

/// Stops by the quotas on a process's path, in sum.
fn quota(root: &Root, pid: u32) -> Result<Option<Throttled>, HostError> {
    let cgroups = Cgroups::detect_cpu(root)?;
    let mut sum = Throttled::default();
    for group in cgroups.path_of(&cgroups.of_pid(root, pid)?) {
        let Some(one) = throttled(root, &cgroups.dir(&group)?)? else { return Ok(None) };
        sum.periods += one.periods;
        sum.time += one.time;
    }
    Ok(Some(sum))
}

fn bytes(site: &Site, vm: &str) -> Option<f64> {
    let cgroup = site.io_group(vm).filter(|cgroup| !Cgroups::is_root(cgroup))?;
    let io = IoCounters::read(site.root(), site.cgroups(), cgroup, &site.stack.device.dev).ok()??;
    Some((io.read_bytes + io.write_bytes) as f64)
}

/// Reads and writes of a whole device: requests, milliseconds in the block layer, sectors.
fn of_stat(text: &str) -> Option<DeviceCounters> {
    let fields: Option<Vec<f64>> =
        text.split_ascii_whitespace().take(8).map(|n| n.parse::<u64>().ok().map(|n| n as f64)).collect();
    let [reads, _, sectors_read, read_ms, writes, _, sectors_written, write_ms] = fields?[..] else {
        return None;
    };
    Some(DeviceCounters {
        requests: reads + writes,
        waited: (read_ms + write_ms) / 1e3,
        bytes: (sectors_read + sectors_written) * SECTOR,
    })
}

/// Difference of two counters; `None` where one was not read or began anew.
fn past(before: Option<f64>, after: Option<f64>) -> Option<f64> {
    Some(after? - before?).filter(|past| *past >= 0.0)
}

/// Measurements of a run besides its tasks.
pub(crate) struct Watched<'a> {
    /// Time between the two readings of the counters.
    pub window: Duration,
    pub noise: Option<&'a Noise>,
    pub disk: Option<&'a Standstills>,
}

/// Names the causes of each missed target of a site's tasks.
pub(crate) fn explain(
    site: &Site,
    loads: &[VmLoad],
    (before, after): (&Counters, &Counters),
    watched: &Watched<'_>,
    results: &mut [TaskResult],
) {
    let device = device_use(before, after);
    // A page cache or another process takes the requests, so that the VM's counters miss some.
    let elsewhere = site.lab.as_ref().is_some_and(|lab| lab.domain.is_some());
    for load in loads.iter().filter(|load| site.spec.vm(&load.vm.name).is_some()) {
        let name = &load.vm.name;
        let is_covered = !elsewhere
            && !site.uncovered_named(name).iter().any(|of| {
                matches!(
                    of.kind,
                    UncoveredKind::PageCache | UncoveredKind::WriteBack | UncoveredKind::OtherProcess
                )
            });
        let limits = if is_covered { limits(site, load, results) } else { None };
        let (then, now) = (before.vms.get(name), after.vms.get(name));
        let seconds = watched.window.as_secs_f64();
        let ready = waited(then.and_then(|c| c.ready.as_ref()), now.and_then(|c| c.ready.as_ref()));
        let facts = Facts {
            vm: name.clone(),
            seconds,
            limits,
            quota: stopped(then.and_then(|c| c.quota), now.and_then(|c| c.quota)),
            ready: ready.map(|time| time.as_secs_f64() / seconds.max(f64::MIN_POSITIVE)),
            stolen: watched.noise.and_then(|noise| noise.stolen),
            host: watched.noise.and_then(|noise| of_noise(noise, seconds)),
            disk: watched.disk.map(|disk| Stops { count: disk.count, total: disk.total_ns }),
            device: device.clone().filter(|_| is_covered),
            ..Facts::default()
        };
        let missed =
            |r: &&mut TaskResult| r.vm == *name && r.flow.is_none() && r.verdict == Some(Verdict::Missed);
        for result in results.iter_mut().filter(missed) {
            let facts = Facts {
                rate: result.declared_rate.unwrap_or(result.achieved_rate).0,
                n: result.n,
                late: result.exceedances,
                target: result.target_ns.unwrap_or_default(),
                median: result.p50_ns,
                ..facts.clone()
            };
            result.causes = Some(causes(&facts));
            result.causes_unread = facts.unread();
        }
    }
}

/// Time that threads of both readings waited for a CPU between them.
fn waited(
    before: Option<&BTreeMap<u32, Duration>>,
    after: Option<&BTreeMap<u32, Duration>>,
) -> Option<Duration> {
    let (before, after) = (before?, after?);
    Some(after.iter().filter_map(|(tid, now)| now.checked_sub(*before.get(tid)?)).sum())
}

fn stopped(before: Option<Throttled>, after: Option<Throttled>) -> Option<Stops> {
    let (before, after) = (before?, after?);
    let total = after.time.checked_sub(before.time)?;
    Some(Stops { count: after.periods.checked_sub(before.periods)?, total: Nanos(total.as_nanos() as u64) })
}

/// Stalls longer than 1 ms; `None` where probes could not tell them from load.
fn of_noise(noise: &Noise, seconds: f64) -> Option<Stops> {
    // Time in which some CPU stalled, of stalls of any length; those counted are no longer in sum.
    let any = noise.stood_still.filter(|_| noise.realtime)? * seconds;
    Some(Stops { count: noise.stalls, total: noise.stalled_ns.min(Nanos::from_secs_f64(any)) })
}

fn device_use(before: &Counters, after: &Counters) -> Option<DeviceUse> {
    let (then, now) = (before.device?, after.device?);
    let of = |get: fn(&DeviceCounters) -> f64| past(Some(get(&then)), Some(get(&now)));
    let bytes = of(|device| device.bytes)?;
    let share = |(name, now): (&String, &VmCounters)| {
        let moved = past(before.vms.get(name)?.bytes, now.bytes)?;
        Some((name.clone(), if bytes > 0.0 { (moved / bytes).min(1.0) } else { 0.0 }))
    };
    let shares = after.vms.iter().map(share).collect();
    Some(DeviceUse { requests: of(|device| device.requests)?, waited: of(|device| device.waited)?, shares })
}

/// Limits of a VM's cgroup, with what its tasks completed and asked for; without those of
/// directions in which a task asks for no rate. `None` where they cannot be read.
fn limits(site: &Site, load: &VmLoad, results: &[TaskResult]) -> Option<Vec<LimitFact>> {
    let cgroup = site.io_group(&load.vm.name)?;
    let dev = &site.stack.device.dev;
    let set = site.cgroups().limits_on_path(site.root(), cgroup, dev).ok()?;
    let fact = |set: SetLimit| {
        let (mut used, mut asked) = (0.0, 0.0);
        for task in &load.vm.tasks {
            let writes = task.op.write_share();
            let part = match set.limit {
                Limit::ReadBps | Limit::ReadIops => 1.0 - writes,
                Limit::WriteBps | Limit::WriteIops => writes,
            };
            let size = match set.limit {
                Limit::ReadBps | Limit::WriteBps => task.mean_block(),
                Limit::ReadIops | Limit::WriteIops => 1.0,
            };
            if part > 0.0 {
                let of_task =
                    |r: &&TaskResult| r.vm == load.vm.name && r.task == task.name && r.flow.is_none();
                used += results.iter().find(of_task)?.achieved_rate.0 * part * size;
                asked += task.rate?.0 * part * size;
            }
        }
        let file = format!("{} ({})", set.cgroup.display(), set.file);
        Some(LimitFact { file, value: set.value as f64, used, asked })
    };
    Some(set.into_iter().filter_map(fact).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_that_were_not_read_or_began_anew_are_no_facts() {
        let text = "  10 5 128 1500 2 3 64 500 0 7 8 9\n";
        let stat = DeviceCounters { requests: 12.0, waited: 2.0, bytes: 192.0 * 512.0 };
        assert_eq!(of_stat(text), Some(stat));
        assert_eq!((of_stat("1 2 3"), of_stat("1 2 3 4 5 6 7 x"), of_stat("")), (None, None, None));
        let ms = Duration::from_millis;
        let stops = |periods, time| Some(Throttled { periods, time: ms(time) });
        let some = Some(Stops { count: 2, total: Nanos::from_millis(30) });
        assert_eq!(stopped(stops(1, 10), stops(3, 40)), some);
        assert_eq!(stopped(stops(3, 40), stops(1, 10)), None);
        assert_eq!((stopped(None, stops(3, 40)), stopped(stops(3, 40), None)), (None, None));
        let (then, now) =
            (BTreeMap::from([(1, ms(5)), (2, ms(9))]), BTreeMap::from([(1, ms(8)), (3, ms(70))]));
        assert_eq!(waited(Some(&then), Some(&now)), Some(ms(3)), "a thread of both readings only");
        assert_eq!(waited(None, Some(&now)), None);
    }

    #[test]
    fn shares_of_a_device_need_every_vm() {
        let at = |plc, bulk, bytes| Counters {
            vms: [("plc", plc), ("bulk", bulk)]
                .map(|(name, bytes)| (name.to_owned(), VmCounters { bytes, ..VmCounters::default() }))
                .into(),
            device: Some(DeviceCounters { requests: bytes, waited: bytes, bytes }),
        };
        let found = device_use(&at(Some(0.0), Some(0.0), 0.0), &at(Some(10.0), Some(90.0), 100.0)).unwrap();
        assert_eq!(found.shares.unwrap(), [("bulk".to_owned(), 0.9), ("plc".to_owned(), 0.1)]);
        let unseen = device_use(&at(Some(0.0), None, 0.0), &at(Some(10.0), Some(90.0), 100.0)).unwrap();
        assert_eq!((unseen.shares, unseen.requests), (None, 100.0));
        assert_eq!(device_use(&Counters::default(), &at(None, None, 1.0)), None);
    }

    #[test]
    fn stalls_count_only_where_load_does_not_delay_the_probes() {
        let noise = Noise {
            stalls: 2,
            stalled_ns: Nanos::from_millis(30),
            stood_still: Some(0.001),
            ..Noise::default()
        };
        assert_eq!(of_noise(&noise, 10.0), None);
        let noise = Noise { realtime: true, ..noise };
        assert_eq!(of_noise(&noise, 10.0), Some(Stops { count: 2, total: Nanos::from_millis(10) }));
        assert_eq!(of_noise(&Noise { stood_still: None, ..noise }, 10.0), None);
    }
}
