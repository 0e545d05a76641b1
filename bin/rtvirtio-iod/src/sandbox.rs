//! Confinement of the process: privileges dropped before guests are served, so that an attacker in
//! control of it gains little.
//!
//! Order matters. Everything with a path is open when [`Sandbox::enter`] runs, and no other thread
//! exists: all threads inherit the dropped privileges. Each thread then drops further ones for its
//! role ([`Sandbox::confine`]): an engine, for instance, can neither create a socket nor map a
//! file.

mod seccomp;

use std::io;
use std::path::Path;

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rtvirtio_domain_config::{File, Sandbox as Mode, parent_dir};
use rtvirtio_engine::confine::{Confine, Role};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Capabilities kept until all threads have their priority and memory is locked.
const STARTUP_CAPABILITIES: CapabilitySet = CapabilitySet::SYS_NICE.union(CapabilitySet::IPC_LOCK);

/// Layers in force, and those that this kernel lacks.
#[derive(Debug)]
pub struct Sandbox {
    mode: Mode,
    in_force: Vec<String>,
    lacking: Vec<String>,
    filters: bool,
    /// A disk's memory is pinned.
    pins: bool,
}

impl Sandbox {
    /// Confines the calling thread and all that it will start: no new privileges, no capabilities
    /// but those of the start, no paths but reading the configuration's directory and removing from
    /// the sockets' directories. Called when everything is open and no other thread runs.
    ///
    /// # Errors
    /// A layer that the kernel has and refuses. Missing layers are reported by
    /// [`Sandbox::describe`].
    pub fn enter(file: &File, config: &Path) -> anyhow::Result<Self> {
        let pins = file.devices.iter().flat_map(|device| &device.disks).any(|disk| disk.pin.is_some());
        let mut sandbox =
            Self { mode: file.sandbox, in_force: Vec::new(), lacking: Vec::new(), filters: false, pins };
        if sandbox.mode == Mode::Off {
            return Ok(sandbox);
        }
        // The first reading of the clock maps the vDSO, on older kernels through /proc.
        let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        rustix::thread::set_no_new_privs(true).context("sandbox: no_new_privs")?;
        sandbox.in_force.push("no new privileges".into());
        empty_bounding_set();
        keep_capabilities(STARTUP_CAPABILITIES).context("sandbox: capabilities")?;
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
        let sockets = rtvirtio_domain_resources::handover::socket_directories(file);
        // Editors replace the file, so the rule covers its directory; and that of its target where
        // it is a link.
        let file = std::fs::canonicalize(config).unwrap_or_else(|_| config.to_owned());
        let mut rules = vec![
            (parent_dir(config).to_owned(), AccessFs::ReadFile),
            (parent_dir(&file).to_owned(), AccessFs::ReadFile),
        ];
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

    /// The confinement of each thread, called after its set-up.
    ///
    /// # Errors
    /// The filters cannot be compiled, a defect.
    pub fn confine(&self) -> anyhow::Result<Confine> {
        if self.mode == Mode::Off {
            return Ok(Confine::none());
        }
        let filters = || seccomp::Filters::new(self.mode == Mode::Log, self.pins);
        let filters = if self.filters { Some(filters()?) } else { None };
        Ok(Confine::with(move |role| {
            let keep = match role {
                // The kernel checks the submitter: the real-time class needs this one
                // (ioprio_check_cap).
                Role::Engine { passes_priority: true } => CapabilitySet::SYS_NICE,
                _ => CapabilitySet::empty(),
            };
            keep_capabilities(keep)?;
            filters.as_ref().map_or(Ok(()), |f| f.apply(role))
        }))
    }

    /// Summary for the log: layers in force, and missing ones.
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

/// Keeps only the capabilities in `keep`; the others cannot be regained.
fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    let left = rustix::thread::capabilities(None)?.permitted & keep;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Empties the bounding set, which limits the privileges gained by `execve`. Without `CAP_SETPCAP`
/// it stays, and is useless to an attacker.
fn empty_bounding_set() {
    for number in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        // The kernel refuses the first capability that it does not know.
        if rustix::thread::remove_capability_from_bounding_set(one).is_err() {
            break;
        }
    }
}

#[cfg(test)]
#[path = "sandbox/tests.rs"]
mod tests;
