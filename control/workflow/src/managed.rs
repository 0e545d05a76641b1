//! VMs by the names that their manager gives them: domains of libvirt, and numbers of Proxmox VE.
//! Each command looks up their processes again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rtvirtio_kernel::{Root, process, unless_gone};
use rtvirtio_spec::LibvirtDomain;
use rtvirtio_text::{shell_argument, shell_word};
use rtvirtio_vmm::libvirt::{Disk, Lookup, RunningDomain, Virsh};
use rtvirtio_vmm::machines::Vmm;

use crate::error::{Context as _, Result, bail};

/// Directory of Proxmox VE with pid files and sockets of its VMs (`PVE::QemuServer::Helpers`).
const PROXMOX_RUN: &str = "/var/run/qemu-server";
/// Directory of Proxmox VE with the configuration of this node's VMs.
const PROXMOX_CONFIG: &str = "/etc/pve/qemu-server";

/// A libvirt domain that runs.
///
/// # Errors
/// [`Kind::NotRunning`](crate::Kind::NotRunning) when it is shut off, with the remedy;
/// [`Kind::File`](crate::Kind::File) when libvirt does not know it.
pub(crate) fn running(root: &Root, of: &LibvirtDomain) -> Result<RunningDomain> {
    let uri = of.uri();
    let connect = match &of.uri {
        Some(uri) => format!(" -c {}", shell_word(uri)),
        None => String::new(),
    };
    match RunningDomain::find(Arc::new(Virsh::new(uri)), root, &of.domain)? {
        Lookup::Running(domain) => Ok(domain),
        Lookup::ShutOff { name } => {
            let argument = shell_argument("--domain", &name);
            bail!(NotRunning, "domain {name} is shut off: `virsh{connect} start {argument}`")
        }
        Lookup::Unknown { known } if known.is_empty() => {
            bail!(File, "libvirt at {uri} has no domain at all, so none is `{}`", of.domain)
        }
        Lookup::Unknown { known } => {
            bail!(File, "libvirt at {uri} has no domain `{}`: there is {}", of.domain, known.join(", "))
        }
    }
}

/// The disk of a libvirt domain that the spec names by its target.
///
/// # Errors
/// No such disk; [`Kind::File`](crate::Kind::File) with those that it has.
pub(crate) fn disk<'d>(domain: &'d RunningDomain, target: &str) -> Result<&'d Disk> {
    if let Some(disk) = domain.xml.disk(target) {
        return Ok(disk);
    }
    let all: Vec<&str> = domain.xml.disks.iter().map(|d| d.target.as_str()).collect();
    let there = if all.is_empty() { "no disk".to_owned() } else { all.join(", ") };
    bail!(File, "domain {} has no disk `{target}`: it has {there}", domain.xml.name)
}

/// The file or device of the host behind a disk, for tasks that run on the host.
///
/// # Errors
/// A disk of a network or a pool, or an image whose bytes are not the guest's.
pub(crate) fn host_path(domain: &RunningDomain, disk: &Disk) -> Result<PathBuf> {
    let (name, target) = (&domain.xml.name, &disk.target);
    let guest = "run qemu-guest-agent in the guest, and the tasks run there";
    let Some(source) = &disk.source else {
        bail!(File, "disk {target} of domain {name} is no file or device of this host: {guest}")
    };
    if let Some(format) = disk.format.as_deref().filter(|format| *format != "raw") {
        bail!(
            File,
            "disk {target} of domain {name} is a {format} image ({}), whose blocks are not those of the guest's disk: {guest}",
            source.display()
        );
    }
    Ok(source.clone())
}

/// A VM of Proxmox VE that runs.
#[derive(Clone, Debug)]
pub(crate) struct ProxmoxVm {
    /// Process id of its QEMU.
    pub(crate) pid: u32,
    /// Socket of QEMU's monitor.
    pub(crate) qmp: PathBuf,
    /// Socket of the guest agent, where the configuration has one.
    pub(crate) agent: Option<PathBuf>,
}

/// Finds a VM by its number.
///
/// # Errors
/// [`Kind::NotRunning`](crate::Kind::NotRunning) when it is stopped, or the process of its pid file
/// is another's; [`Kind::File`](crate::Kind::File) when this node has none of this number.
pub(crate) fn proxmox(root: &Root, id: u32) -> Result<ProxmoxVm> {
    let run = |what: &str| PathBuf::from(PROXMOX_RUN).join(format!("{id}.{what}"));
    let file = run("pid");
    let text = match fs::read_to_string(root.at(&file)) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(stopped(root, id)?),
        Err(e) => return Err(e).with_context(|| file.display().to_string()),
    };
    let pid: u32 = text.trim().parse().with_context(|| format!("{}: no process id", file.display()))?;
    let words = unless_gone(process::command_line(root, pid))?.unwrap_or_default();
    // `/usr/bin/kvm -id 100 -name plc,debug-threads=on ...`
    let number = id.to_string();
    let has_id = words.windows(2).any(|pair| pair[0] == "-id" && pair[1] == number);
    // After a stop that left the file, any user may start a process of this id with these words.
    let is_roots = || Ok::<_, crate::Error>(unless_gone(process::user(root, pid))? == Some(0));
    if !has_id || Vmm::of_process(root, pid)? != Some(Vmm::Qemu) || !is_roots()? {
        bail!(
            NotRunning,
            "VM {id} is stopped (process {pid} of {} is not its QEMU): `qm start {id}`",
            file.display()
        );
    }
    let agent = run("qga");
    let agent = root.exists(&agent)?.then_some(agent);
    Ok(ProxmoxVm { pid, qmp: run("qmp"), agent })
}

/// Error for a VM without a pid file: stopped, unknown, or not on a node of Proxmox VE.
fn stopped(root: &Root, id: u32) -> Result<crate::Error> {
    let config = Path::new(PROXMOX_CONFIG).join(format!("{id}.conf"));
    let (kind, message) = if root.exists(&config)? {
        (crate::Kind::NotRunning, format!("VM {id} is stopped: `qm start {id}`"))
    } else if root.exists(PROXMOX_CONFIG)? {
        (crate::Kind::File, format!("this node has no VM {id}: `qm list` shows those that it has"))
    } else {
        let why = format!("{PROXMOX_CONFIG} does not exist, so this is no node of Proxmox VE");
        (crate::Kind::File, format!("{why}: name the VM by domain, cgroup, pid or qmp"))
    };
    Ok(crate::Error::new(kind, message))
}

#[cfg(test)]
mod tests;
