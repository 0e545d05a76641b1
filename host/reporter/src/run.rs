//! Command that is urgent for as long as it runs.

use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::Command;

use rtvirtio_urgency::GuestPolicy;
use rtvirtio_urgency::page::{Mode, RawReport};
use rustix::thread::sched_getaffinity;

use crate::child::Signals;
use crate::{Device, Reporter, ReporterError};

/// Scheduling of a command in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Real-time priority in the guest, 1 to 99.
    pub priority: u32,
    /// Whether its policy is SCHED_RR instead of SCHED_FIFO.
    pub round_robin: bool,
}

/// Runs a command at a real-time priority of the guest, and reports each vCPU that it may run on as
/// urgent until it ends. Its sleeps are not detected: meanwhile its vCPUs stay urgent too. Returns
/// its exit code, 128 and the signal where one ended it. Signals that would end this process end
/// the command.
///
/// # Errors
/// As [`Device::find`] and [`Reporter::begin`]; when the command cannot be started. Without a host
/// that offers a page it is not run.
pub fn run(argv: &[String], options: RunOptions) -> Result<i32, ReporterError> {
    let [program, args @ ..] = argv else {
        return Err(ReporterError::io("run", "")(io::ErrorKind::InvalidInput.into()));
    };
    let signals = Signals::handle().map_err(ReporterError::io("run", program.as_str()))?;
    let reporter = Reporter::begin(Device::find()?, Mode::Region)?;
    let set = sched_getaffinity(None).map_err(|e| ReporterError::io("look at", "the CPUs of")(e.into()))?;
    let vcpus: Vec<usize> = (0..reporter.device().region().vcpus()).filter(|cpu| set.is_set(*cpu)).collect();
    let policy = if options.round_robin { GuestPolicy::Rr } else { GuestPolicy::Fifo };
    let say = |report: RawReport| -> Result<(), ReporterError> {
        vcpus.iter().try_for_each(|vcpu| reporter.report(*vcpu, &report))?;
        reporter.device().ring();
        Ok(())
    };
    say(RawReport { policy: policy.number(), priority: options.priority, ..RawReport::default() })?;
    let mut command = Command::new(program);
    command.args(args);
    let number = policy.number() as libc::c_int;
    let priority = options.priority as libc::c_int;
    // SAFETY: between fork and exec only an async-signal-safe system call is made.
    unsafe {
        command.pre_exec(move || {
            let mut param: libc::sched_param = std::mem::zeroed();
            param.sched_priority = priority;
            if libc::sched_setscheduler(0, number, &raw const param) == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        });
    }
    let status = signals.start(&mut command).and_then(|mut child| child.wait_for_end());
    // In any case, no urgent task runs now.
    say(RawReport::default())?;
    let status = status.map_err(ReporterError::io("run", program.as_str()))?;
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}
