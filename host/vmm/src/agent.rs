//! The QEMU guest agent: runs programs and reads and writes files inside a guest, without a
//! network.
//!
//! One JSON object a line, over virtio-serial (QEMU's `docs/interop/qemu-ga-ref`, from
//! `qga/qapi-schema.json`). Nothing matches replies to requests, so a client that died may have
//! left half a request in the agent's parser and an answer in the channel. `guest-sync-delimited`
//! clears both: a byte 0xFF (never valid JSON) resets the agent's parser, and the agent puts 0xFF
//! before its answer, so that everything before it can be discarded.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use crate::libvirt::{DomainLink, GuestDisk, Virsh};
use crate::link::Link;
use crate::qmp::ReplyError;
use crate::wire::{Deadline, Wire};
use crate::{AgentAddress, VmmError};

mod exec;
mod file;
mod info;
mod needs;
mod network;
#[cfg(test)]
mod tests;

pub use exec::{ExecOutput, Process};
pub use info::NEEDED;

/// Byte that resets the agent's parser, and that marks its answer to a sync.
const RESET: u8 = 0xff;
/// Largest answer to a command without data, in bytes.
const SMALL_REPLY: usize = 64 * 1024;
/// Largest list of disks, in bytes: 400 for each disk and partition.
const DISKS_REPLY: usize = 1 << 20;
/// Default time limit of one command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the agent in one guest.
///
/// Each command has a time limit ([`GuestAgent::set_timeout`], 10 s at first) and a size limit.
/// After an error in the middle of an exchange the next command first synchronises again.
#[derive(Debug)]
pub struct GuestAgent {
    link: Link,
    timeout: Duration,
    in_step: bool,
}

#[derive(Deserialize)]
struct Reply<T> {
    error: Option<ReplyError>,
    #[serde(rename = "return")]
    value: Option<T>,
}

/// Returns a number that no earlier client has used: the clock, mixed with the process id and a
/// counter. The agent's `id` is a signed 64-bit integer, so the top bit stays clear; JSON readers
/// that use doubles lose bits beyond 53.
fn fresh_id() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    // Odd multipliers (from the golden ratio and from splitmix64) spread the small numbers over the
    // word.
    let mixed = nanos
        ^ u64::from(std::process::id()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ count.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed & ((1 << 53) - 1)
}

impl GuestAgent {
    /// Connects to the host's end of the agent's channel and waits until the agent answers, at most
    /// `timeout`: a guest that still boots may come up meanwhile.
    pub fn connect(path: &Path, timeout: Duration) -> Result<GuestAgent, VmmError> {
        let mut agent = GuestAgent::open(path, timeout)?;
        agent.synchronise(timeout)?;
        Ok(agent)
    }

    /// Connects to the agent at an address, and waits as [`GuestAgent::connect`] does.
    ///
    /// # Errors
    /// As [`GuestAgent::connect`]; for a libvirt VM [`VmmError::Connect`] of kind `NotFound` when
    /// this start of it has ended, and [`VmmError::NoAgent`].
    pub fn reach(address: &AgentAddress, timeout: Duration) -> Result<GuestAgent, VmmError> {
        match address {
            AgentAddress::Socket(path) => GuestAgent::connect(path, timeout),
            AgentAddress::Libvirt(agent) => {
                let peer = format!("guest agent {address}");
                if !agent.process.is_alive() {
                    let what = format!("its QEMU, process {}, has ended", agent.process.pid);
                    let source = io::Error::new(io::ErrorKind::NotFound, what);
                    return Err(VmmError::Connect { peer, source });
                }
                let daemon = Arc::new(Virsh::new(&agent.uri));
                let mut agent = GuestAgent::of_domain(DomainLink::new(daemon, &agent.uuid, peer));
                agent.synchronise(timeout)?;
                Ok(agent)
            }
        }
    }

    fn of_domain(link: DomainLink) -> GuestAgent {
        GuestAgent { link: Link::Libvirt(link), timeout: COMMAND_TIMEOUT, in_step: false }
    }

    /// Connects without waiting for the agent; the first command synchronises.
    ///
    /// # Errors
    /// No such socket, or another client is connected and stays so for `timeout`.
    pub fn open(path: &Path, timeout: Duration) -> Result<GuestAgent, VmmError> {
        let wire = Wire::connect("guest agent", path, timeout)?;
        Ok(GuestAgent { link: Link::Socket(wire), timeout: COMMAND_TIMEOUT, in_step: false })
    }

    /// Uses a connected stream; `name` is used in errors.
    #[must_use]
    pub fn from_stream(stream: UnixStream, name: &str) -> GuestAgent {
        let wire = Wire::new(stream, format!("guest agent {name}"));
        GuestAgent { link: Link::Socket(wire), timeout: COMMAND_TIMEOUT, in_step: false }
    }

    /// Sets the time limit of each later command.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Discards data that earlier clients left and makes sure that the agent answers this client.
    ///
    /// A sync can get lost while the guest boots, so it is sent again after 0.5, 1, 2, 4, ... s.
    /// Only the answer to the latest one ends the wait; the pauses grow, so an agent slower than
    /// one pause still gets through.
    ///
    /// # Errors
    /// [`VmmError::Timeout`], or an error of the connection.
    pub fn synchronise(&mut self, timeout: Duration) -> Result<(), VmmError> {
        const OP: &str = "guest-sync-delimited";
        let deadline = Deadline::after(timeout);
        self.in_step = false;
        let wire = match &mut self.link {
            Link::Socket(wire) => wire,
            Link::Libvirt(link) => {
                await_ping(link, deadline)?;
                self.in_step = true;
                return Ok(());
            }
        };
        let mut pause = Duration::from_millis(500);
        loop {
            let id = fresh_id();
            let mut request = vec![RESET];
            request.extend_from_slice(
                json!({ "execute": OP, "arguments": { "id": id } }).to_string().as_bytes(),
            );
            request.push(b'\n');
            wire.send(&request, deadline, OP)?;
            match await_sync(wire, id, deadline.at_most(pause), OP) {
                Ok(()) => {
                    self.in_step = true;
                    return Ok(());
                }
                Err(e) if e.is_timeout() && deadline.left().is_some() => pause *= 2,
                Err(VmmError::Timeout { peer, operation, .. }) => {
                    return Err(deadline.passed(&peer, &operation));
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether the last exchange succeeded: the next answer will be to the next command.
    #[must_use]
    pub fn is_in_step(&self) -> bool {
        self.in_step
    }

    /// Sends one command and parses its answer, at most `limit` bytes, into `T`. Fields that `T`
    /// does not name are not kept, so an answer costs no more memory than its own size.
    fn call<T: DeserializeOwned>(
        &mut self,
        command: &str,
        arguments: Option<&Value>,
        limit: usize,
    ) -> Result<T, VmmError> {
        if !self.in_step {
            self.synchronise(self.timeout)?;
        }
        let mut request = json!({ "execute": command });
        if let Some(arguments) = arguments {
            request["arguments"] = arguments.clone();
        }
        let mut text = request.to_string();
        self.in_step = false;
        let line = match &mut self.link {
            Link::Socket(wire) => {
                text.push('\n');
                let deadline = Deadline::after(self.timeout);
                wire.send(text.as_bytes(), deadline, command)?;
                wire.line(limit, deadline, command)?
            }
            Link::Libvirt(link) => link.agent(&text, command, limit, self.timeout)?,
        };
        let reply: Reply<T> =
            serde_json::from_slice(&line).map_err(|e| self.link.protocol(command, e.to_string()))?;
        self.in_step = true;
        if let Some(ReplyError { class, desc }) = reply.error {
            if class == info::NOT_FOUND {
                return Err(VmmError::Disabled { peer: self.link.peer().into(), commands: command.into() });
            }
            return Err(VmmError::Refused {
                peer: self.link.peer().into(),
                operation: command.into(),
                class,
                desc,
            });
        }
        reply.value.ok_or_else(|| self.link.protocol(command, "neither `return` nor `error`"))
    }

    /// Disks and partitions of the guest.
    pub(crate) fn disks(&mut self) -> Result<Vec<GuestDisk>, VmmError> {
        self.call("guest-get-disks", None, DISKS_REPLY)
    }

    /// Checks that the agent answers.
    pub fn ping(&mut self) -> Result<(), VmmError> {
        self.call::<IgnoredAny>("guest-ping", None, SMALL_REPLY).map(drop)
    }
}

fn await_sync(wire: &mut Wire, id: u64, deadline: Deadline, operation: &str) -> Result<(), VmmError> {
    loop {
        wire.skip_past(RESET, deadline, operation)?;
        let line = match wire.line(SMALL_REPLY, deadline, operation) {
            Ok(line) => line,
            Err(VmmError::TooLarge { .. }) => continue,
            Err(e) => return Err(e),
        };
        // Anything else between two marks is an answer to an earlier client.
        if let Ok(Reply { value: Some(got), .. }) = serde_json::from_slice::<Reply<u64>>(&line) {
            if got == id {
                return Ok(());
            }
        }
    }
}

/// Waits until the agent of a libvirt VM answers: its guest may still boot.
fn await_ping(link: &DomainLink, deadline: Deadline) -> Result<(), VmmError> {
    const OP: &str = "guest-ping";
    const PAUSE: Duration = Duration::from_millis(500);
    loop {
        let left = deadline.left().unwrap_or_default();
        match link.agent(r#"{"execute":"guest-ping"}"#, OP, SMALL_REPLY, left) {
            Err(VmmError::NoAgent { .. }) if deadline.left().is_some_and(|left| left > PAUSE) => {
                std::thread::sleep(PAUSE);
            }
            answer => return answer.map(drop),
        }
    }
}
