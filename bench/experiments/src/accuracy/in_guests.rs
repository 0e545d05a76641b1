//! Predictions of runs in QEMU guests.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::guest_pairs::{self, GuestRatio, Pair, guest_ratios};
use super::guests_page;
use super::judge::{Accuracy, HeldOut, Models, judge};
use crate::cases::passes::keeps_rate;
use crate::claims::Claim;
use crate::page::Section;
use rtvirtio_learn::dataset::{Dataset, Point, SWEEP};
use rtvirtio_learn::train::{TrainError, TrainSettings, fit_guests};
use rtvirtio_measure::{HostFacts, VmKind};
use rtvirtio_model::learned::GuestModel;
use rtvirtio_model::{GuestPoint, HostModel, Profile};

use super::from_guests::{FromGuests, is_above};

/// Models learned with process VMs, judged on runs in QEMU guests of conditions that they have not
/// learned from, and tails of both kinds of VM.
pub struct InGuests {
    /// VMM, accelerator and kernel of the guests' host.
    on: String,
    /// Kernel of the process VMs' host.
    others_on: String,
    /// Whether the two are different hosts.
    other_host: bool,
    accuracy: Accuracy,
    pairs: Vec<Pair>,
    /// Ratios of tails of `pairs`, by regime.
    guest_ratios: Vec<GuestRatio>,
    /// Judged tasks in guests whose rate was below 99 % of the declared one.
    short: usize,
    /// Runs of `accuracy` judged by models that learned from other guests too, or why there are
    /// none.
    learned: Result<FromGuests, TrainError>,
    /// Every run, and the latency that a guest adds.
    runs: (Vec<Point>, Option<GuestPoint>),
}

/// Runs in QEMU guests on one device, as a file has them.
pub struct Runs {
    path: PathBuf,
    host: HostFacts,
    profile: Profile,
    points: Vec<Point>,
}

impl Runs {
    /// Reads a file of runs in guests on `device`.
    pub fn load(path: &Path, device: &str) -> anyhow::Result<Self> {
        let mut data = Dataset::load(path)?;
        let Some(profile) = data.header.profiles.remove(device) else {
            anyhow::bail!("{}: it is not of {device}", path.display());
        };
        data.points.retain(|p| p.scheme == SWEEP && p.kind == VmKind::Qemu);
        anyhow::ensure!(!data.points.is_empty(), "{}: it holds no runs in QEMU guests", path.display());
        Ok(Self { path: path.to_owned(), host: data.header.host, profile, points: data.points })
    }
}

impl InGuests {
    /// `judged` are the models, and `parts` holds what each was fitted on; `all` are the runs of
    /// process VMs, of the dataset `processes`.
    pub fn evaluate(
        guests: Runs,
        judged: &[(Models, Vec<Point>)],
        parts: &[(Vec<Point>, Vec<Point>)],
        (processes, all): (&Dataset, &[Point]),
        settings: &TrainSettings,
    ) -> anyhow::Result<Self> {
        let Runs { path, host, profile, points: runs } = guests;
        let models: Vec<(Models, &[Point])> = judged
            .iter()
            .zip(parts)
            .map(|((model, _), (train, _))| (model.clone(), train.as_slice()))
            .collect();
        let unseen = guest_pairs::unseen(&models, &runs);
        anyhow::ensure!(
            !unseen.is_empty(),
            "{}: every run is of a condition that was learned from",
            path.display()
        );
        let tasks = unseen.iter().flat_map(|(_, runs)| runs).flat_map(Point::tasks);
        let process_host = &processes.header.host;
        let pairs = guest_pairs::pairs(&runs, all);
        Ok(Self {
            on: format!("{}, {}, Linux {}", host.vmm, host.accelerator, host.kernel),
            others_on: format!("Linux {}", process_host.kernel),
            other_host: host.kernel != process_host.kernel || host.cpus != process_host.cpus,
            short: tasks.filter(|(_, stream, result)| !keeps_rate(stream, result)).count(),
            accuracy: judge(&unseen, &profile)?,
            guest_ratios: guest_ratios(&pairs),
            pairs,
            learned: FromGuests::evaluate(&unseen, (&runs, &profile), settings),
            runs: (runs, profile.guest),
        })
    }

    /// The part of a model that all of these runs determine. Its bound has at most the confidence
    /// that was judged.
    ///
    /// # Errors
    /// Text that says why these runs do not suffice.
    pub fn learn(&self, model: &HostModel, settings: &TrainSettings) -> Result<GuestModel, String> {
        let judged = self.learned.as_ref().map_err(ToString::to_string)?;
        let (runs, guest) = &self.runs;
        let settings = TrainSettings { miss: settings.miss.max(1.0 - judged.confidence), ..settings.clone() };
        fit_guests(runs, model, guest.as_ref(), &settings).map_err(|e| e.to_string())
    }

    /// A warning where guests and process VMs ran on different hosts.
    pub fn other_host_warning(&self) -> Option<String> {
        let (on, others) = (&self.on, &self.others_on);
        self.other_host.then(|| format!("the guests ran on {on}, the processes on {others}: measure both on the host that the model is for"))
    }

    /// Bound of a task. The host's stalls during a guest's request are not known: its tails include
    /// them, and so does the bound where their addition is known.
    fn upper(&self, h: &HeldOut) -> f64 {
        let known = self.accuracy.with_host.is_some();
        h.upper_with_host_ms.filter(|_| known).unwrap_or(h.upper_ms)
    }

    /// Share of tails below the bound, and median of the bound over the tail.
    fn bound(&self) -> (f64, f64) {
        let a = &self.accuracy;
        a.with_host.as_ref().map_or((a.coverage, a.sharpness), |w| (w.coverage, w.sharpness))
    }

    /// Scores, coverage, lost rates and ratios for a terminal.
    pub fn text(&self) -> String {
        let (a, (coverage, sharpness)) = (&self.accuracy, self.bound());
        let mut s = format!(
            "\nin {} runs of QEMU guests ({}), learned from processes alone: typical factor {:.2}, {:.1}% of {} tails below the bound, which is doubled for guests, upper/actual {:.2}\n",
            a.held_out,
            self.on,
            a.scores[0].factor,
            100.0 * coverage,
            a.held.len(),
            sharpness
        );
        if !self.runs.1.as_ref().is_some_and(GuestPoint::is_of_guest) {
            s.push_str("  what a guest adds was not measured before, so predictions take one tick of the scheduler for it\n");
        }
        if self.short > 0 {
            let _ = writeln!(s, "  {} of these tasks got less than 99 % of their rate", self.short);
        }
        for h in a.held.iter().filter(|h| h.with_host_ms > self.upper(h)) {
            let _ = writeln!(s, "  {}", is_above(h, self.upper(h)));
        }
        match &self.learned {
            Ok(learned) => s.push_str(&learned.text()),
            Err(e) => {
                let _ = writeln!(s, "  not learned from: {e}");
            }
        }
        if self.pairs.is_empty() {
            s.push_str("  no process VM ran under the same settings and load for as long\n");
        } else {
            let _ = writeln!(
                s,
                "tails in guests over those of process VMs under the same settings and load ({}; two runs of the same thing differ too, see above):",
                self.others_on
            );
        }
        for l in &self.guest_ratios {
            let _ = writeln!(
                s,
                "  {:<24} n {:>4}  median {:.2} (p10 {:.2}, p90 {:.2}), {:+.1} ms",
                l.name, l.n, l.ratio, l.spread[0], l.spread[1], l.more_ms
            );
        }
        s
    }

    /// The claims at this confidence of the bound.
    pub fn claims(&self, confidence: f64) -> Vec<Claim> {
        let what = format!(
            "tails in {} runs of QEMU guests ({}) below the bound at {:.0} % of a model learned with process VMs, doubled because it knows no guests",
            self.accuracy.held_out,
            self.on,
            100.0 * confidence
        );
        let (coverage, _) = self.bound();
        let bound = Claim::new(
            "accuracy.bound.coverage_in_guests",
            what,
            coverage,
            "share",
            self.accuracy.held.len(),
        );
        let ratio = self.guest_ratios.first().map(|l| {
            let what = format!(
                "median tail of a task in a QEMU guest ({}) over the same task's as a process VM ({}; a tenth below {:.2}, a tenth above {:.2})",
                self.on, self.others_on, l.spread[0], l.spread[1]
            );
            Claim::new("accuracy.guests.ratio", what, l.ratio, "ratio", l.n)
        });
        let learned = self.learned.iter().flat_map(|l| l.claims(&self.on));
        std::iter::once(bound).chain(ratio).chain(learned).collect()
    }

    /// Comparison of both kinds of VM for a page; `None` without a condition that both ran.
    pub fn section(&self, device: &str) -> Option<Section> {
        guests_page::guests(device, [&self.on, &self.others_on], &self.pairs, &self.guest_ratios)
    }
}
