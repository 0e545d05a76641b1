//! `rtvirtio-pacemaker publish --every` on nodes, in place of their services.

use std::fs;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

/// Running services. They end when this is dropped; published capacities stay.
pub struct Publishers(Vec<Child>);

impl FromIterator<Child> for Publishers {
    fn from_iter<T: IntoIterator<Item = Child>>(children: T) -> Self {
        Self(children.into_iter().collect())
    }
}

impl Drop for Publishers {
    fn drop(&mut self) {
        for nsenter in &mut self.0 {
            // `nsenter` waits for the program in the node's namespaces, its child.
            let id = nsenter.id();
            let text = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
            for pid in text.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
                let _ = kill_process(pid, Signal::KILL);
            }
            let _ = nsenter.kill();
            let _ = nsenter.wait();
        }
    }
}
