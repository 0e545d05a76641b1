//! Searches for VMs, each in a thread of its own: an unresponsive monitor delays no other VM.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rtvirtio_kernel::Root;
use rtvirtio_spec::Vm;
use rtvirtio_vmm::VmHandle;

use crate::dirs::Dirs;
use crate::error::{Context as _, Result};
use crate::find::{self, HostVm};

/// Result of one search.
pub(super) struct SearchResult {
    /// The VM with its processes.
    pub found: Result<(HostVm, VmHandle)>,
    /// Warnings about uncertain thread roles.
    pub warnings: Vec<String>,
}

/// Searches under way, at most one for each VM, and their answers.
pub(super) struct Search {
    dirs: Dirs,
    sender: Sender<(String, SearchResult)>,
    answers: Receiver<(String, SearchResult)>,
    under_way: BTreeSet<String>,
    arrived: BTreeMap<String, SearchResult>,
}

impl Search {
    pub fn new(dirs: &Dirs) -> Self {
        let (sender, answers) = channel();
        let (under_way, arrived) = (BTreeSet::new(), BTreeMap::new());
        Self { dirs: dirs.clone(), sender, answers, under_way, arrived }
    }

    /// Begins to look for a VM, unless that is under way.
    ///
    /// # Errors
    /// When there is no thread.
    pub fn start(&mut self, vm: &Vm) -> Result<()> {
        if self.under_way.contains(&vm.name) {
            return Ok(());
        }
        // An earlier answer may be outdated.
        self.arrived.remove(&vm.name);
        let (spec, dirs, sender) = (vm.clone(), self.dirs.clone(), self.sender.clone());
        let run = move || {
            let warnings = RefCell::new(Vec::new());
            let warn = |line: &str| warnings.borrow_mut().push(line.to_owned());
            let of_host = find::one_of_host(std::slice::from_ref(&spec), &spec.name, &dirs);
            let found = of_host.and_then(|vm| Ok((vm.handle_under(&Root::default(), &warn)?, vm)));
            let found =
                SearchResult { found: found.map(|(handle, vm)| (vm, handle)), warnings: warnings.take() };
            // Nobody waits for it after the end.
            let _ = sender.send((spec.name.clone(), found));
        };
        let thread = std::thread::Builder::new().name("search".to_owned()).spawn(run);
        thread.context("a thread that looks for a VM")?;
        self.under_way.insert(vm.name.clone());
        Ok(())
    }

    /// The answer for a VM, once.
    pub fn take(&mut self, vm: &str) -> Option<SearchResult> {
        while let Ok((name, found)) = self.answers.try_recv() {
            self.note(name, found);
        }
        self.arrived.remove(vm)
    }

    /// Waits for the answer for a VM; `None` after `patience`.
    pub fn wait_for(&mut self, vm: &str, patience: Duration) -> Option<SearchResult> {
        let end = Instant::now() + patience;
        loop {
            if let Some(found) = self.take(vm) {
                return Some(found);
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(left) {
                Ok((name, found)) => self.note(name, found),
                Err(_) => return None,
            }
        }
    }

    fn note(&mut self, vm: String, found: SearchResult) {
        self.under_way.remove(&vm);
        self.arrived.insert(vm, found);
    }
}

#[cfg(test)]
mod tests;
