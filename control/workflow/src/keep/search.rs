//! Searches for VMs, each in a thread of its own: an unresponsive monitor delays no other VM.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use rtvirtio_kernel::Root;
use rtvirtio_kernel::detached::Detached;
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

/// Searches for VMs whose answers were not taken, at most one for each.
pub(super) struct Search {
    dirs: Dirs,
    threads: BTreeMap<String, Detached<SearchResult>>,
}

impl Search {
    pub fn new(dirs: &Dirs) -> Self {
        Self { dirs: dirs.clone(), threads: BTreeMap::new() }
    }

    /// Begins to look for a VM, unless an earlier search has not ended or its answer was not taken.
    pub fn start(&mut self, vm: &Vm) -> Result<()> {
        if self.threads.contains_key(&vm.name) {
            return Ok(());
        }
        let (spec, dirs) = (vm.clone(), self.dirs.clone());
        let search = move || {
            let warnings = RefCell::new(Vec::new());
            let warn = |line: &str| warnings.borrow_mut().push(line.to_owned());
            let of_host = find::one_of_host(std::slice::from_ref(&spec), &spec.name, &dirs);
            let found = of_host.and_then(|vm| Ok((vm.handle_under(&Root::default(), &warn)?, vm)));
            SearchResult { found: found.map(|(handle, vm)| (vm, handle)), warnings: warnings.take() }
        };
        let thread = Detached::call("search", search).context("a thread that looks for a VM")?;
        self.threads.insert(vm.name.clone(), thread);
        Ok(())
    }

    /// The answer for a VM, once; `None` without one after `patience`.
    pub fn wait_for(&mut self, vm: &str, patience: Duration) -> Option<SearchResult> {
        let answer = self.threads.get(vm)?.wait(patience)?;
        self.threads.remove(vm);
        Some(answer.unwrap_or_else(|e| SearchResult { found: Err(e.into()), warnings: Vec::new() }))
    }
}

#[cfg(test)]
pub(super) mod tests;
