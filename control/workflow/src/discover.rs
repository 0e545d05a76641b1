//! The virtual machines that run on this host, what they do with its disks, and a first spec for
//! them. Nothing in a guest is touched.

mod compared;
pub(crate) mod disks;
mod domains;
mod observe;
mod spec_text;

use std::collections::BTreeSet;
use std::path::PathBuf;

use rtvirtio_kernel::{Cgroups, Root, process};
use rtvirtio_measure::observe::Observed;
use rtvirtio_spec::{LibvirtDomain, MAX_NAME, dashed};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::machines::{self, Machine, Unreadable, Vmm};
use serde::Serialize;

use crate::cpu_room::CpuUse;
use crate::error::Result;

pub use compared::compare;
pub use disks::{FoundDevice, FoundDisk};
pub use observe::observe;
pub use spec_text::spec_text;

/// Schema of [`Discovery`] as JSON.
pub const DISCOVERY_SCHEMA: &str = "rtvirtio.discovery.v1";

/// The virtual machines of this host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Discovery {
    /// Schema of the JSON, always [`DISCOVERY_SCHEMA`].
    pub schema: String,
    /// Virtual machines, sorted by name.
    pub vms: Vec<FoundVm>,
    /// Processes that may be VMMs and cannot be inspected.
    pub unreadable: Vec<Unreadable>,
    /// URI of libvirt's daemon; `None` is [`LibvirtDomain::DEFAULT_URI`].
    pub uri: Option<String>,
    /// CPU time that the VMs take; `None` without a VM, and where it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuUse>,
    /// Length of the observation of their I/O; `None` without one.
    pub observed_ns: Option<Nanos>,
}

/// A virtual machine that runs on this host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FoundVm {
    /// Name, made fit for a spec, and unique.
    pub name: String,
    /// Program that runs it.
    pub vmm: Vmm,
    /// Process of the VMM.
    pub pid: u32,
    /// Key by which a spec names it.
    pub reach: FoundReach,
    /// Socket of its monitor.
    pub qmp: Option<PathBuf>,
    /// Socket of its guest agent's channel.
    pub agent: Option<PathBuf>,
    /// Cgroup in the hierarchy of the block I/O controller.
    pub cgroup: Option<PathBuf>,
    /// Whether no other VM is in its cgroup, and the cgroup is not the root: only then do weights,
    /// limits and counters of the cgroup concern this VM alone.
    pub own_cgroup: bool,
    /// Disks that its process has open.
    pub disks: Vec<FoundDisk>,
    /// Limitations of what can be set or observed, in sentences.
    pub notes: Vec<String>,
}

/// Key by which a spec names a virtual machine: the most lasting that it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FoundReach {
    /// A domain of libvirt.
    Domain(String),
    /// A guest of Proxmox VE.
    Proxmox(u32),
    /// The socket of QEMU's monitor.
    Qmp(PathBuf),
    /// A cgroup of its own.
    Cgroup(PathBuf),
    /// The process id, which changes at every start.
    Pid(u32),
}

/// Observed I/O of a disk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Activity {
    /// Origin of the counters.
    pub source: Source,
    /// By direction; directions at rest are left out.
    pub directions: Vec<Observed>,
}

/// Origin of the counters of a VM's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// QEMU: rates, sizes and latencies of one disk.
    Qemu,
    /// The kernel: rates and sizes of the whole cgroup on one device.
    Cgroup,
}

/// Finds the virtual machines. Changes nothing, and asks no monitor. libvirt, at `uri` or its
/// default, is asked for the disks of its domains.
pub fn discover(root: &Root, uri: Option<&str>) -> Result<Discovery> {
    let (machines, unreadable) = machines::find(root)?;
    let cgroups = Cgroups::detect(root).ok();
    let mut names = BTreeSet::new();
    let mut vms = Vec::new();
    let found: Vec<_> = machines
        .into_iter()
        .map(|machine| {
            let cgroup = cgroups.as_ref().and_then(|c| c.of_pid(root, machine.pid).ok());
            (machine, cgroup.map(|c| Cgroups::unit_of(&c)))
        })
        .collect();
    for (machine, cgroup) in &found {
        let alone = found.iter().filter(|(_, other)| other == cgroup).count() == 1;
        vms.push(vm(root, machine, cgroup.clone(), alone, &mut names)?);
    }
    vms.sort_by(|a: &FoundVm, b| a.name.cmp(&b.name));
    for vm in &mut vms {
        domains::targets(root, uri.unwrap_or(LibvirtDomain::DEFAULT_URI), vm);
    }
    let (schema, uri) = (DISCOVERY_SCHEMA.to_owned(), uri.map(str::to_owned));
    Ok(Discovery { schema, vms, unreadable, uri, cpu: None, observed_ns: None })
}

fn vm(
    root: &Root,
    machine: &Machine,
    cgroup: Option<PathBuf>,
    alone: bool,
    names: &mut BTreeSet<String>,
) -> Result<FoundVm> {
    let (pid, line) = (machine.pid, &machine.line);
    let own = cgroup.as_ref().filter(|c| alone && !Cgroups::is_root(c));
    let own_cgroup = own.is_some();
    let reach = match (&line.name, line.proxmox, &line.qmp, own) {
        (Some(name), ..) if line.libvirt => FoundReach::Domain(name.clone()),
        (_, Some(id), ..) => FoundReach::Proxmox(id),
        (_, _, Some(socket), _) if socket.is_absolute() => FoundReach::Qmp(socket.clone()),
        (.., Some(cgroup)) => FoundReach::Cgroup(cgroup.clone()),
        _ => FoundReach::Pid(pid),
    };
    let mut notes = Vec::new();
    match &reach {
        FoundReach::Pid(_) => notes.push(
            "it is known by its process id only, which changes at every start: give it a QMP socket or a cgroup of its own"
                .to_owned(),
        ),
        FoundReach::Cgroup(_) if machine.vmm == Vmm::Qemu => {
            notes.push("without a QMP socket QEMU's own counters cannot be read: no latencies".to_owned());
        }
        _ => {}
    }
    match &cgroup {
        Some(cgroup) if Cgroups::is_root(cgroup) => notes.push(
            "it is in the root cgroup, where no weight or limit can act: start it in a cgroup of its own, as with `systemd-run --scope`"
                .to_owned(),
        ),
        Some(cgroup) if !alone => notes.push(format!(
            "it shares the cgroup {} with another VM: no weight or limit can act between them",
            cgroup.display()
        )),
        Some(_) => {}
        None => notes.push("its cgroup of the block I/O controller is not known".to_owned()),
    }
    for socket in &line.vhost_user {
        notes.push(format!("another process serves one of its disks, through {}", socket.display()));
    }
    let process_name = process::name(root, pid).unwrap_or_default();
    let base = line.name.clone().unwrap_or_else(|| format!("{process_name}-{pid}"));
    Ok(FoundVm {
        name: unique(&base, names),
        vmm: machine.vmm,
        pid,
        qmp: line.qmp.clone().filter(|p| p.is_absolute()),
        agent: line.agent.clone().filter(|p| p.is_absolute()),
        cgroup,
        own_cgroup,
        disks: machine.disks.iter().map(|d| FoundDisk::new(root, d)).collect::<Result<_>>()?,
        reach,
        notes,
    })
}

/// A name as a spec takes it: letters, digits, `-`, `_`, `.`, a letter or digit first.
fn unique(base: &str, names: &mut BTreeSet<String>) -> String {
    let clean = dashed(base);
    let clean = clean.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
    let clean = if clean.is_empty() { "vm" } else { clean };
    let with = |suffix: &str| {
        let head: String = clean.chars().take(MAX_NAME - suffix.len()).collect();
        head + suffix
    };
    let mut name = with("");
    let mut n = 2;
    while !names.insert(name.clone()) {
        name = with(&format!("-{n}"));
        n += 1;
    }
    name
}

#[cfg(test)]
mod tests;
