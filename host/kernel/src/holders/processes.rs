//! Processes that have a device or file open or mapped.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};

use super::target::{Node, Target};
use super::{Holder, Unseen};
use crate::error::is_gone;
use crate::{HostError, Root, process};

/// `O_PATH` of the generic ABI: such a descriptor can neither read nor write.
const O_PATH: u32 = libc::O_PATH as u32;

/// Cache of the files of mappings in `/proc/PID/maps`, by device and inode as printed there:
/// libraries are in every process.
type Mapped = BTreeMap<(String, String), Option<Node>>;

/// Adds the processes that have a part of `target` open to `found`; returns those that could not be
/// inspected.
pub(super) fn holding(
    target: &Target,
    except: &[u32],
    found: &mut Vec<Holder>,
) -> Result<Vec<Unseen>, HostError> {
    let mut unseen = Vec::new();
    let mut mapped = Mapped::new();
    let root = Root::default();
    for pid in process::pids(&root)? {
        if pid == std::process::id() || except.contains(&pid) {
            continue;
        }
        let mut open = Vec::new();
        let seen = descriptors(target, pid, &mut open).and_then(|()| {
            if open.is_empty() { mappings(target, pid, &mut mapped, &mut open) } else { Ok(()) }
        });
        match seen {
            Ok(()) => {}
            Err(e) if is_gone(&e) => continue,
            // Whatever the error: this process could not be inspected.
            Err(_) => unseen.push(Unseen { pid, program: program(pid) }),
        }
        if open.is_empty() {
            continue;
        }
        let mut once: BTreeMap<String, bool> = BTreeMap::new();
        for (what, writes) in open {
            *once.entry(what).or_default() |= writes;
        }
        let program = program(pid);
        let holder = |(what, writes)| Holder::Process { pid, program: program.clone(), what, writes };
        found.extend(once.into_iter().map(holder));
    }
    Ok(unseen)
}

fn program(pid: u32) -> String {
    process::name(&Root::default(), pid).unwrap_or_else(|_| "?".to_owned())
}

fn descriptors(target: &Target, pid: u32, open: &mut Vec<(String, bool)>) -> io::Result<()> {
    let root = Root::default();
    for descriptor in process::descriptors(&root, pid).map_err(HostError::into_io)? {
        let Some(part) = part(target, &descriptor.link())? else { continue };
        let flags = match descriptor.info(&root) {
            Ok(info) => flags(&info),
            Err(e) if is_gone(&e) => continue,
            Err(e) => return Err(e),
        };
        if flags & O_PATH == 0 {
            open.push((part, flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32));
        }
    }
    Ok(())
}

/// `flags:` of proc_pid_fdinfo(5), in octal. If missing, the worst case: open for writing.
fn flags(info: &str) -> u32 {
    let text = info.lines().find_map(|line| line.strip_prefix("flags:"));
    text.and_then(|t| u32::from_str_radix(t.trim(), 8).ok()).unwrap_or(libc::O_RDWR as u32)
}

/// Part of the target that a link of `/proc` leads to. Never waits for a file system's server.
fn part(target: &Target, link: &PathBuf) -> io::Result<Option<String>> {
    Ok(node(link)?.and_then(|node| target.name(node)).map(str::to_owned))
}

fn node(link: &PathBuf) -> io::Result<Option<Node>> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO;
    let stat = match statx(CWD, link, AtFlags::STATX_DONT_SYNC, wanted) {
        Ok(stat) => stat,
        Err(e) => {
            let e = io::Error::from(e);
            return if is_gone(&e) { Ok(None) } else { Err(e) };
        }
    };
    Ok(match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::BlockDevice => Some(Node::Block(makedev(stat.stx_rdev_major, stat.stx_rdev_minor))),
        FileType::RegularFile => {
            Some(Node::File(makedev(stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino))
        }
        _ => None,
    })
}

/// Adds memory mappings of the target, whose descriptor may be closed.
fn mappings(target: &Target, pid: u32, known: &mut Mapped, open: &mut Vec<(String, bool)>) -> io::Result<()> {
    let dir = PathBuf::from(format!("/proc/{pid}"));
    // A path in it need not be UTF-8.
    // kernel file
    for line in String::from_utf8_lossy(&fs::read(dir.join("maps"))?).lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(modes), Some(_), Some(dev), Some(inode)) =
            (words.next(), words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        if inode == "0" {
            continue;
        }
        let key = (dev.to_owned(), inode.to_owned());
        let node = match known.get(&key) {
            Some(node) => *node,
            None => {
                let node = node(&dir.join("map_files").join(range))?;
                known.insert(key, node);
                node
            }
        };
        if let Some(name) = node.and_then(|node| target.name(node)) {
            // A private mapping does not write to the file.
            let writes = modes.contains('w') && modes.ends_with('s');
            open.push((name.to_owned(), writes));
        }
    }
    Ok(())
}
