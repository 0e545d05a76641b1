//! Profiles that end when all is known against profiles that take all of their time, in turn: how
//! long they take, and how often the bounds from them hold in runs that follow.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use rtvirtio_harness::test_bed::TestBed;
use rtvirtio_learn::design::{MEDIUM, Neighbour};
use rtvirtio_learn::load::{Knobs, Stream, spec};
use rtvirtio_learn::stage::{RunPlan, Treatment};
use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_measure::profile::MARGIN;
use rtvirtio_model::{Elevator, ModelKind, Profile, model};
use rtvirtio_spec::{LabKind, Spec};
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::experiment::{Experiment, from_one};
use crate::interleave::{Counter, interleaved};
use crate::page::xy::table;
use crate::page::{Section, claims as claim_rows};
use crate::report::{ExperimentReport, write};

/// Neighbours of the reader whose tail is bounded, one held-out run each.
const HELD_OUT: [Option<Neighbour>; 3] = [None, Some(Neighbour::Flood), Some(Neighbour::Writer)];
/// VMs of the test bed.
const VMS: usize = 2;
/// Share of the rate at depth 1 that the reader has at most.
const SHARE: f64 = 0.25;

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct ProfileTimeOptions {
    /// Emulated devices, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards
    #[arg(
        value_name = "twin:NAME",
        default_values = ["twin:qlc-nvme", "twin:emmc", "twin:microsd", "twin:disk-1.8in"]
    )]
    pub devices: Vec<String>,
    /// Rounds on each device
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = from_one())]
    pub repeat: usize,
    /// Length of each of the three runs after both profiles
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
}

/// A profile, and what follows from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// Duration of the measurement.
    pub seconds: f64,
    /// Number of doubts in it.
    pub doubts: usize,
    /// Bound of the reader's p99.99 in each held-out run: the prediction of the formulas and the
    /// safety margin of plans.
    pub bounds_ns: Vec<Nanos>,
}

/// Both profiles and the runs after them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// The device.
    pub device: String,
    /// Profile for all of the time.
    pub fixed: Side,
    /// Profile that ends when all is known.
    pub known: Side,
    /// The reader's p99.99 in each held-out run, less the host's stalls where these are known.
    pub tails_ns: Vec<Nanos>,
}

impl Round {
    /// Number of held-out runs within their bound.
    fn within(&self, side: &Side) -> usize {
        side.bounds_ns.iter().zip(&self.tails_ns).filter(|(bound, tail)| tail <= bound).count()
    }
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileTimeData {
    /// [`ProfileTimeData::FORM`], checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last round, and version of the program.
    pub generated: String,
    /// Length of each held-out run, s.
    pub seconds: f64,
    /// Rounds in the order measured.
    pub rounds: Vec<Round>,
}

/// Measures all rounds on all devices; the result is written to `path` after each.
pub fn measure(
    options: &ProfileTimeOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    ensure!(options.repeat > 0, "--repeat 0: nothing is measured");
    let _lock = labs.dirs.lock_vms()?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut data: Option<ProfileTimeData> = None;
    for device in &options.devices {
        let bed = TestBed::make(device, VMS, LabKind::Process, labs, progress)?;
        let data = data.get_or_insert_with(|| ProfileTimeData {
            schema: ProfileTimeData::FORM.to_owned(),
            host: bed.facts(),
            command: format!(
                "rtvirtio-bench profile-time {} --for {} --repeat {}",
                options.devices.join(" "),
                options.length,
                options.repeat
            ),
            generated: String::new(),
            seconds: options.length.as_secs_f64(),
            rounds: Vec::new(),
        });
        let measured = rounds(options, &bed, data, path, progress);
        bed.remove()?;
        measured?;
    }
    Ok(())
}

fn rounds(
    options: &ProfileTimeOptions,
    bed: &TestBed<'_>,
    data: &mut ProfileTimeData,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let mut counter = Counter::new(progress, &bed.device.name, 2 * options.repeat);
    for round in 0..options.repeat {
        let profiles = interleaved(&[true, false], round, &mut counter, progress, |&all| {
            let start = Instant::now();
            let profile = bed.profile_of_device(all)?;
            Ok((profile, start.elapsed().as_secs_f64()))
        })?;
        let [(fixed, fixed_s), (known, known_s)] = &profiles[..] else {
            anyhow::bail!("a profile is missing")
        };
        let alone = fixed.read.first().map_or(MEDIUM, |point| point.iops.0);
        let rate = (alone * SHARE).clamp(1.0, MEDIUM).floor();
        let (mut of_fixed, mut of_known) = (side(fixed, *fixed_s), side(known, *known_s));
        let mut tails_ns = Vec::new();
        for (i, neighbour) in HELD_OUT.iter().enumerate() {
            let mut vms = vec![vec![Stream::paced(rate)]];
            vms.extend(neighbour.map(|neighbour| vec![neighbour.stream()]));
            let knobs = Knobs { elevator: Elevator::None, ..Knobs::default_bfq(vms.len()) };
            let spec = spec(&vms, bed.device.spec.clone(), LabKind::Process);
            of_fixed.bounds_ns.push(bound(fixed, &spec, &knobs)?);
            of_known.bounds_ns.push(bound(known, &spec, &knobs)?);
            let plan = RunPlan {
                length: Duration::from_nanos(options.length.0),
                seed: (round * HELD_OUT.len() + i) as u64 + 1,
                cancel: progress.cancel_flag(),
            };
            // Opened for each run: a profile takes the same lock.
            let run = bed.stage()?.run(&spec, &Treatment::knobs(knobs.config()), plan)?;
            let reader = &run.tasks.first().context("the reader has no result")?.result;
            tails_ns.push(reader.p9999_excl_host_stalls_ns.unwrap_or(reader.p9999_ns));
        }
        let device = bed.device.name.clone();
        data.rounds.push(Round { device, fixed: of_fixed, known: of_known, tails_ns });
        data.generated = generated();
        write(path, data)?;
    }
    Ok(())
}

fn side(profile: &Profile, seconds: f64) -> Side {
    Side { seconds, doubts: profile.doubts.len(), bounds_ns: Vec::new() }
}

/// Bound of the reader's p99.99: what it may be where a plan by the formulas says that its target
/// is just met.
fn bound(profile: &Profile, spec: &Spec, knobs: &Knobs) -> anyhow::Result<Nanos> {
    let forecasts = model(ModelKind::Slice, None)?.forecast_tasks(profile, spec, &knobs.config())?;
    let of_reader = forecasts.first().context("the reader has no forecast")?;
    Ok(Nanos((of_reader.latency_ns.0 as f64 / (1.0 - MARGIN)) as u64))
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &ProfileTimeData) -> Vec<Claim> {
    let ratio = median(data.rounds.iter().map(|r| r.known.seconds / r.fixed.seconds).collect());
    let runs: usize = data.rounds.iter().map(|r| r.tails_ns.len()).sum();
    let share = |of: fn(&Round) -> &Side| {
        let within: usize = data.rounds.iter().map(|r| r.within(of(r))).sum();
        within as f64 / runs.max(1) as f64
    };
    let covered =
        |id: &str, what: &str, of: fn(&Round) -> &Side| Claim::new(id, what, share(of), "share", runs);
    vec![
        Claim::new("profile.seconds_ratio", "time of a profile, of 36 s", ratio, "ratio", data.rounds.len())
            .at_most(0.34),
        covered("profile.covered", "held-out runs within the bound", |r| &r.known),
        covered("profile.covered_fixed", "the same after 36 s", |r| &r.fixed),
    ]
}

/// Rows of the table: medians and sums of each device.
fn rows(data: &ProfileTimeData) -> Vec<Vec<String>> {
    let mut devices: Vec<&str> = data.rounds.iter().map(|r| r.device.as_str()).collect();
    devices.dedup();
    let row = |device: &str| {
        let of: Vec<&Round> = data.rounds.iter().filter(|r| r.device == device).collect();
        let middle = |value: fn(&Round) -> f64| median(of.iter().map(|r| value(r)).collect());
        let within = |side: fn(&Round) -> &Side| of.iter().map(|r| r.within(side(r))).sum::<usize>();
        let wider = |r: &Round| {
            let ratios = r.known.bounds_ns.iter().zip(&r.fixed.bounds_ns);
            median(ratios.map(|(known, fixed)| known.0 as f64 / fixed.0.max(1) as f64).collect())
        };
        vec![
            device.to_owned(),
            of.len().to_string(),
            format!("{:.1}", middle(|r| r.known.seconds)),
            format!("{:.1}", middle(|r| r.fixed.seconds)),
            format!("{:.2}", middle(|r| r.known.seconds / r.fixed.seconds)),
            of.iter().map(|r| r.tails_ns.len()).sum::<usize>().to_string(),
            within(|r| &r.known).to_string(),
            within(|r| &r.fixed).to_string(),
            format!("{:.2}", median(of.iter().map(|r| wider(r)).collect())),
            format!("{:.1}", middle(|r| r.known.doubts as f64)),
        ]
    };
    devices.into_iter().map(row).collect()
}

const HEAD: [&str; 10] = [
    "device",
    "rounds",
    "seconds until known",
    "seconds, fixed",
    "ratio",
    "held-out runs",
    "within the bound",
    "within the bound, fixed",
    "bound over that of fixed",
    "doubts",
];

impl Experiment for ProfileTimeData {
    const FORM: &str = "rtvirtio-profile-time/1";
    const FILE: &str = "profile-time.json";
    const TITLE: &str = "rtvirtio: time of a profile";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let claims = claims(self);
        let mut text = String::new();
        for row in rows(self) {
            let cells = HEAD.iter().zip(&row).skip(1).map(|(head, cell)| format!("{head} {cell}"));
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{:<12} {}", row[0], cells.collect::<Vec<_>>().join(", "));
        }
        text.push_str(&claim_rows::text(&claims));
        let section = Section {
            title: "Time of a profile".to_owned(),
            text: vec![format!(
                "Each round has a profile that ends when all is known and one that takes all of its time, in random order, and then runs of {} s of a reader: alone, \
                 next to a flood, and next to a writer. Its p99.99 is compared with the prediction from each profile and the safety margin of plans.",
                self.seconds
            )],
            plots: Vec::new(),
            tables: vec![table("devices", &HEAD, rows(self))],
        };
        let lead = format!("{} rounds; {}.", self.rounds.len(), self.command);
        Ok(ExperimentReport {
            text,
            ..ExperimentReport::of_data(self, self.host.clone(), claims, lead, vec![section])?
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(ratios: &[f64]) -> ProfileTimeData {
        let side = |seconds, bound| Side { seconds, doubts: 1, bounds_ns: vec![Nanos(bound); 3] };
        let round = |(i, ratio): (usize, &f64)| Round {
            device: if i < 2 { "a" } else { "b" }.to_owned(),
            fixed: side(36.0, 200),
            known: side(36.0 * ratio, 100),
            tails_ns: vec![Nanos(100), Nanos(150), Nanos(250)],
        };
        ProfileTimeData {
            schema: ProfileTimeData::FORM.to_owned(),
            host: HostFacts { cpus: 2, ..HostFacts::default() },
            command: String::new(),
            generated: String::new(),
            seconds: 10.0,
            rounds: ratios.iter().enumerate().map(round).collect(),
        }
    }

    #[test]
    fn a_third_of_the_time_is_claimed_and_coverage_is_shown() {
        let claimed = |ratios: &[f64]| claims(&data(ratios));
        let third = claimed(&[0.3, 0.31, 1.0]);
        assert!(third[0].met && (third[0].value - 0.31).abs() < 1e-9, "{third:?}");
        assert!(!claimed(&[0.3, 0.9, 1.0])[0].met && !claimed(&[])[0].met);
        // A run at its bound is within it.
        assert!((third[1].value - 1.0 / 3.0).abs() < 1e-9 && (third[2].value - 2.0 / 3.0).abs() < 1e-9);
        assert_eq!((third[1].n, third[1].has_limit()), (9, false));
    }

    #[test]
    fn each_device_has_a_row() {
        let rows = rows(&data(&[0.3, 0.4, 1.0]));
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0], ["a", "2", "12.6", "36.0", "0.35", "6", "2", "4", "0.50", "1.0"]);
        assert_eq!(rows[1][..3], ["b", "1", "36.0"]);
        data(&[0.3]).report().unwrap();
    }
}
