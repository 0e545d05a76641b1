//! The experiments of the bundle, the most valuable first, and the choice of those that fit.

use std::time::Duration;

/// An experiment of the bundle.
#[derive(Debug)]
pub struct Part {
    /// Name in the bundle.
    pub name: &'static str,
    /// Subject of the experiment, for its announcement.
    pub shows: &'static str,
    /// Objects that it makes and settings that it changes on the host while it runs.
    pub touches: &'static str,
    /// Programs that must be installed.
    pub needs: &'static [&'static str],
    /// Lengths of the experiment with fewer and more samples, shortest first.
    pub sizes: &'static [Size],
}

/// Length of an experiment.
#[derive(Debug)]
pub struct Size {
    /// Approximate duration on two CPUs without KVM, s; less with it.
    pub seconds: u64,
    /// Arguments of `rtvirtio-bench`, or of `rtvirtio-lab` for `demo`; `{out}` and `{device}` in
    /// them are replaced.
    pub args: &'static [&'static str],
}

/// In arguments: directory of the part's results.
pub const OUT: &str = "{out}";
/// In arguments: the emulated drive, or a file on the user's.
pub const DEVICE: &str = "{device}";

const QEMU: &str = "qemu-system-x86_64";
/// The parts of `rtvirtio-bench net` without another switch, which takes huge pages.
const NETWORK: &str = "simulated,flood,uplink,hostile,crash,frames,tcp,ping,sv,web";

/// All parts, the most valuable first.
pub const PARTS: &[Part] = &[
    Part {
        name: "before-after",
        shows: "four VMs on one drive under the kernel's defaults and under a plan",
        touches: "a loop device on an emulated drive, four cgroups, the loop device's I/O scheduler",
        needs: &["fio"],
        sizes: &[
            Size { seconds: 170, args: &["before-after", "--repeat", "2", "--out", OUT] },
            Size { seconds: 640, args: &["before-after", "--out", OUT] },
        ],
    },
    Part {
        name: "demo",
        shows: "the RT-VirtIO paper's Fig. 7 in real guests: default, plan, verification",
        touches: "three QEMU guests, a loop device on an emulated drive, its I/O scheduler, cgroups",
        needs: &[QEMU, "fio"],
        sizes: &[
            Size { seconds: 200, args: &["demo", "--for", "20s", "--out", OUT] },
            Size { seconds: 290, args: &["demo", "--out", OUT] },
        ],
    },
    Part {
        name: "cases",
        shows: "the hardest case of each tier of targets, four VMs, against the kernel's default",
        touches: "a loop device on an emulated drive or on a file of the drive under test, its I/O scheduler, cgroups",
        needs: &["fio"],
        sizes: &[
            Size {
                seconds: 150,
                args: &[
                    "cases",
                    DEVICE,
                    "--only",
                    "4vm-LMH-",
                    "--schemes",
                    "default-bfq,slice",
                    "--out",
                    OUT,
                ],
            },
            Size {
                seconds: 700,
                args: &["cases", DEVICE, "--only", "4vm-", "--schemes", "default-bfq,slice", "--out", OUT],
            },
        ],
    },
    Part {
        name: "domain",
        shows: "the I/O domain next to a flood, and the cost of a request next to that of qemu-storage-daemon",
        touches: "processes of the I/O domain on an emulated drive and on memory, a loop device",
        needs: &["fio"],
        sizes: &[
            Size { seconds: 240, args: &["iod", "--repeat", "1", "--for", "3s", "--out", OUT] },
            Size { seconds: 1500, args: &["iod", "--out", OUT] },
        ],
    },
    Part {
        name: "network",
        shows: "round trips of a VM while its neighbour is flooded or floods, compared with tap and HTB",
        touches: "four QEMU guests, taps and bridges in network namespaces of their own",
        needs: &[QEMU, "tc"],
        sizes: &[
            Size {
                seconds: 170,
                args: &[
                    "net",
                    "--rounds",
                    "1",
                    "--requests",
                    "4000",
                    "--crashes",
                    "1",
                    "--only",
                    NETWORK,
                    "--out",
                    OUT,
                ],
            },
            Size { seconds: 1800, args: &["net", "--only", NETWORK, "--out", OUT] },
        ],
    },
    Part {
        name: "cyclictest",
        shows: "wake-up latency in a guest under I/O and cache load, with and without priorities",
        touches: "a QEMU guest, its threads' priorities, a CPU budget of its cgroup, a file of 256 MiB in /var/tmp",
        needs: &[QEMU],
        sizes: &[
            Size { seconds: 180, args: &["cyclictest", "--for", "10s", "--repeat", "1", "--out", OUT] },
            Size { seconds: 1500, args: &["cyclictest", "--out", OUT] },
        ],
    },
    Part {
        name: "start-up",
        shows: "start-ups of an application in a guest under load of guest and host",
        touches: "a QEMU guest, a loop device on an emulated drive, its I/O scheduler, the host's page cache (dropped)",
        needs: &[QEMU, "fio"],
        sizes: &[Size { seconds: 130, args: &["responsiveness", "--quick", "--out", OUT] }],
    },
    Part {
        name: "reservation",
        shows: "throughput over budget, and web requests next to a busy neighbour, under CPU contracts",
        touches: "two QEMU guests, CPU budgets of their cgroups",
        needs: &[QEMU],
        sizes: &[
            Size {
                seconds: 300,
                args: &[
                    "reservation",
                    "--for",
                    "4s",
                    "--repeat",
                    "1",
                    "--requests",
                    "100",
                    "--budgets",
                    "20,50,80",
                    "--out",
                    OUT,
                ],
            },
            Size { seconds: 1800, args: &["reservation", "--out", OUT] },
        ],
    },
    Part {
        name: "paravirt",
        shows: "a guest that says what is urgent, next to a batch VM on one core",
        touches: "two QEMU guests, their threads' priorities, CPU budgets of their cgroups",
        needs: &[QEMU],
        sizes: &[
            Size {
                seconds: 150,
                args: &["paravirt", "--for", "5s", "--repeat", "2", "--promotions", "100", "--out", OUT],
            },
            Size { seconds: 700, args: &["paravirt", "--out", OUT] },
        ],
    },
    Part {
        name: "regulation",
        shows: "what the I/O domain's regulators let through, alone and next to a memory-bound load",
        touches: "processes of the I/O domain on memory, a load on all CPUs, a network namespace",
        needs: &[],
        sizes: &[
            Size { seconds: 120, args: &["regulation", "--quick", "--out", OUT] },
            Size { seconds: 1560, args: &["regulation", "--out", OUT] },
        ],
    },
    Part {
        name: "crash",
        shows: "the I/O domain killed under a guest that writes: no acknowledged write may be lost",
        touches: "a QEMU guest, processes of the I/O domain on an emulated drive",
        needs: &[QEMU, "fio"],
        sizes: &[
            Size { seconds: 70, args: &["iod-crash", "--kills", "5", "--out", OUT] },
            Size { seconds: 320, args: &["iod-crash", "--out", OUT] },
        ],
    },
];

/// A part in the size to be measured.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Part to be measured.
    pub part: &'static Part,
    /// Index in the part's sizes.
    pub size: usize,
}

impl Choice {
    /// Approximate duration on two CPUs without KVM.
    #[must_use]
    pub fn time(self) -> Duration {
        Duration::from_secs(self.part.sizes[self.size].seconds)
    }
}

/// Parts to be measured in the budget: as many as possible in their shortest size, the most
/// valuable first, and with the rest of the time the first ones in a longer size. A part whose size
/// `done` returns is measured already and takes no time.
#[must_use]
pub fn choose(
    parts: &[&'static Part],
    budget: Duration,
    done: &dyn Fn(&str) -> Option<usize>,
) -> Vec<Choice> {
    let mut left = budget;
    let mut chosen: Vec<(&'static Part, Option<usize>, Duration)> = Vec::new();
    for &part in parts {
        if let Some(size) = done(part.name) {
            chosen.push((part, Some(size), Duration::ZERO));
            continue;
        }
        let time = Choice { part, size: 0 }.time();
        if let Some(rest) = left.checked_sub(time) {
            left = rest;
            chosen.push((part, Some(0), time));
        } else {
            chosen.push((part, None, Duration::ZERO));
        }
    }
    for (part, size, spent) in &mut chosen {
        let Some(size) = size else { continue };
        for larger in (*size + 1..part.sizes.len()).rev() {
            let time = Choice { part, size: larger }.time();
            if let Some(rest) = (left + *spent).checked_sub(time) {
                (left, *size, *spent) = (rest, larger, time);
                break;
            }
        }
    }
    let of = |(part, size, _): (&'static Part, Option<usize>, Duration)| Some(Choice { part, size: size? });
    chosen.into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(choices: &[Choice]) -> Vec<(&str, usize)> {
        choices.iter().map(|c| (c.part.name, c.size)).collect()
    }

    fn all() -> Vec<&'static Part> {
        PARTS.iter().collect()
    }

    #[test]
    fn the_first_parts_come_first_and_what_is_left_makes_them_longer() {
        let none = |_: &str| None;
        assert!(choose(&all(), Duration::from_secs(30), &none).is_empty());
        // 120 s: the first that fits.
        assert_eq!(names(&choose(&all(), Duration::from_secs(120), &none)), [("regulation", 0)]);
        let hour = choose(&all(), Duration::from_secs(3600), &none);
        assert_eq!(hour.len(), PARTS.len(), "every part fits into an hour");
        assert_eq!(names(&hour)[..2], [("before-after", 1), ("demo", 1)]);
        let spent: Duration = hour.iter().map(|c| c.time()).sum();
        assert!(spent <= Duration::from_secs(3600), "{spent:?}");
        let day = choose(&all(), Duration::from_secs(86_400), &none);
        assert!(day.iter().all(|c| c.size + 1 == c.part.sizes.len()));
    }

    #[test]
    fn what_is_there_takes_no_time() {
        let done = |name: &str| (name != "crash").then_some(0);
        let more = choose(&all(), Duration::from_secs(70), &done);
        assert_eq!(more.len(), PARTS.len());
        assert!(more.iter().all(|c| c.size == 0));
        let more = choose(&all(), Duration::from_secs(70 + 640), &done);
        assert_eq!(names(&more)[0], ("before-after", 1), "measured again, longer");
    }

    #[test]
    fn every_part_says_what_it_touches_and_where_its_results_go() {
        for part in PARTS {
            assert!(!part.touches.is_empty() && !part.shows.is_empty());
            assert!(part.sizes.windows(2).all(|two| two[0].seconds < two[1].seconds), "{}", part.name);
            for size in part.sizes {
                assert_eq!(size.args.last(), Some(&OUT), "{}", part.name);
            }
        }
    }
}
