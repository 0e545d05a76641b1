//! I/O of one VM of a lab that runs alone: the overhead of virtualisation.

use std::time::Duration;

use rtvirtio_measure::TaskResult;
use rtvirtio_measure::profile::tail_is_known;
use rtvirtio_measure::workload::{self, Moment, RunOptions};
use rtvirtio_model::{DepthPoint, GuestPoint, Profile};
use rtvirtio_spec::Task;
use rtvirtio_units::{Iops, Nanos};

use crate::cpu_room::CpuWatch;
use crate::dirs::Dirs;
use crate::elevator::MeasuredElevator;
use crate::error::{Context as _, Error, Result, ensure};
use crate::progress::Progress;
use crate::site::Site;

/// Measured length of each of the two runs in a guest.
const LENGTH: Duration = Duration::from_secs(2);
/// Length of a further run where the tail of the first is not known to the error that a plan bears.
const LONG: Duration = Duration::from_secs(5);
/// Measured length and warm-up in a process VM, whose latencies no model reads.
const OF_PROCESS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_millis(500));
/// Highest rate of the two runs; a slow device gets half of what it does at depth 1. The difference
/// of the runs in CPU time is the requests' alone: what a guest takes that sends any is in both.
const HIGHEST: f64 = 800.0;
/// Rate of the lower run as a share of the higher one's.
const LOWER: f64 = 0.25;

/// Runs one synchronous 4 KiB random reader in the first VM, elevator `none` on the host, and
/// counts the CPU time it costs: of its QEMU, of the I/O domain, and of an emulated device. The
/// latencies are those at the higher rate.
///
/// # Errors
/// When a plan is in force, or the VM does not answer.
pub fn measure(site: &Site, profile: &Profile, dirs: &Dirs, progress: &dyn Progress) -> Result<GuestPoint> {
    let alone = profile.read.first().map_or(HIGHEST, |point| point.iops.0);
    // Whole requests per second: fio paces in whole bytes per second.
    let high = (alone / 2.0).clamp(4.0, HIGHEST).floor();
    let rates = [(high * LOWER).floor(), high];
    let lab = site.lab.as_ref().context("only a lab's VM can be measured alone")?;
    let elevator = MeasuredElevator::open(&site.stack, dirs, progress)?;
    elevator.set("none")?;
    let qemu = lab.vms.first().and_then(|vm| vm.guest.as_ref());
    let own = || {
        let others: Vec<u32> =
            lab.vms.iter().skip(1).flat_map(|vm| &vm.guest).map(|g| g.process.pid).collect();
        lab.serving().into_iter().filter(move |pid| !others.contains(pid))
    };
    let own: Vec<u32> = qemu.into_iter().flat_map(|_| own()).collect();
    let first = if qemu.is_some() { (LENGTH, workload::WARM_UP) } else { OF_PROCESS };
    let run = |rate, length| probe(site, rate, length, &own, dirs, progress);
    let both = || -> Result<_> {
        let low = run(rates[0], first)?;
        let high = run(rates[1], first)?;
        let known = tail_is_known(high.0.n, high.0.p99_ns, tail(&high.0));
        let enough = qemu.is_none() || known;
        Ok((low, if enough { high } else { run(rates[1], (LONG, workload::WARM_UP))? }))
    };
    let probed = both();
    // Before any error, also after Ctrl-C.
    elevator.put_back()?;
    let ((low, low_cpu), (task, high_cpu)) = probed?;
    ensure!(
        task.n > low.n,
        System,
        "the VM completed no more requests at {}/s than at {}/s",
        rates[1],
        rates[0]
    );
    let more = task.achieved_rate.0 - low.achieved_rate.0;
    let cpu_per_request = (high_cpu - low_cpu).max(0.0) / more.max(1.0);
    let kind = match (qemu, lab.accelerator.as_str()) {
        (None, _) => "process",
        (_, "kvm") => "qemu-kvm",
        _ => "qemu-tcg",
    };
    Ok(GuestPoint {
        kind: kind.to_owned(),
        point: DepthPoint {
            depth: 1,
            iops: task.achieved_rate,
            spread: 0.0,
            n: task.n,
            p50: task.p50_ns,
            p99: task.p99_ns,
            p9999: tail(&task),
            max: task.max_ns,
        },
        cpu_per_request,
    })
}

/// p99.99 less the host's stalls, where these are known; of so few requests it is the largest.
fn tail(task: &TaskResult) -> Nanos {
    task.p9999_excl_host_stalls_ns.unwrap_or(task.p9999_ns)
}

/// Result of a run, and how many CPUs these processes took in its measured part: a start of fio
/// takes more.
fn probe(
    site: &Site,
    rate: f64,
    (length, warm_up): (Duration, Duration),
    own: &[u32],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<(TaskResult, f64)> {
    let mut load = site.loads(&[])?.into_iter().next().context("the spec has no VM")?;
    load.vm.tasks = vec![Task::reads("probe", Some(Iops(rate)))];
    load.predicted = vec![None];
    let work_dir = dirs.fio();
    let label = format!("measuring I/O inside {} at {rate}/s", load.vm.name);
    let mut bar = progress.bar(&label, length.as_secs() + 1);
    let (mut watch, mut used) = (None, None);
    let tasks = workload::run(
        &[load],
        &mut RunOptions {
            length,
            warm_up,
            seed: 1,
            watch: site.lab.is_some(),
            disk: None,
            work_dir: &work_dir,
            cancel: progress.cancel_flag(),
            on_tick: &mut |t| bar.set(t.as_secs()),
            on_moment: &mut |moment| match moment {
                Moment::Start => {}
                Moment::Begin => watch = Some(CpuWatch::start(own)),
                Moment::End => used = watch.take().map(|watch| watch.and_then(|watch| watch.so_far())),
            },
        },
    );
    drop(bar);
    let _ = std::fs::remove_dir(&work_dir);
    match tasks {
        Err(e) if e.is_cancelled() => Err(Error::cancelled()),
        Err(e) => Err(e.into()),
        Ok((tasks, ..)) => {
            let used = used.context("the probe's CPU time was not read")??.used;
            Ok((tasks.into_iter().next().context("the probe has no result")?, used))
        }
    }
}
