//! What the process gives up before it serves anybody, so that a guest who takes it over has won
//! little.
//!
//! Order matters. Everything that is reached by a path is open when [`Sandbox::enter`] runs, and
//! there is no other thread yet: what it gives up, all threads are born without. Each thread then
//! gives up the rest by itself ([`Sandbox::confine`]), for each kind needs something else: an
//! engine that serves guests' requests may not even make a socket or map a descriptor's memory.

mod seccomp;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rtvirtio_domain_config::{File, Sandbox as Mode};
use rtvirtio_engine::confine::{Confine, Role};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// What the process keeps until all threads have their priority and its memory is locked.
const START: CapabilitySet = CapabilitySet::SYS_NICE.union(CapabilitySet::IPC_LOCK);

/// What is in force, and what this kernel lacks.
#[derive(Debug)]
pub struct Sandbox {
    mode: Mode,
    in_force: Vec<String>,
    lacking: Vec<String>,
    filters: bool,
}

impl Sandbox {
    /// Shuts the calling thread in, and thereby all that it will start: no new privileges, no
    /// capability but those of the start, no path but the configuration's directory to read and the
    /// sockets' directories to remove them from. To be called when everything is open and before
    /// any other thread runs.
    ///
    /// # Errors
    /// What the kernel has and refuses all the same. What it does not have is told by
    /// [`Sandbox::describe`].
    pub fn enter(file: &File, config: &Path) -> anyhow::Result<Self> {
        let mut sandbox =
            Self { mode: file.sandbox, in_force: Vec::new(), lacking: Vec::new(), filters: false };
        if sandbox.mode == Mode::Off {
            return Ok(sandbox);
        }
        // The clock's first reading looks for the kernel's fast way to it, through /proc on older
        // kernels.
        let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        rustix::thread::set_no_new_privs(true).context("sandbox: no_new_privs")?;
        sandbox.in_force.push("no new privileges".into());
        empty_bounding_set();
        keep_capabilities(START).context("sandbox: capabilities")?;
        if sandbox.mode == Mode::On {
            sandbox.landlock(file, config)?;
        }
        sandbox.filters = seccomp::is_supported();
        match (sandbox.filters, sandbox.mode) {
            (false, _) => sandbox.lacking.push("seccomp".into()),
            (true, Mode::Log) => sandbox.in_force.push("seccomp, which only logs".into()),
            (true, _) => sandbox.in_force.push("seccomp".into()),
        }
        Ok(sandbox)
    }

    fn landlock(&mut self, file: &File, config: &Path) -> anyhow::Result<()> {
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(ABI::V5))?
            .handle_access(AccessNet::from_all(ABI::V5))?
            .scope(Scope::from_all(ABI::V6))?
            .create()?;
        let disks = file.devices.iter().flat_map(|d| &d.disks);
        let sockets: BTreeSet<PathBuf> =
            disks.map(|d| &d.socket).chain([&file.control]).map(|p| directory(p)).collect();
        // An editor replaces the file, so its directory it is; and that of the file itself where
        // this is a link.
        let file = std::fs::canonicalize(config).unwrap_or_else(|_| config.to_owned());
        let mut rules = vec![(directory(config), AccessFs::ReadFile), (directory(&file), AccessFs::ReadFile)];
        rules.extend(sockets.into_iter().map(|dir| (dir, AccessFs::RemoveFile)));
        let rules = rules.into_iter().map(|(dir, access)| {
            PathFd::new(&dir).map(|fd| PathBeneath::new(fd, access)).map_err(anyhow::Error::from)
        });
        let done =
            ruleset.add_rules(rules).and_then(|r| Ok(r.restrict_self()?)).context("sandbox: landlock")?;
        let LandlockStatus::Available { effective_abi, .. } = done.landlock else {
            self.lacking.push("landlock".into());
            return Ok(());
        };
        match done.ruleset {
            RulesetStatus::NotEnforced => self.lacking.push("landlock".into()),
            _ => self.in_force.push(format!("landlock ABI {}", effective_abi as i32)),
        }
        Ok(())
    }

    /// What each thread does when it has all that it needs.
    ///
    /// # Errors
    /// When the filters cannot be made, which would be a defect.
    pub fn confine(&self) -> anyhow::Result<Confine> {
        if self.mode == Mode::Off {
            return Ok(Confine::none());
        }
        let filters = if self.filters { Some(seccomp::Filters::new(self.mode == Mode::Log)?) } else { None };
        Ok(Confine::with(move |role| {
            let keep = match role {
                // The kernel looks at who submits: a real-time class takes this one
                // (ioprio_check_cap).
                Role::Engine { passes_priority: true } => CapabilitySet::SYS_NICE,
                _ => CapabilitySet::empty(),
            };
            keep_capabilities(keep)?;
            filters.as_ref().map_or(Ok(()), |f| f.apply(role))
        }))
    }

    /// For the log: what is in force, and what is not.
    pub fn describe(&self, file: &File, ring_restricted: bool) -> String {
        if self.mode == Mode::Off {
            return "sandbox: off, as the file says".into();
        }
        let (mut in_force, mut lacking) = (self.in_force.clone(), self.lacking.clone());
        let kept = file.devices.iter().filter(|d| d.pass_priority).map(|d| d.name.as_str());
        let kept: Vec<&str> = kept.collect();
        in_force.push(if kept.is_empty() {
            "no capabilities".into()
        } else {
            format!("no capabilities but CAP_SYS_NICE for the engine of {}", kept.join(", "))
        });
        let ring = "io_uring limited to what is used";
        if ring_restricted { &mut in_force } else { &mut lacking }.push(ring.into());
        let lacking = if lacking.is_empty() {
            String::new()
        } else {
            format!("; not in this kernel: {}", lacking.join(", "))
        };
        format!("sandbox: {}{lacking}", in_force.join(", "))
    }
}

/// Where a path lies; `.` for a name alone.
fn directory(path: &Path) -> PathBuf {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
}

/// Leaves the calling thread those of its capabilities that are in `keep`, and nothing to be had
/// back.
fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let left = rustix::thread::capabilities(None)?.permitted & keep;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// What an `execve` could gain. There is none in the sandbox; without `CAP_SETPCAP` there is
/// nothing to empty either.
fn empty_bounding_set() {
    for number in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        // The kernel refuses the first number that it does not know.
        if rustix::thread::remove_capability_from_bounding_set(one).is_err() {
            break;
        }
    }
}

#[cfg(test)]
#[path = "sandbox/tests.rs"]
mod tests;
