//! QEMU's machine monitor: one JSON object a line over a UNIX socket.
//!
//! The protocol is QEMU's `docs/interop/qmp-spec.rst`: a greeting, `qmp_capabilities`, then
//! commands, each answered by `return` or `error` with our `id`; events come in between and are
//! skipped.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::VmmError;
use crate::wire::{Deadline, Wire};

mod throttle;

pub use throttle::{Drive, ThrottleLimits};

#[cfg(test)]
mod tests;

/// Largest reply we keep, in bytes. The largest that we ask for, `query-cpus-fast` of 255 vCPUs,
/// takes about 60 KB.
const REPLY_LIMIT: usize = 4 << 20;

/// `query-status`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RunStatus {
    /// True while the vCPUs run.
    pub running: bool,
    /// QEMU's run state, such as `running`, `paused`, `internal-error`.
    pub status: String,
}

/// `query-version`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct QemuVersion {
    /// The three numbers.
    pub qemu: VersionTriple,
    /// The distribution's package version; may be empty.
    #[serde(default)]
    pub package: String,
}

/// Version numbers of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct VersionTriple {
    /// 7 in 7.2.22.
    pub major: u32,
    /// 2 in 7.2.22.
    pub minor: u32,
    /// 22 in 7.2.22.
    pub micro: u32,
}

/// `query-kvm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct KvmInfo {
    /// This machine runs under KVM.
    pub enabled: bool,
    /// This QEMU was built with KVM.
    pub present: bool,
}

/// One vCPU of `query-cpus-fast`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VCpu {
    /// Number of the vCPU, from 0.
    pub cpu_index: u32,
    /// Its thread on the host. With TCG in one thread, several vCPUs share it.
    pub thread_id: i32,
}

/// One I/O thread of `query-iothreads`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IoThread {
    /// The name given with `-object iothread,id=`.
    pub id: String,
    /// Its thread on the host.
    pub thread_id: i32,
}

/// A connection to a machine's monitor.
#[derive(Debug)]
pub struct Qmp {
    wire: Wire,
    timeout: Duration,
    next_id: u64,
    version: QemuVersion,
    events_skipped: u64,
    /// After an oversized reply the stream is no longer at a line's start.
    broken: bool,
}

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    qmp: GreetingBody,
}

#[derive(Deserialize)]
struct GreetingBody {
    version: QemuVersion,
}

#[derive(Deserialize)]
struct Reply {
    id: Option<Value>,
    event: Option<String>,
    error: Option<ReplyError>,
    #[serde(rename = "return")]
    value: Option<Value>,
}

/// `error` of a reply; the agent uses the same form.
#[derive(Deserialize)]
pub(crate) struct ReplyError {
    pub(crate) class: String,
    pub(crate) desc: String,
}

impl Qmp {
    /// Connects to the monitor socket at `path`, reads the greeting and leaves negotiation mode.
    /// `timeout` bounds this and every later command.
    ///
    /// # Errors
    /// No such socket, no listener, another client connected (QEMU serves one client), or not a
    /// monitor.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Qmp, VmmError> {
        Qmp::negotiate(Wire::connect("QMP", path, timeout)?, timeout)
    }

    /// The same over a connected stream; `name` is used in errors.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn from_stream(stream: UnixStream, name: &str, timeout: Duration) -> Result<Qmp, VmmError> {
        Qmp::negotiate(Wire::new(stream, format!("QMP {name}")), timeout)
    }

    fn negotiate(mut wire: Wire, timeout: Duration) -> Result<Qmp, VmmError> {
        const OP: &str = "greeting";
        let line = wire.line(REPLY_LIMIT, Deadline::after(timeout), OP)?;
        let greeting: Greeting =
            serde_json::from_slice(&line).map_err(|e| wire.protocol(OP, e.to_string()))?;
        let version = greeting.qmp.version;
        let mut qmp = Qmp { wire, timeout, next_id: 1, version, events_skipped: 0, broken: false };
        qmp.execute("qmp_capabilities", None)?;
        Ok(qmp)
    }

    /// The version from the greeting.
    #[must_use]
    pub fn version(&self) -> &QemuVersion {
        &self.version
    }

    /// Number of events that came in between and were skipped.
    #[must_use]
    pub fn events_skipped(&self) -> u64 {
        self.events_skipped
    }

    /// Runs one command and returns what QEMU returned.
    ///
    /// # Errors
    /// [`VmmError::Refused`] when QEMU refuses it; else the connection's own trouble.
    pub fn execute(&mut self, command: &str, arguments: Option<Value>) -> Result<Value, VmmError> {
        if self.broken {
            return Err(self.wire.protocol(command, "an earlier answer was too large; connect again"));
        }
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({ "execute": command, "id": id });
        if let Some(arguments) = arguments {
            request["arguments"] = arguments;
        }
        let mut text = request.to_string();
        text.push('\n');
        let deadline = Deadline::after(self.timeout);
        self.wire.send(text.as_bytes(), deadline, command)?;
        loop {
            let line = self.wire.line(REPLY_LIMIT, deadline, command).inspect_err(|e| {
                self.broken |= matches!(e, VmmError::TooLarge { .. });
            })?;
            let reply: Reply =
                serde_json::from_slice(&line).map_err(|e| self.wire.protocol(command, e.to_string()))?;
            if reply.event.is_some() {
                self.events_skipped += 1;
                continue;
            }
            // Errors about a line that QEMU could not parse carry no id; all else does. Another id
            // is the late answer to a command that we gave up on.
            if reply.id.as_ref().is_some_and(|got| got.as_u64() != Some(id)) {
                continue;
            }
            if let Some(ReplyError { class, desc }) = reply.error {
                return Err(VmmError::Refused {
                    peer: self.wire.peer().into(),
                    operation: command.into(),
                    class,
                    desc,
                });
            }
            return reply.value.ok_or_else(|| self.wire.protocol(command, "neither `return` nor `error`"));
        }
    }

    /// An answer that is not understood.
    fn protocol(&self, command: &str, why: &str) -> VmmError {
        self.wire.protocol(command, why)
    }

    fn typed<T: for<'de> Deserialize<'de>>(&mut self, command: &str) -> Result<T, VmmError> {
        let value = self.execute(command, None)?;
        serde_json::from_value(value).map_err(|e| self.wire.protocol(command, e.to_string()))
    }

    /// Is the guest running?
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn query_status(&mut self) -> Result<RunStatus, VmmError> {
        self.typed("query-status")
    }

    /// Does this machine run under KVM?
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn query_kvm(&mut self) -> Result<KvmInfo, VmmError> {
        self.typed("query-kvm")
    }

    /// The vCPUs with their threads. Does not interrupt the guest (the older `query-cpus` did).
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn query_cpus_fast(&mut self) -> Result<Vec<VCpu>, VmmError> {
        self.typed("query-cpus-fast")
    }

    /// The I/O threads with their threads on the host.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn query_iothreads(&mut self) -> Result<Vec<IoThread>, VmmError> {
        self.typed("query-iothreads")
    }

    /// Ends QEMU at once, like pulling the plug. QEMU may be gone before its answer reaches us;
    /// that counts as done.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn quit(&mut self) -> Result<(), VmmError> {
        match self.execute("quit", None) {
            Err(e) if e.is_closed() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Presses the guest's power button: the guest decides what to do.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn system_powerdown(&mut self) -> Result<(), VmmError> {
        self.execute("system_powerdown", None).map(drop)
    }
}
