//! Process of a VM's QEMU: the one in libvirt's pid file. A command line proves nothing, as any
//! user can start a process with the same one.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::{ProcessId, Root, process, task};
use rustix::process::geteuid;

use super::{Daemon, DomainXml};
use crate::VmmError;
use crate::machines::Vmm;

/// Directory with the system daemon's sockets, and its drivers' pid files below.
const SYSTEM_RUN: &str = "/run/libvirt";
/// Write permission for the group or for others.
const OTHERS_WRITE: u32 = 0o022;

/// Finds the process. Without a readable pid file, as where libvirt runs in a container, it is the
/// one that has the VM's UUID on its command line, a VMM as its program, and the user that libvirt
/// runs it as; where several match, the one in a cgroup of this start.
pub(super) fn find(root: &Root, daemon: &dyn Daemon, xml: &DomainXml) -> Result<ProcessId, VmmError> {
    let bad = |detail: String| VmmError::Protocol {
        peer: format!("libvirt {}", daemon.uri()),
        operation: format!("process of domain {}", xml.name),
        detail,
    };
    let id = |pid: u32| {
        let id = ProcessId::find(pid).ok().flatten();
        id.ok_or_else(|| bad(format!("process {pid} has just ended; try again")))
    };
    if let Some(pid) = pid_file(root, daemon.uri(), &xml.name) {
        if has_uuid(root, pid, &xml.uuid) && objection(root, pid, xml, true).is_none() {
            return id(pid);
        }
    }
    let (mut found, mut refused) = (Vec::new(), Vec::new());
    for pid in process::pids(root).map_err(|e| bad(e.to_string()))? {
        if has_uuid(root, pid, &xml.uuid) {
            match objection(root, pid, xml, false) {
                None => found.push(pid),
                Some(why) => refused.push(format!("process {pid} claims it and {why}")),
            }
        }
    }
    if found.len() > 1 {
        found.retain(|pid| process::cgroups(root, *pid).is_ok_and(|all| names_domain(&all, xml)));
    }
    match found.as_slice() {
        [pid] => id(*pid),
        [] if refused.is_empty() => Err(bad(
            "it runs, and no process here was started with its UUID: does its QEMU run in a container, or does this user \
             not see other users' processes?"
                .to_owned(),
        )),
        [] => Err(bad(format!(
            "it runs, and none of the processes here that were started with its UUID is taken for its QEMU: {}",
            refused.join("; ")
        ))),
        several => Err(bad(format!("processes {several:?} were all started with its UUID {}", xml.uuid))),
    }
}

/// Reason why a process is not the QEMU of a VM, whatever its command line.
fn objection(root: &Root, pid: u32, xml: &DomainXml, is_named: bool) -> Option<String> {
    // Readable by root and the owner; else the name of the process decides.
    let program = process::executable(root, pid).ok().flatten();
    let is_emulator = program.is_some() && program == xml.emulator;
    if !is_emulator && !matches!(Vmm::of_process(root, pid), Ok(Some(_))) {
        let program = program.map_or_else(|| "unknown".to_owned(), |path| path.display().to_string());
        return Some(format!("is no virtual machine monitor (its program is {program})"));
    }
    let user = match process::user(root, pid) {
        Ok(user) => user,
        Err(e) => return Some(format!("its user is not known: {e}")),
    };
    // Root could do anything anyway, and this process's own user is trusted.
    let is_trusted = user == 0 || user == geteuid().as_raw();
    match xml.user {
        _ if is_trusted => None,
        Some(of) if of == user => None,
        Some(of) => Some(format!("runs as user {user}, where libvirt runs it as user {of}")),
        None if is_named => None,
        None => Some(format!("runs as user {user}, and libvirt does not say as which user it runs it")),
    }
}

/// Process in libvirt's pid file; `None` where there is none that can be trusted.
fn pid_file(root: &Root, uri: &str, name: &str) -> Option<u32> {
    // libvirt refuses a name with a slash.
    if name.contains('/') {
        return None;
    }
    let dir =
        directories(uri).into_iter().find(|dir| is_trusted(&root.at(dir.join(format!("{name}.pid")))))?;
    is_trusted(&root.at(&dir)).then_some(())?;
    root.read(dir.join(format!("{name}.pid"))).ok()?.trim().parse().ok()
}

/// Directories of pid files of a daemon's QEMU driver.
fn directories(uri: &str) -> Vec<PathBuf> {
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let socket = query.split('&').find_map(|part| part.strip_prefix("socket="));
    if path.ends_with("/session") {
        let user = geteuid().as_raw();
        let given = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let all = given.into_iter().chain([PathBuf::from(format!("/run/user/{user}"))]);
        return all.map(|dir| dir.join("libvirt/qemu/run")).collect();
    }
    let run = socket.and_then(|socket| Path::new(socket).parent()).unwrap_or(Path::new(SYSTEM_RUN));
    vec![run.join("qemu")]
}

/// Whether only root or this user can have written a file or directory.
fn is_trusted(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|of| {
        let is_ours = of.uid() == 0 || of.uid() == geteuid().as_raw();
        is_ours && !of.is_symlink() && of.mode() & OTHERS_WRITE == 0
    })
}

fn has_uuid(root: &Root, pid: u32, uuid: &str) -> bool {
    // Ended meanwhile, or hidden from this user.
    let Ok(words) = process::command_line(root, pid) else { return false };
    words.windows(2).any(|pair| pair[0] == "-uuid" && pair[1].eq_ignore_ascii_case(uuid))
}

/// Whether a cgroup has the name that libvirt gives in this start: `qemu-ID-NAME...`, in systemd's
/// units with `\x2d` for `-`.
fn names_domain(all: &[task::Membership], xml: &DomainXml) -> bool {
    let Some(id) = xml.id else { return false };
    let marks = [format!("qemu-{id}-"), format!("qemu\\x2d{id}\\x2d")];
    all.iter().any(|m| {
        m.path.components().any(|c| marks.iter().any(|mark| c.as_os_str().to_string_lossy().contains(mark)))
    })
}
