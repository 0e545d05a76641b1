//! Memory traffic of VMs, where the CPU counts it by groups of threads (resctrl).

use std::collections::BTreeSet;

use rtvirtio_kernel::resctrl::{MemoryLook, uncounted};
use rtvirtio_kernel::{ProcessId, Root, task};
use serde::Serialize;

/// Memory traffic of one VM since the last sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MemoryObservation {
    /// Bytes per second that its threads moved to and from memory; `None` where that is not
    /// visible. What devices move by DMA is not in it.
    pub bytes_per_s: Option<f64>,
    /// Reason why the rate is not visible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unseen: Option<String>,
}

/// Last two samples of the resctrl groups' counters.
#[derive(Debug, Default)]
pub(super) struct MemoryWindow {
    before: Option<MemoryLook>,
    now: Option<MemoryLook>,
    /// Reason why no VM's traffic is visible.
    unseen: Option<String>,
}

impl MemoryWindow {
    /// Takes a sample; [`MemoryWindow::traffic_of`] is about the time since the one before.
    pub(super) fn sample(&mut self, root: &Root) {
        self.before = self.now.take();
        self.unseen = None;
        let looked = uncounted(root).and_then(|found| match found {
            Ok(resctrl) => MemoryLook::now(root, &resctrl).map(Ok),
            Err(why) => Ok(Err(why)),
        });
        match looked {
            Ok(Ok(look)) => self.now = Some(look),
            Ok(Err(why)) => self.unseen = Some(why),
            Err(e) => self.unseen = Some(format!("not known: {e}")),
        }
    }

    /// Traffic of the threads of these processes.
    pub(super) fn traffic_of(&self, root: &Root, processes: &[ProcessId]) -> MemoryObservation {
        let unseen = |why: &str| MemoryObservation { bytes_per_s: None, unseen: Some(why.to_owned()) };
        let (now, before) = match (&self.now, &self.before, &self.unseen) {
            (_, _, Some(why)) => return unseen(why),
            (Some(now), Some(before), None) => (now, before),
            _ => return unseen("not known yet: this is the first sample"),
        };
        let threads: BTreeSet<u32> =
            processes.iter().flat_map(|process| task::tids(root, process.pid).unwrap_or_default()).collect();
        match now.rate_since(before, &threads) {
            Ok(rate) => MemoryObservation { bytes_per_s: Some(rate), unseen: None },
            Err(why) => unseen(&why),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn put(root: &Root, path: &str, text: &str) {
        let path = root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_vm_in_a_group_of_its_own_has_a_rate_and_others_a_reason() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        let processes = [ProcessId { pid: 70, start_time: 1 }];
        let mut window = MemoryWindow::default();
        window.sample(&root);
        let none = window.traffic_of(&root, &processes);
        assert!(none.bytes_per_s.is_none() && none.unseen.unwrap().contains("no resctrl"));
        for (path, text) in [
            ("/proc/self/mountinfo", "40 31 0:40 / /sys/fs/resctrl rw - resctrl resctrl rw\n"),
            ("/proc/cpuinfo", "vendor_id\t: GenuineIntel\n"),
            ("/proc/70/task/70/stat", ""),
            ("/proc/70/task/71/stat", ""),
            ("/sys/fs/resctrl/schemata", "    MB:0=100\n"),
            ("/sys/fs/resctrl/info/L3_MON/mon_features", "mbm_total_bytes\n"),
            ("/sys/fs/resctrl/tasks", "1\n"),
            ("/sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "5\n"),
            ("/sys/fs/resctrl/plc/tasks", "70\n71\n"),
            ("/sys/fs/resctrl/plc/mon_data/mon_L3_00/mbm_total_bytes", "1000\n"),
        ] {
            put(&root, path, text);
        }
        window.sample(&root);
        assert!(window.traffic_of(&root, &processes).unseen.unwrap().contains("first sample"));
        put(&root, "/sys/fs/resctrl/plc/mon_data/mon_L3_00/mbm_total_bytes", "9000\n");
        window.sample(&root);
        let seen = window.traffic_of(&root, &processes);
        assert!(seen.bytes_per_s.unwrap() > 0.0 && seen.unseen.is_none(), "{seen:?}");
        let json = serde_json::to_value(MemoryObservation { bytes_per_s: None, ..seen }).unwrap();
        assert!(json["bytes_per_s"].is_null() && json.get("bytes_per_s").is_some(), "null, not left out");
    }
}
