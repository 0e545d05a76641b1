//! `rtvirtio check`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_console::{Global, Ui, show, style};
use rtvirtio_kernel::trusted::open_config;
use rtvirtio_kernel::{Finding, Level, Root, check, guest_priority};
use rtvirtio_report::text::Paint;
use rtvirtio_vmm::{GuestAgent, KvmProbe, VmmError, machines, probe_kvm};
use rtvirtio_workflow::cpu_room::{CpuUse, cpu_use};
use rtvirtio_workflow::{Kind, Progress, kernel_release, leftovers};

use crate::args::CheckArgs;

/// Timeout of a guest agent's answers.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which memory traffic is counted, where the host can.
const WATCHED: Duration = Duration::from_secs(1);
/// Limit of bytes read of a kernel's release.
const LONGEST_RELEASE: usize = 256;
const KVM_WHY: &str =
    "guests under emulation are about ten times slower and noisier, so their tails say little";

/// Checks the host; exit code 1 when something prevents plans from being applied.
pub fn run(args: &CheckArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let mut extra = rtvirtio_kernel::check::vms(&Root::default());
    extra.extend(leftovers::findings(&Root::default(), &global.dirs()));
    extra.extend(rtvirtio_kernel::check::memory_traffic(&Root::default(), WATCHED));
    extra.extend(cpu_time(&Root::default(), ui)?);
    extra.push(kvm(ui));
    extra.extend(args.guests.iter().flat_map(|socket| guest(socket)));
    let findings = check(&Root::default(), extra);
    // Probes that take time may have been asked to stop.
    if ui.is_cancelled() {
        return Err(rtvirtio_workflow::Error::cancelled().into());
    }
    show(ui, &findings, || text(&findings))?;
    let failed = findings.iter().any(|f| f.level == Level::Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Checks a guest's kernel, and the programs that tasks need in it.
fn guest(socket: &Path) -> Vec<Finding> {
    const REMEDY: &str = "is qemu-guest-agent running in the guest, and this its socket?";
    const TASKS: (&str, &str) =
        ("guest.tasks", "`verify` runs a VM's tasks in the guest, with its fio and through its agent");
    let name = socket.display().to_string();
    let asked = GuestAgent::connect(socket, AGENT_TIMEOUT).and_then(|mut agent| {
        let release = agent.read_file("/proc/sys/kernel/osrelease", LONGEST_RELEASE);
        Ok((agent.lacks_for_tasks()?, release))
    });
    let kernel = |release: Result<Vec<u8>, VmmError>| match release {
        Ok(release) => guest_priority(&name, String::from_utf8_lossy(&release).trim()),
        Err(e) => Finding::warn(
            "guest.ioprio",
            format!("not known: {e}"),
            "the I/O domain acts on a guest's own priorities only if its kernel passes them on",
            REMEDY,
        ),
    };
    match asked {
        Ok((lacks, release)) => {
            let tasks = match lacks.as_slice() {
                [] => Finding::ok(TASKS.0, format!("{name}: tasks can run in the guest"), TASKS.1),
                lacks => {
                    let remedy = "see \"The guest agent\" in docs/guide/your-vms.md";
                    Finding::warn(TASKS.0, format!("{name}: {}", lacks.join("; ")), TASKS.1, remedy)
                }
            };
            vec![tasks, kernel(release)]
        }
        Err(e) => {
            let why = format!("{name}: not known: {e}");
            vec![Finding::warn(TASKS.0, why, TASKS.1, REMEDY), kernel(Err(e))]
        }
    }
}

/// CPU time that the VMs take, against what is free; nothing without VMs.
///
/// # Errors
/// When the user asks to stop meanwhile.
fn cpu_time(root: &Root, progress: &dyn Progress) -> Result<Option<Finding>, rtvirtio_workflow::Error> {
    let of = machines::find(root).map_err(anyhow::Error::from).map(|(found, unreadable)| {
        let pids: Vec<u32> = found.iter().map(|machine| machine.pid).collect();
        (pids, unreadable.len())
    });
    match of {
        Ok((pids, _)) if pids.is_empty() => Ok(None),
        Ok((pids, hidden)) => cpu_finding(cpu_use(&pids, progress).map(|of| (of, hidden))).map(Some),
        Err(e) => Ok(Some(unknown_cpu_time(&e))),
    }
}

const CPU_TIME: (&str, &str) =
    ("cpu.time", "requests of VMs wait while other programs use the CPUs, whatever the disk does");

fn unknown_cpu_time(e: &anyhow::Error) -> Finding {
    Finding::warn(CPU_TIME.0, format!("not known: {e:#}"), CPU_TIME.1, "is /proc mounted?")
}

/// Finding on the CPU time of VMs, with the number of programs that could not be inspected.
fn cpu_finding(
    of: Result<(CpuUse, usize), rtvirtio_workflow::Error>,
) -> Result<Finding, rtvirtio_workflow::Error> {
    let (id, why) = CPU_TIME;
    Ok(match of {
        Ok((of, 0)) if !of.is_short() => Finding::ok(id, of.to_string(), why),
        Ok((of, 0)) => {
            let remedy = "end other programs, or give the VMs CPU contracts (`cpu` in the spec)";
            Finding::warn(id, of.to_string(), why, remedy)
        }
        Ok((of, hidden)) => {
            let what = format!("{of}; {hidden} that cannot be inspected count as others");
            Finding::warn(id, what, why, "run it with sudo")
        }
        Err(e) if e.kind() == Kind::Cancelled => return Err(e),
        Err(e) => unknown_cpu_time(&e.into()),
    })
}

fn kvm(ui: &Ui) -> Finding {
    let probe = if matches!(Path::new("/dev/kvm").try_exists(), Ok(false)) {
        KvmProbe::Absent { reason: "there is no /dev/kvm".to_owned() }
    } else if let Some((kernel, initrd)) = own_kernel() {
        ui.step("starting this host's own kernel under KVM");
        match probe_kvm(&kernel, &initrd) {
            Ok(probe) => probe,
            Err(e) => {
                return Finding::warn("kvm", format!("not known: {e}"), KVM_WHY, "install qemu-system-x86");
            }
        }
    } else {
        let what = "/dev/kvm is there; whether a stock guest boots under it was not tried";
        return Finding::warn("kvm", what, KVM_WHY, "find out with `rtvirtio-lab kvm`");
    };
    match probe {
        KvmProbe::Works => Finding::ok("kvm", "a stock kernel boots under KVM", KVM_WHY),
        KvmProbe::Broken { reason } => Finding::warn(
            "kvm",
            format!("/dev/kvm opens but a stock kernel does not boot under it: {reason}"),
            KVM_WHY,
            "use a host whose KVM runs stock kernels; the lab falls back to emulation",
        ),
        KvmProbe::Absent { reason } => Finding::warn(
            "kvm",
            reason,
            KVM_WHY,
            "enable virtualisation in the firmware, or nested virtualisation",
        ),
    }
}

/// Image and initrd of the running kernel, where they are readable: they need no download.
fn own_kernel() -> Option<(PathBuf, PathBuf)> {
    let release = kernel_release();
    let files = (
        PathBuf::from(format!("/boot/vmlinuz-{release}")),
        PathBuf::from(format!("/boot/initrd.img-{release}")),
    );
    (open_config(&files.0).is_ok() && open_config(&files.1).is_ok()).then_some(files)
}

fn text(findings: &[Finding]) -> String {
    let style = style();
    let mut out = String::new();
    for f in findings {
        let (word, paint) = match f.level {
            Level::Ok => ("ok  ", Paint::Good),
            Level::Warn => ("warn", Paint::Open),
            Level::Fail => ("FAIL", Paint::Bad),
        };
        out.push_str(&format!("{}  {:<18} {}\n", style.paint(word, paint), f.id, f.what));
        if f.level != Level::Ok {
            out.push_str(&format!("      {:<18} why:    {}\n", "", f.why));
            out.push_str(&format!("      {:<18} remedy: {}\n", "", f.remedy));
        }
    }
    let count = |level| findings.iter().filter(|f| f.level == level).count();
    out.push_str(&format!(
        "{} ok, {} warnings, {} failures\n",
        count(Level::Ok),
        count(Level::Warn),
        count(Level::Fail)
    ));
    out
}

#[cfg(test)]
mod tests {
    use rtvirtio_workflow::Error;

    use super::*;

    #[test]
    fn a_stop_meanwhile_is_no_finding() {
        assert_eq!(cpu_finding(Err(Error::cancelled())).unwrap_err().kind(), Kind::Cancelled);
        let unknown = cpu_finding(Err(Error::new(Kind::System, "no file"))).unwrap();
        assert!(unknown.level == Level::Warn && unknown.what == "not known: no file", "{unknown:?}");
        let of = CpuUse { cpus: 2, used: 0.5, free: 1.5 };
        assert_eq!(cpu_finding(Ok((of, 0))).unwrap().level, Level::Ok);
        assert_eq!(cpu_finding(Ok((CpuUse { free: 0.4, ..of }, 0))).unwrap().level, Level::Warn);
        assert_eq!(cpu_finding(Ok((of, 3))).unwrap().level, Level::Warn);
    }
}
