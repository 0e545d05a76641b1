//! Standstills of the disk during a run: times with requests in flight and without a completion.
//!
//! The kernel counts both below the elevator. A disk's `inflight` in sysfs counts the requests that
//! its driver has, not those that still wait in the elevator or under a limit
//! (Documentation/ABI/stable/sysfs-block; for devices without a request queue, such as dm and md,
//! all that have entered), and `stat` the completed ones (Documentation/block/stat.rst). A thread
//! reads both every 2 ms. Consecutive readings with requests in the driver and the same number of
//! completions belong to one standstill: the reported length is never longer than the truth, and
//! less than three periods shorter, unless the thread itself was late.
//!
//! From Linux 6.16 on `stat` counts all requests in flight, above the driver too
//! (`bdev_count_inflight` in `block/genhd.c`): a reading with such a request, none in the driver
//! and no completion until it was read once more shows that the elevator held it.
//!
//! No order of requests changes a standstill. A lighter load may, above all of writes: drives stop
//! to erase. One long request on a disk that serves one at a time is reported too, because the
//! others wait for it as they do for a pause.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::device_io::{Requests, in_driver};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::sampler::{Options, Sampler, now};
use crate::stalls::{Span, Stalls};

/// Time between two readings: each takes some microseconds of a CPU.
const PERIOD_NS: u64 = 2_000_000;
/// Length above which a standstill is kept: more than two readings can mistake for one, less than
/// the scale of targets of some 10 ms.
const KEPT_NS: u64 = 5_000_000;
/// Largest number of standstills kept: at one every 6 ms, a run of an hour and a half.
const MAX_KEPT: usize = 1_000_000;
/// Priority below the threads of an emulated device (FIFO 40), whose time must not be taken, and
/// above all load.
const PRIORITY: i32 = 39;

/// Standstills of a disk during a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standstills {
    /// Longest standstill, less the time in which a CPU of the host stalled where that is known; 0
    /// when none lasted longer than 5 ms.
    pub longest_ns: Nanos,
    /// Number of standstills longer than 5 ms.
    pub count: u64,
    /// Sum of their lengths.
    pub total_ns: Nanos,
    /// Number of readings of the counters.
    pub n: u64,
    /// Readings at which the elevator held requests while the driver had none; 0 too where the
    /// kernel counts only those that the driver has.
    #[serde(default)]
    pub held: u64,
}

/// Thread that watches a disk. Dropping it stops the thread.
#[derive(Debug)]
pub struct DiskWatch(Sampler<Finder>);

impl DiskWatch {
    /// Watches a disk, given by its directory in sysfs such as `/sys/block/sda`, under SCHED_FIFO
    /// if `realtime` (and the kernel allows it). `None` where its counters cannot be read or are
    /// switched off (`queue/iostats`).
    #[must_use]
    pub fn start(disk: &Path, realtime: bool) -> Option<Self> {
        let counters = Counters::open(disk)?;
        let options = Options {
            name: "disk-watch".to_owned(),
            period_ns: PERIOD_NS,
            cpu: None,
            priority: realtime.then_some(PRIORITY),
        };
        let begin = |_| Finder { spans: Vec::with_capacity(1024), ..Finder::default() };
        Sampler::start(options, begin, move |finder: &mut Finder, _| {
            // The counters of a removed disk cannot be read: ends the thread.
            let reading = counters.read().ok()?;
            finder.take(&reading);
            Some(reading.after)
        })
        .map(Self)
    }

    /// Stops watching and returns the standstills, less `stalls` of the host, during which no
    /// completion could be observed either.
    #[must_use]
    pub fn finish(self, stalls: Option<&Stalls>) -> Standstills {
        self.0.finish().unwrap_or_default().standstills(stalls)
    }
}

/// Both files, held open: sysfs generates the content anew for each read from the beginning.
struct Counters {
    stat: File,
    inflight: File,
}

impl Counters {
    fn open(disk: &Path) -> Option<Self> {
        let at = |file: &str| -> PathBuf { disk.join(file) };
        // Without this file (only a whole disk has it) reading the counters shows whether they
        // exist.
        // kernel file
        if std::fs::read_to_string(at("queue/iostats")).is_ok_and(|on| on.trim() == "0") {
            return None;
        }
        let counters =
            // kernel file
            Self { stat: File::open(at("stat")).ok()?, inflight: File::open(at("inflight")).ok()? };
        counters.read().ok()?;
        Some(counters)
    }

    fn read(&self) -> io::Result<Reading> {
        let before = now();
        let Requests { completed, in_flight } = parsed(&self.stat, Requests::parse)?;
        let in_driver = parsed(&self.inflight, in_driver)?;
        let is_held = in_driver == 0 && in_flight > 0 && {
            let again = parsed(&self.stat, Requests::parse)?;
            again.completed == completed && again.in_flight > 0
        };
        Ok(Reading { before, after: now(), completed, in_driver, is_held })
    }
}

/// Counters of a short file.
fn parsed<T>(file: &File, parse: fn(&str) -> Option<T>) -> io::Result<T> {
    let mut buffer = [0; 512];
    let n = file.read_at(&mut buffer, 0)?;
    parse(&String::from_utf8_lossy(&buffer[..n])).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reading of the counters: completions first, then requests in the driver.
struct Reading {
    /// CLOCK_MONOTONIC before it, in ns.
    before: u64,
    /// CLOCK_MONOTONIC after it, in ns.
    after: u64,
    completed: u64,
    in_driver: u64,
    /// A request was in flight, and not in the driver.
    is_held: bool,
}

/// Finds standstills in a sequence of readings.
#[derive(Debug, Default)]
struct Finder {
    /// First reading of a possible standstill: its end, and the completions by then.
    since: Option<(u64, u64)>,
    /// End of the possible standstill so far.
    until: u64,
    spans: Vec<Span>,
    n: u64,
    held: u64,
}

impl Finder {
    fn take(&mut self, reading: &Reading) {
        self.n += 1;
        self.held += u64::from(reading.is_held);
        let busy = reading.in_driver > 0;
        match self.since {
            // Requests that were in the driver and have not completed stay in it.
            Some((_, completed)) if busy && completed == reading.completed => self.until = reading.before,
            _ => {
                self.close();
                self.since = busy.then_some((reading.after, reading.completed));
                self.until = reading.after;
            }
        }
    }

    fn close(&mut self) {
        let Some((from, _)) = self.since.take() else { return };
        if self.until > from + KEPT_NS && self.spans.len() < MAX_KEPT {
            self.spans.push((from, self.until));
        }
    }

    fn standstills(mut self, stalls: Option<&Stalls>) -> Standstills {
        self.close();
        let mut found = Standstills { n: self.n, held: self.held, ..Standstills::default() };
        for (from, to) in self.spans {
            let length = to - from - stalls.map_or(0, |s| s.within(from, to));
            if length > KEPT_NS {
                found.count += 1;
                found.total_ns.0 += length;
                found.longest_ns = found.longest_ns.max(Nanos(length));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Readings every 2 ms that take 0.1 ms, given as completions and requests in the driver.
    fn found(readings: &[(u64, u64)], stalls: Option<&Stalls>) -> Standstills {
        let mut finder = Finder::default();
        for (i, (completed, in_driver)) in readings.iter().enumerate() {
            let before = i as u64 * 2 * MS;
            finder.take(&Reading {
                before,
                after: before + MS / 10,
                completed: *completed,
                in_driver: *in_driver,
                is_held: false,
            });
        }
        finder.standstills(stalls)
    }

    #[test]
    fn a_standstill_needs_requests_and_no_completion() {
        let idle = [(7, 0); 20];
        assert_eq!(found(&idle, None), Standstills { n: 20, ..Standstills::default() });
        let at_work: Vec<(u64, u64)> = (0..20).map(|i| (i, 3)).collect();
        assert_eq!(found(&at_work, None).count, 0);
        // From the third reading to the ninth, then one completes; a second standstill lasts until
        // the end.
        let mut readings = vec![(1, 0), (2, 1)];
        readings.extend([(2, 2); 6]);
        readings.extend([(3, 2); 5]);
        let seen = found(&readings, None);
        assert_eq!((seen.count, seen.n), (2, 13));
        assert_eq!(seen.longest_ns, Nanos(12 * MS - MS / 10));
        assert_eq!(seen.total_ns, Nanos(12 * MS - MS / 10 + 8 * MS - MS / 10));
    }

    #[test]
    fn an_empty_driver_and_short_pauses_are_none() {
        // Requests that wait above the driver, because of idling or a limit, are not in it.
        let waiting = [(5, 1), (6, 0), (6, 0), (6, 0), (6, 0), (6, 0), (6, 1), (7, 1)];
        assert_eq!(found(&waiting, None).count, 0);
        let short = [(5, 1), (5, 1), (5, 1), (6, 1)];
        assert_eq!(found(&short, None).count, 0);
    }

    #[test]
    fn stalls_of_the_host_are_not_the_disks() {
        let readings = [(1, 1); 11];
        assert_eq!(found(&readings, None).longest_ns, Nanos(20 * MS - MS / 10));
        let some = Stalls::union(vec![(2 * MS, 10 * MS)]);
        assert_eq!(found(&readings, Some(&some)).longest_ns, Nanos(12 * MS - MS / 10));
        let most = Stalls::union(vec![(0, 16 * MS)]);
        assert_eq!(found(&readings, Some(&most)), Standstills { n: 11, ..Standstills::default() });
    }

    #[test]
    fn counters_of_every_kernel_are_read() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let put = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
        assert!(Counters::open(dir.path()).is_none());
        put("inflight", "       1        2\n");
        // 11 fields until Linux 4.17, 15 until 5.4, 17 since.
        for (fields, completed) in [(11, 1 + 5), (15, 1 + 5 + 12), (17, 1 + 5 + 12 + 16)] {
            let line: Vec<String> = (1..=fields).map(|i| i.to_string()).collect();
            put("stat", &format!("   {}\n", line.join("        ")));
            let reading = Counters::open(dir.path()).unwrap().read().unwrap();
            assert_eq!((reading.completed, reading.in_driver, reading.is_held), (completed, 3, false));
        }
        // Requests in flight (the ninth field), and none in the driver.
        put("inflight", "       0        0\n");
        for (in_flight, is_held) in [(0, false), (4, true)] {
            put("stat", &format!("1 0 0 0 5 0 0 0 {in_flight} 0 0\n"));
            let counters = Counters::open(dir.path()).unwrap();
            assert_eq!(counters.read().unwrap().is_held, is_held);
            let mut finder = Finder::default();
            finder.take(&counters.read().unwrap());
            assert_eq!(finder.standstills(None).held, u64::from(is_held));
        }
        put("inflight", "       1        2\n");
        std::fs::create_dir(dir.path().join("queue")).unwrap();
        put("queue/iostats", "1\n");
        assert!(Counters::open(dir.path()).is_some());
        put("queue/iostats", "0\n");
        assert!(Counters::open(dir.path()).is_none(), "nothing is counted");
        put("queue/iostats", "1\n");
        put("stat", "no numbers\n");
        assert!(DiskWatch::start(dir.path(), false).is_none());
    }
}
