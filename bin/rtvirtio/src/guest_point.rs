//! I/O as one VM of a lab sees it when it runs alone: what virtualisation itself adds.

use std::time::Duration;

use anyhow::{Context, ensure};
use rtvirtio_host::Root;
use rtvirtio_lab::workload::{self, RunOptions};
use rtvirtio_model::{DepthPoint, GuestPoint};
use rtvirtio_spec::{Arrival, Op, Pattern, Task};
use rtvirtio_units::{Bytes, Iops};

use crate::args::Global;
use crate::cmd::profile::Restore;
use crate::site::Site;
use crate::ui::{Cancelled, Ui};

/// How long it is measured.
const LENGTH: Duration = Duration::from_secs(8);
/// Rate of the probe: the paper's medium task, so that the VM is neither idle nor saturated.
const RATE: f64 = 500.0;

/// Runs one synchronous 4 KiB random reader in the first VM, elevator `none` on the host, and counts the CPU time it costs.
pub fn measure(site: &Site, global: &Global, ui: &Ui) -> anyhow::Result<GuestPoint> {
    let lab = site.lab.as_ref().context("only a lab's VM can be measured alone")?;
    let restore = Restore::new(&site.device)?;
    site.device.set_elevator(&Root::default(), "none")?;
    let mut load = site.loads(&[])?.into_iter().next().context("the spec has no VM")?;
    load.vm.tasks = vec![Task {
        name: "probe".to_owned(),
        op: Op::Read,
        block: Bytes::from_kib(4),
        pattern: Pattern::Random,
        rate: Some(Iops(RATE)),
        depth: 1,
        arrival: Arrival::Closed,
        target: None,
    }];
    load.predicted = vec![None];
    let state = lab.state();
    let qemu = state.vms.first().and_then(|vm| vm.qemu.as_ref());
    let cpu_before = qemu.map(|q| cpu_seconds(q.process.pid));
    let work_dir = global.run_dir.join("fio");
    let mut bar = ui.bar(&format!("measuring I/O inside {}", load.vm.name), LENGTH.as_secs() + 1);
    let tasks = workload::run(
        &[load],
        &mut RunOptions {
            length: LENGTH,
            seed: 1,
            work_dir: &work_dir,
            cancel: ui.cancel_flag(),
            on_tick: &mut |t| bar.set(t.as_secs()),
        },
    );
    drop(bar);
    let _ = std::fs::remove_dir(&work_dir);
    restore.now()?;
    let tasks = match tasks {
        Err(e) if e.is_cancelled() => return Err(Cancelled.into()),
        other => other?,
    };
    let task = tasks.first().context("the probe has no result")?;
    ensure!(task.n > 0, "the probe inside the VM completed no request");
    // fio's own start and the guest's idle ticks are in it: an upper estimate.
    let cpu_per_request = match (qemu, cpu_before) {
        (Some(q), Some(before)) => (cpu_seconds(q.process.pid) - before).max(0.0) / task.n as f64,
        _ => 0.0,
    };
    let kind = match (qemu, state.accelerator.as_str()) {
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
            p9999: task.p9999_ns,
            max: task.max_ns,
        },
        cpu_per_request,
    })
}

/// CPU time of a process and all its threads so far, in seconds (fields 14 and 15 of proc_pid_stat(5)).
fn cpu_seconds(pid: u32) -> f64 {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return 0.0 };
    let Some((_, fields)) = stat.rsplit_once(')') else { return 0.0 };
    let ticks: u64 =
        fields.split_ascii_whitespace().skip(11).take(2).filter_map(|f| f.parse::<u64>().ok()).sum();
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}
