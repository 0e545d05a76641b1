//! The benchmark's cases: 1 to 4 VMs by six task sets, in three tiers of targets (RT-VirtIO paper,
//! section VII-B, and beyond).

pub mod misses;
pub mod neighbours;
mod page;
pub mod passes;
pub mod promises;
mod report;
mod runner;
pub mod schemes;
pub mod servers;

pub use report::report;
pub use runner::{RunnerOptions, measure};

use std::fmt::Write as _;

use clap::ValueEnum;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use rtvirtio_learn::design::{HEAVY, LIGHT, MAX_VMS, MEDIUM, Neighbour, TASK_SETS, whole_rate};
use rtvirtio_learn::load::{Stream, vm_name};

/// Prefix of the name of a dataset.
pub const PREFIX: &str = "cases-";

/// Id of the scheme that measures while it searches.
pub const TUNED: &str = "tuned";

/// Divisor of the paper's targets: Fig. 7 gives those of VM0 to VM2 for light and medium tasks; the
/// others continue its pattern. Up to three strict VMs have a neighbour without a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// The paper's targets.
    Paper,
    /// A tenth of them.
    Tight,
    /// A fiftieth, with neighbours.
    Strict,
}

impl Tier {
    /// All tiers, the paper's first.
    pub const ALL: [Self; 3] = [Self::Paper, Self::Tight, Self::Strict];

    /// Name in case names and claims.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Paper => "paper",
            Self::Tight => "tight",
            Self::Strict => "strict",
        }
    }

    fn divisor(self) -> u64 {
        match self {
            Self::Paper => 1,
            Self::Tight => 10,
            Self::Strict => 50,
        }
    }
}

/// Targets in ms by VM of light, medium and heavy tasks.
const TARGETS_MS: [[u64; MAX_VMS]; 3] = [[400, 800, 900, 1000], [300, 500, 700, 900], [250, 400, 600, 800]];

/// Share of writes in the second variant.
pub const WRITES: f64 = 0.3;

/// VMs, their tasks and targets, and a neighbour.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Unique, such as `3vm-LM-strict-flood`.
    pub name: String,
    /// Tightness of the targets.
    pub tier: Tier,
    /// VMs with targets.
    pub targeted: usize,
    /// Name of the task set, such as `L+M`.
    pub set: String,
    /// The neighbour, in the last VM.
    pub neighbour: Option<Neighbour>,
    /// Tasks of each VM.
    pub vms: Vec<Vec<Stream>>,
}

/// Common options of the cases of a run.
#[derive(Clone, Copy)]
pub struct CaseOptions<'a> {
    /// Share of writes of the tasks with targets.
    pub writes: f64,
    /// On a slow device: seconds of device time of a request by share of writes and block size;
    /// rates are then scaled so that they take a third of it.
    pub third_of: Option<&'a dyn Fn(f64, Bytes) -> f64>,
}

/// All cases of a tier: 24, in the strict tier 24 + 36 for the three neighbours of those with up to
/// three VMs.
#[must_use]
pub fn cases(tier: Tier, options: &CaseOptions<'_>) -> Vec<Case> {
    let mut out = Vec::new();
    for n in 1..=MAX_VMS {
        for rates in TASK_SETS {
            let neighbours: &[Option<Neighbour>] = if tier == Tier::Strict && n < MAX_VMS {
                &[Some(Neighbour::Flood), Some(Neighbour::Writer), Some(Neighbour::Burst)]
            } else {
                &[None]
            };
            out.extend(neighbours.iter().map(|neighbour| case(tier, n, rates, *neighbour, options)));
        }
    }
    out
}

fn case(
    tier: Tier,
    n: usize,
    rates: &[f64],
    neighbour: Option<Neighbour>,
    options: &CaseOptions<'_>,
) -> Case {
    let total: f64 = rates.iter().sum::<f64>() * n as f64;
    let scale = match options.third_of {
        Some(cost) => (1.0 / 3.0 / (total * cost(options.writes, Bytes::from_kib(4)))).min(1.0),
        None => 1.0,
    };
    let stream = |vm: usize, rate: f64| Stream {
        writes: options.writes,
        target: Some(Nanos::from_micros(TARGETS_MS[kind(rate)][vm] * 1000 / tier.divisor())),
        ..Stream::paced(if scale < 1.0 { whole_rate(rate * scale) } else { rate })
    };
    let mut vms: Vec<Vec<Stream>> =
        (0..n).map(|vm| rates.iter().map(|rate| stream(vm, *rate)).collect()).collect();
    vms.extend(neighbour.map(|n| vec![n.stream()]));
    let letters: Vec<&str> = rates.iter().map(|r| ["L", "M", "H"][kind(*r)]).collect();
    let mut name = format!("{n}vm-{}-{}", letters.concat(), tier.name());
    if let Some(neighbour) = neighbour {
        let _ = write!(name, "-{}", neighbour.name());
    }
    Case { name, tier, targeted: n, set: letters.join("+"), neighbour, vms }
}

fn kind(rate: f64) -> usize {
    [LIGHT, MEDIUM, HEAVY].iter().position(|r| *r == rate).unwrap_or(0)
}

impl Case {
    /// The case as a spec file for process VMs on the flash twin.
    #[must_use]
    pub fn toml(&self) -> String {
        let mut s = format!(
            "# {} VMs with tasks {}, targets of the {} tier{}.\n# Written by `rtvirtio-bench cases --write`; see docs/explanation/laboratory.md.\n\n\
             [device]\ntwin = \"qlc-nvme\"\n",
            self.targeted,
            self.set,
            self.tier.name(),
            self.neighbour.map_or(String::new(), |n| format!(", and a neighbour ({})", n.name())),
        );
        for (i, streams) in self.vms.iter().enumerate() {
            let _ = write!(s, "\n[[vm]]\nname = \"{}\"\nlab = \"process\"\n", vm_name(i));
            for (k, stream) in streams.iter().enumerate() {
                s.push_str(&task_toml(k, stream));
            }
        }
        s
    }
}

fn task_toml(index: usize, t: &Stream) -> String {
    let op = if t.writes <= 0.0 {
        "\"read\"".to_owned()
    } else if t.writes >= 1.0 {
        "\"write\"".to_owned()
    } else {
        format!("\"mixed\"\nwrite_share = \"{}%\"", t.writes * 100.0)
    };
    let mut s = format!("\n[[vm.task]]\nname = \"t{index}\"\nop = {op}\nblock = \"{}\"\n", t.block);
    if t.sequential {
        s.push_str("pattern = \"sequential\"\n");
    }
    if let Some(rate) = t.rate {
        let _ = writeln!(s, "rate = \"{}/s\"", rate.0);
    }
    if t.depth != 1 {
        let _ = writeln!(s, "depth = {}", t.depth);
    }
    if let Some(burst) = t.burst {
        let _ = writeln!(s, "burst = \"{burst}\"");
    }
    if let Some(target) = t.target {
        let _ = writeln!(s, "target = {{ percentile = \"p99.99\", latency = \"{target}\" }}");
    }
    s
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::LabKind;

    use super::*;
    use rtvirtio_learn::load::spec;

    const READ: CaseOptions<'_> = CaseOptions { writes: 0.0, third_of: None };

    #[test]
    fn the_paper_tier_is_fig_7_and_its_continuation() {
        let all = cases(Tier::Paper, &READ);
        assert_eq!(all.len(), 24);
        let fig7 = all.iter().find(|c| c.name == "3vm-LM-paper").unwrap();
        let targets: Vec<u64> = fig7.vms.iter().flatten().map(|s| s.target.unwrap().0 / 1_000_000).collect();
        assert_eq!(targets, [400, 300, 800, 500, 900, 700]);
        assert!(all.iter().all(|c| c.neighbour.is_none()));
    }

    #[test]
    fn strict_has_neighbours_where_there_is_room() {
        let all = cases(Tier::Strict, &READ);
        assert_eq!(all.len(), 18 * 3 + 6);
        let mut names: Vec<&str> = all.iter().map(|c| c.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all.len(), "names are unique");
        let one = all.iter().find(|c| c.name == "1vm-H-strict-writer").unwrap();
        assert_eq!(one.vms.len(), 2);
        assert_eq!(one.vms[0][0].target, Some(Nanos::from_millis(5)));
        assert_eq!(one.vms[1][0].target, None);
    }

    #[test]
    fn a_slow_device_is_loaded_to_a_third() {
        let cost = |_: f64, _: Bytes| 0.002;
        let options = CaseOptions { writes: 0.0, third_of: Some(&cost) };
        for c in cases(Tier::Paper, &options) {
            let load: f64 = c.vms.iter().flatten().filter_map(|s| s.rate).map(|r| r.0 * 0.002).sum();
            assert!(load < 0.36, "{}: {load}", c.name);
        }
    }

    #[test]
    fn spec_files_say_the_same_as_the_cases() {
        for tier in Tier::ALL {
            for case in cases(tier, &CaseOptions { writes: WRITES, third_of: None }) {
                let parsed = rtvirtio_spec::parse("case", &case.toml())
                    .unwrap_or_else(|e| panic!("{}: {e}\n{}", case.name, case.toml()));
                assert_eq!(parsed, spec(&case.vms, parsed.device.clone(), LabKind::Process), "{}", case.name);
            }
        }
    }

    #[test]
    fn the_examples_are_the_cases() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/cases");
        let mut n = 0;
        for tier in Tier::ALL {
            for case in cases(tier, &READ) {
                let path = dir.join(format!("{}.toml", case.name));
                let text =
                    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                assert_eq!(
                    text,
                    case.toml(),
                    "{}: write it again with `rtvirtio-bench cases --write`",
                    case.name
                );
                n += 1;
            }
        }
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), n, "files that are no case");
    }
}
