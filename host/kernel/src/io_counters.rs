//! Requests and bytes of a cgroup at a block device: `io.stat` on v2, blk-throttle's or BFQ's
//! counters on v1 (`Documentation/admin-guide/cgroup-v2.rst`,
//! `Documentation/admin-guide/cgroup-v1/blkio-controller.rst`).

use std::path::Path;

use crate::{Cgroups, Hierarchy, HostError, Root};

/// Counters since the cgroup was made, including the groups below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounters {
    /// Number of read requests.
    pub reads: u64,
    /// Number of write requests.
    pub writes: u64,
    pub read_bytes: u64,
    /// Number of bytes written.
    pub write_bytes: u64,
}

impl IoCounters {
    /// Counters of a cgroup for the device with this number, `MAJ:MIN`; `None` where the kernel
    /// counts nothing: the group has had no request yet, or on v1 neither blk-throttle nor BFQ is
    /// in use.
    pub fn read(root: &Root, cgroups: &Cgroups, cgroup: &Path, dev: &str) -> Result<Option<Self>, HostError> {
        let dir = cgroups.dir(cgroup)?;
        if cgroups.hierarchy == Hierarchy::V2 {
            // The root group has no such file.
            let text = root.read_optional(dir.join("io.stat"))?.unwrap_or_default();
            return Ok(of_io_stat(&text, dev));
        }
        for policy in ["throttle", "bfq"] {
            let file = |what: &str| {
                let path = dir.join(format!("blkio.{policy}.{what}_recursive"));
                root.read_optional(path).map(Option::unwrap_or_default)
            };
            let (requests, bytes) = (file("io_serviced")?, file("io_service_bytes")?);
            let get = |text: &str, direction: &str| of_v1(text, dev, direction);
            if let (Some(reads), Some(writes)) = (get(&requests, "Read"), get(&requests, "Write")) {
                let read_bytes = get(&bytes, "Read").unwrap_or(0);
                let write_bytes = get(&bytes, "Write").unwrap_or(0);
                return Ok(Some(Self { reads, writes, read_bytes, write_bytes }));
            }
        }
        Ok(None)
    }

    /// Difference to `earlier`; `None` when the counters were reset in between.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            reads: self.reads.checked_sub(earlier.reads)?,
            writes: self.writes.checked_sub(earlier.writes)?,
            read_bytes: self.read_bytes.checked_sub(earlier.read_bytes)?,
            write_bytes: self.write_bytes.checked_sub(earlier.write_bytes)?,
        })
    }
}

/// Line such as `8:0 rbytes=90112 wbytes=0 rios=22 wios=0 dbytes=0 dios=0`.
fn of_io_stat(text: &str, dev: &str) -> Option<IoCounters> {
    let mut words = text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(dev)).then_some(words)
    })?;
    let mut counters = IoCounters::default();
    words.try_for_each(|word| {
        let (key, value) = word.split_once('=')?;
        let field = match key {
            "rbytes" => &mut counters.read_bytes,
            "wbytes" => &mut counters.write_bytes,
            "rios" => &mut counters.reads,
            "wios" => &mut counters.writes,
            _ => return Some(()),
        };
        *field = value.parse().ok()?;
        Some(())
    })?;
    Some(counters)
}

/// Number in a line such as `8:0 Read 22`.
fn of_v1(text: &str, dev: &str, direction: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let fits = words.next() == Some(dev) && words.next() == Some(direction);
        words.next().filter(|_| fits)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms() {
        let v2 = "8:16 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6 cost.usage=9\n8:0 rbytes=90112 wbytes=7 rios=22 wios=1\n";
        let of = |dev| of_io_stat(v2, dev);
        assert_eq!(
            of("8:0").map(|c| (c.reads, c.writes, c.read_bytes, c.write_bytes)),
            Some((22, 1, 90112, 7))
        );
        assert_eq!(of("8:1"), None);
        assert_eq!(of_io_stat("8:0 rios=x\n", "8:0"), None);
        let v1 = "7:3 Read 696\n7:3 Write 88\n7:3 Total 786\n";
        assert_eq!(of_v1(v1, "7:3", "Write"), Some(88));
        assert_eq!(of_v1(v1, "7:30", "Write"), None);
    }

    #[test]
    fn counters_that_began_anew_are_no_difference() {
        let one = IoCounters { reads: 1, ..IoCounters::default() };
        assert_eq!(IoCounters::default().since(&one), None);
        assert_eq!(one.since(&IoCounters::default()), Some(one));
    }
}
