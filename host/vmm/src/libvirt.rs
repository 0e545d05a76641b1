//! VMs that libvirt manages, through its command line `virsh`: the daemon's own library is LGPL and
//! is not linked.
//!
//! A VM is looked up at each use, because its id, process and cgroup change at every start.
//! Look-ups use a read-only connection. `qemu-monitor-command` marks the VM as tainted
//! (`custom-monitor`), so only [`Qmp`](crate::Qmp) uses it.

use std::fmt::Debug;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_kernel::{ProcessId, Root};

use crate::throttle::{Drive, name_shared};
use crate::wire::Deadline;
use crate::{AgentAddress, LibvirtAgent, VmmError};

mod child;
mod contract;
mod domain;
mod events;
mod guest_disk;
mod link;
mod process;
mod status;
#[cfg(test)]
mod tests;

pub use contract::{CONTRACT_NAMESPACE, DomainContract, DomainsMetadata, metadata, set_contract};
pub use domain::{AgentState, Disk, DomainXml, GuestAddress};
pub use events::{DomainEvents, HeardOfDomains};
pub(crate) use guest_disk::GuestDisk;
pub use guest_disk::guest_device;
pub(crate) use link::DomainLink;
pub use status::{DomainSeen, DomainStatus, STATUS_NAMESPACE, set_status};

/// Largest answer to a look-up, in bytes. The XML of a VM with 100 disks has about 100 KB.
const LOOK_UP_LIMIT: usize = 4 << 20;
/// Time limit of a look-up. A daemon's first answer after its start takes 12 s, while it probes
/// QEMU's capabilities.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(60);
/// Output of `domstate --reason` from the moment a VM has a process until its threads are in their
/// cgroups.
const STARTING: &str = "paused (starting up)";
/// Longest wait for the end of a start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const START_POLL: Duration = Duration::from_millis(50);

/// Rights of a call's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Look-ups alone, over a read-only connection.
    Read,
    /// Also commands to QEMU and to the guest agent.
    Write,
}

/// Connection to a libvirt daemon.
pub trait Daemon: Debug + Send + Sync {
    /// URI of the daemon, for errors.
    fn uri(&self) -> &str;

    /// Runs one of `virsh`'s commands and returns its standard output, at most `limit` bytes.
    ///
    /// # Errors
    /// [`VmmError::NoVirsh`], [`VmmError::Libvirt`] with libvirt's message, a time-out, or an
    /// answer that is too large.
    fn call(
        &self,
        args: &[&str],
        access: Access,
        limit: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, VmmError>;
}

/// `virsh` with a URI: a child process for each call, without a shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Virsh {
    uri: String,
}

impl Virsh {
    /// Daemon at this URI.
    #[must_use]
    pub fn new(uri: &str) -> Self {
        Self { uri: uri.to_owned() }
    }
}

impl Daemon for Virsh {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn call(
        &self,
        args: &[&str],
        access: Access,
        limit: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, VmmError> {
        child::run(&self.uri, args, access, limit, timeout)
    }
}

/// VM of libvirt that runs.
#[derive(Clone, Debug)]
pub struct RunningDomain {
    daemon: Arc<dyn Daemon>,
    /// XML of this start.
    pub xml: DomainXml,
    /// Process of its QEMU.
    pub process: ProcessId,
}

/// Result of looking up a name or UUID.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The VM runs now.
    Running(RunningDomain),
    /// libvirt knows the VM, and it does not run.
    ShutOff { name: String },
    /// libvirt does not know the VM.
    Unknown {
        /// Names of all VMs that it knows.
        known: Vec<String>,
    },
}

impl RunningDomain {
    /// Looks a VM up by its name or UUID.
    ///
    /// Waits for the end of a start that is under way: until then libvirt moves the threads to
    /// cgroups of its own, which the kernel refuses for a real-time thread, and the start would
    /// fail.
    ///
    /// # Errors
    /// The daemon does not answer; a VM that runs, but whose process is not found here.
    pub fn find(daemon: Arc<dyn Daemon>, root: &Root, domain: &str) -> Result<Lookup, VmmError> {
        let listed = list(&*daemon)?;
        let same = |uuid: &str, name: &str| name == domain || uuid.eq_ignore_ascii_case(domain);
        let Some((uuid, name)) = listed.iter().find(|(uuid, name)| same(uuid, name)) else {
            return Ok(Lookup::Unknown { known: listed.into_iter().map(|(_, name)| name).collect() });
        };
        wait_for_start(&*daemon, uuid)?;
        let mut xml = dumpxml(&*daemon, uuid)?;
        // A start may have begun after the VM was seen shut off.
        if xml.id.is_some() && wait_for_start(&*daemon, uuid)? {
            xml = dumpxml(&*daemon, uuid)?;
        }
        if xml.id.is_none() {
            return Ok(Lookup::ShutOff { name: name.clone() });
        }
        let process = process::find(root, &*daemon, &xml)?;
        Ok(Lookup::Running(Self { daemon, xml, process }))
    }

    /// Drives with their current throttling, as QEMU has it (`blkdeviotune` queries it, and taints
    /// no VM). Where libvirt has recorded other limits, these are in `Drive::recorded`. All disks
    /// together take at most `total`.
    pub fn drives(&self, total: Duration) -> Result<Vec<Drive>, VmmError> {
        let end = Instant::now() + total;
        let mut drives = self.xml.drives();
        for (drive, disk) in drives.iter_mut().zip(&self.xml.disks) {
            // The command refuses drives without a medium and with throttle filters, and knows no
            // limits of vhost-user disks.
            if disk.vhost_user || disk.source.is_none() || !disk.filters.is_empty() {
                continue;
            }
            let args = ["blkdeviotune", "--domain", &self.xml.uuid, "--device", &disk.target, "--live"];
            let left = end.saturating_duration_since(Instant::now());
            let out = self.daemon.call(&args, Access::Read, LOOK_UP_LIMIT, left)?;
            // libvirt's record is kept where the output is not understood.
            let Some((limits, group)) = domain::tuned(&String::from_utf8_lossy(&out)) else { continue };
            drive.recorded = (limits != disk.throttle).then_some(disk.throttle);
            drive.limits = Some(limits).filter(|limits| !limits.is_none()).into_iter().collect();
            drive.groups = group.filter(|_| !limits.is_none()).into_iter().collect();
        }
        name_shared(&mut drives);
        Ok(drives)
    }

    /// Address of its guest agent; `None` while none is connected.
    #[must_use]
    pub fn agent(&self) -> Option<AgentAddress> {
        (self.xml.agent == AgentState::Connected).then(|| {
            AgentAddress::Libvirt(LibvirtAgent {
                uri: self.daemon.uri().to_owned(),
                uuid: self.xml.uuid.clone(),
                process: self.process.clone(),
            })
        })
    }

    /// Daemon that manages it.
    #[must_use]
    pub fn daemon(&self) -> Arc<dyn Daemon> {
        Arc::clone(&self.daemon)
    }
}

/// UUID and name of each VM. A name such as `7` would be taken for an id by every command that
/// takes a VM, so all others are called with the UUID.
fn list(daemon: &dyn Daemon) -> Result<Vec<(String, String)>, VmmError> {
    let args = ["list", "--all", "--uuid", "--name"];
    let out = daemon.call(&args, Access::Read, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT)?;
    let text = String::from_utf8_lossy(&out);
    let pair = |line: &str| {
        let (uuid, name) = line.trim().split_once(char::is_whitespace)?;
        Some((uuid.to_owned(), name.trim().to_owned()))
    };
    Ok(text.lines().filter_map(pair).collect())
}

/// Waits while a VM is being started; returns whether it was.
fn wait_for_start(daemon: &dyn Daemon, uuid: &str) -> Result<bool, VmmError> {
    let deadline = Deadline::after(START_TIMEOUT);
    let mut waited = false;
    loop {
        let args = ["domstate", "--reason", "--domain", uuid];
        let out = daemon.call(&args, Access::Read, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT)?;
        if String::from_utf8_lossy(&out).trim() != STARTING {
            return Ok(waited);
        }
        waited = true;
        if deadline.left().is_none() {
            return Err(deadline.passed(&format!("libvirt {}", daemon.uri()), "start of the domain"));
        }
        thread::sleep(START_POLL);
    }
}

/// XML of a VM; of the current start when it runs.
fn dumpxml(daemon: &dyn Daemon, uuid: &str) -> Result<DomainXml, VmmError> {
    let out = daemon.call(&["dumpxml", "--domain", uuid], Access::Read, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT)?;
    let bad = |detail: String| VmmError::Protocol {
        peer: format!("libvirt {}", daemon.uri()),
        operation: "dumpxml".to_owned(),
        detail,
    };
    let text = String::from_utf8(out).map_err(|e| bad(e.to_string()))?;
    DomainXml::parse(&text).map_err(bad)
}
