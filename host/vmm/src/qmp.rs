//! QEMU's machine monitor: one JSON object a line over a UNIX socket, or one command of libvirt
//! each where libvirt has the monitor's socket.
//!
//! The protocol is QEMU's `docs/interop/qmp-spec.rst`: a greeting, `qmp_capabilities`, then
//! commands, each answered by `return` or `error` with our `id`; events come in between and are
//! skipped.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::VmmError;
use crate::libvirt::{DomainLink, RunningDomain};
use crate::link::Link;
use crate::wire::{Deadline, Wire};
use at_most::AtMost;

mod at_most;
mod drives;

#[cfg(test)]
mod tests;

/// Largest reply that is kept, in bytes. The largest that is asked for, `query-cpus-fast` of 255
/// vCPUs, takes about 60 KB.
const REPLY_LIMIT: usize = 1 << 20;
/// Largest number of drives of a VM: a spec has at most 16 disks for one, and empty drives come on
/// top. The monitor of a QEMU that was taken over may list any number.
pub const MOST_DRIVES: usize = 64;
/// Largest list of drives, in bytes: each with a chain of some backing files, or three histograms.
const DRIVES_LIMIT: usize = MOST_DRIVES * (16 << 10);
/// Largest number of values in an answer of any form: each takes up to a hundred times its bytes in
/// memory. The largest that is asked for, `query-pci`, has about 60 for each device.
const MOST_VALUES: usize = 20_000;
/// Largest number of events between a command and its answer, and of their bytes: a guest causes
/// some hundreds a second at most.
const MOST_EVENTS: usize = 2_000;
const MOST_EVENT_BYTES: usize = 1 << 20;

/// QEMU's answer to `query-status`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RunStatus {
    /// Whether the vCPUs run.
    pub running: bool,
    /// QEMU's run state, such as `running`, `paused`, `internal-error`.
    pub status: String,
}

/// QEMU's answer to `query-version`, in part.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct QemuVersion {
    /// Version of QEMU itself.
    pub qemu: VersionTriple,
    /// Package version of the distribution; may be empty.
    #[serde(default)]
    pub package: String,
}

/// Version number of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct VersionTriple {
    /// First number: 7 in 7.2.22.
    pub major: u32,
    /// Second number: 2 in 7.2.22.
    pub minor: u32,
    /// Third number: 22 in 7.2.22.
    pub micro: u32,
}

/// QEMU's answer to `query-kvm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct KvmInfo {
    /// Whether this machine runs under KVM.
    pub enabled: bool,
    /// Whether this QEMU was built with KVM.
    pub present: bool,
}

/// Entry of `query-cpus-fast`: a vCPU.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VCpu {
    /// Number of the vCPU, from 0.
    pub cpu_index: u32,
    /// Thread on the host. With TCG in one thread, several vCPUs share it.
    pub thread_id: i32,
}

/// Entry of `query-iothreads`: an I/O thread.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IoThread {
    /// Name given with `-object iothread,id=`.
    pub id: String,
    /// Thread on the host.
    pub thread_id: i32,
}

/// Connection to a machine's monitor.
#[derive(Debug)]
pub struct Qmp {
    link: Link,
    timeout: Duration,
    /// End of the time for all commands together; `None` without one.
    end: Option<Deadline>,
    next_id: u64,
    version: QemuVersion,
    events_skipped: u64,
    /// Whether the connection is unusable: after an oversized reply the stream is no longer at a
    /// line's start, and one with too many events is given up.
    broken: bool,
}

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    qmp: Option<GreetingBody>,
    event: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct GreetingBody {
    version: QemuVersion,
}

/// Line of the monitor. An answer is not parsed before the form that it must have is known.
#[derive(Deserialize)]
struct Reply {
    id: Option<Box<RawValue>>,
    event: Option<String>,
    error: Option<ReplyError>,
    #[serde(rename = "return")]
    value: Option<Box<RawValue>>,
}

/// Member `error` of a reply; the agent uses the same form.
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
        let end = Deadline::after(timeout);
        Qmp::negotiate(Wire::connect("QMP", path, timeout)?, timeout, end)
    }

    /// Uses a connected stream; `name` is used in errors.
    pub fn from_stream(stream: UnixStream, name: &str, timeout: Duration) -> Result<Qmp, VmmError> {
        Qmp::negotiate(Wire::new(stream, format!("QMP {name}")), timeout, Deadline::after(timeout))
    }

    fn negotiate(mut wire: Wire, timeout: Duration, end: Deadline) -> Result<Qmp, VmmError> {
        const OP: &str = "greeting";
        let mut events_skipped = 0;
        // QEMU sends events to a connection that it has accepted and not greeted yet, where an
        // earlier one had left negotiation mode: seen with 7.2.
        let version = loop {
            let line = wire.line(REPLY_LIMIT, end, OP)?;
            let greeting: Greeting =
                serde_json::from_slice(&line).map_err(|e| wire.protocol(OP, e.to_string()))?;
            match greeting {
                Greeting { qmp: Some(body), .. } => break body.version,
                Greeting { event: Some(_), .. } => events_skipped += 1,
                Greeting { .. } => return Err(wire.protocol(OP, "neither a greeting nor an event")),
            }
        };
        let link = Link::Socket(wire);
        let mut qmp =
            Qmp { link, timeout, end: Some(end), next_id: 1, version, events_skipped, broken: false };
        qmp.execute("qmp_capabilities", None)?;
        qmp.end = None;
        Ok(qmp)
    }

    /// Limits the time of all further commands together: otherwise a monitor that answers each just
    /// in time would block its caller for as long as there are commands.
    #[must_use]
    pub fn within(mut self, total: Duration) -> Qmp {
        self.end = Some(Deadline::after(total));
        self
    }

    /// Connects to the monitor of a libvirt VM. From the first command on libvirt marks the VM as
    /// tainted (`custom-monitor`), until it ends.
    ///
    /// # Errors
    /// libvirt or QEMU does not answer, or this user may not send commands.
    pub fn of_domain(domain: &RunningDomain, timeout: Duration) -> Result<Qmp, VmmError> {
        let link = DomainLink::new(domain.daemon(), &domain.xml.uuid, format!("QMP {}", domain.xml.name));
        let none = VersionTriple { major: 0, minor: 0, micro: 0 };
        let version = QemuVersion { qemu: none, package: String::new() };
        let link = Link::Libvirt(link);
        let mut qmp = Qmp { link, timeout, end: None, next_id: 1, version, events_skipped: 0, broken: false };
        qmp.version = qmp.typed("query-version")?;
        Ok(qmp)
    }

    /// Version from the greeting, or through libvirt from `query-version`.
    #[must_use]
    pub fn version(&self) -> &QemuVersion {
        &self.version
    }

    #[must_use]
    pub fn events_skipped(&self) -> u64 {
        self.events_skipped
    }

    /// Runs one command and returns its result.
    ///
    /// # Errors
    /// [`VmmError::Refused`] when QEMU refuses it; otherwise an error of the connection.
    pub fn execute(&mut self, command: &str, arguments: Option<Value>) -> Result<Value, VmmError> {
        let text = self.execute_within(command, arguments, REPLY_LIMIT)?;
        if text.get().bytes().filter(|byte| *byte == b',').count() > MOST_VALUES {
            let (peer, operation) = (self.link.peer().into(), command.into());
            return Err(VmmError::TooMany { peer, operation, what: "values", limit: MOST_VALUES });
        }
        self.parsed(command, &text)
    }

    fn parsed<T: DeserializeOwned>(&self, command: &str, text: &RawValue) -> Result<T, VmmError> {
        serde_json::from_str(text.get()).map_err(|e| self.link.protocol(command, e.to_string()))
    }

    /// Runs one command with an answer of at most `limit` bytes.
    fn execute_within(
        &mut self,
        command: &str,
        arguments: Option<Value>,
        limit: usize,
    ) -> Result<Box<RawValue>, VmmError> {
        if self.broken {
            return Err(self.link.protocol(command, "an earlier answer was too much; connect again"));
        }
        let mut request = json!({ "execute": command });
        if let Some(arguments) = arguments {
            request["arguments"] = arguments;
        }
        let deadline = Deadline::after(self.timeout).or_sooner(self.end);
        let reply = match &self.link {
            Link::Libvirt(link) => {
                let left = deadline.left().ok_or_else(|| deadline.passed(self.link.peer(), command))?;
                let text = link.monitor(&request.to_string(), command, limit, left)?;
                serde_json::from_slice(&text).map_err(|e| self.link.protocol(command, e.to_string()))?
            }
            Link::Socket(_) => self.exchange(request, command, deadline, limit)?,
        };
        if let Some(ReplyError { class, desc }) = reply.error {
            return Err(VmmError::Refused {
                peer: self.link.peer().into(),
                operation: command.into(),
                class,
                desc,
            });
        }
        reply.value.ok_or_else(|| self.link.protocol(command, "neither `return` nor `error`"))
    }

    /// Sends a command over the socket and reads until the answer with its id.
    fn exchange(
        &mut self,
        mut request: Value,
        command: &str,
        deadline: Deadline,
        limit: usize,
    ) -> Result<Reply, VmmError> {
        let Link::Socket(wire) = &mut self.link else {
            return Err(self.link.protocol(command, "no socket"));
        };
        let id = self.next_id;
        self.next_id += 1;
        request["id"] = id.into();
        let id_text = id.to_string();
        let mut text = request.to_string();
        text.push('\n');
        wire.send(text.as_bytes(), deadline, command)?;
        let (mut events, mut bytes) = (0, 0);
        loop {
            let line = wire.line(limit, deadline, command).inspect_err(|e| {
                self.broken |= matches!(e, VmmError::TooLarge { .. });
            })?;
            let reply: Reply =
                serde_json::from_slice(&line).map_err(|e| wire.protocol(command, e.to_string()))?;
            // Errors about a line that QEMU could not parse have no id; all other replies do.
            // Another id is the late answer to a command that was given up.
            let is_ours = reply.event.is_none() && reply.id.as_ref().is_none_or(|got| got.get() == id_text);
            if is_ours {
                return Ok(reply);
            }
            self.events_skipped += u64::from(reply.event.is_some());
            (events, bytes) = (events + 1, bytes + line.len());
            if events > MOST_EVENTS || bytes > MOST_EVENT_BYTES {
                self.broken = true;
                let what = "events or late answers, or a MiB of them, before the answer";
                return Err(wire.too_many(command, what, MOST_EVENTS));
            }
        }
    }

    /// A list of drives; more than [`MOST_DRIVES`] are refused.
    pub(crate) fn drives<T: DeserializeOwned>(&mut self, command: &str) -> Result<Vec<T>, VmmError> {
        let text = self.execute_within(command, None, DRIVES_LIMIT)?;
        let AtMost { items, has_more } = self.parsed::<AtMost<T, MOST_DRIVES>>(command, &text)?;
        if has_more {
            let (peer, operation, limit) = (self.link.peer().into(), command.into(), MOST_DRIVES);
            return Err(VmmError::TooMany { peer, operation, what: "drives", limit });
        }
        Ok(items)
    }

    /// Process at QEMU's end of the socket: the one that called listen(2), which may be a manager
    /// that opened the socket for QEMU. `None` through libvirt, and for a process of another PID
    /// namespace.
    pub fn listener(&self) -> Result<Option<u32>, VmmError> {
        match &self.link {
            Link::Socket(wire) => wire.listener(),
            Link::Libvirt(_) => Ok(None),
        }
    }

    pub(crate) fn typed<T: for<'de> Deserialize<'de>>(&mut self, command: &str) -> Result<T, VmmError> {
        let text = self.execute_within(command, None, REPLY_LIMIT)?;
        self.parsed(command, &text)
    }

    /// Queries whether the guest is running.
    pub fn query_status(&mut self) -> Result<RunStatus, VmmError> {
        self.typed("query-status")
    }

    /// Queries whether this machine runs under KVM.
    pub fn query_kvm(&mut self) -> Result<KvmInfo, VmmError> {
        self.typed("query-kvm")
    }

    /// Queries vCPUs with their threads. Does not interrupt the guest (the older `query-cpus` did).
    pub fn query_cpus_fast(&mut self) -> Result<Vec<VCpu>, VmmError> {
        self.typed("query-cpus-fast")
    }

    /// Queries I/O threads with their threads on the host.
    pub fn query_iothreads(&mut self) -> Result<Vec<IoThread>, VmmError> {
        self.typed("query-iothreads")
    }

    /// Ends QEMU at once, like pulling the plug. QEMU may be gone before its answer arrives; that
    /// counts as success.
    pub fn quit(&mut self) -> Result<(), VmmError> {
        match self.execute("quit", None) {
            Err(e) if e.is_closed() => Ok(()),
            other => other.map(drop),
        }
    }
}
