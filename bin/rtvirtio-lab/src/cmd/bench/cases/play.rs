//! Playing the cases: every scheme's settings applied, measured, put back.

use std::path::Path;
use std::sync::Arc;

use rtvirtio_bench::cases::{Case, CaseOptions, WRITES, cases};
use rtvirtio_bench::dataset::Point;
use rtvirtio_bench::load::{Knobs, Stream, spec};
use rtvirtio_bench::passes::{TRIAL, point_id};
use rtvirtio_bench::schemes::{self, Basis, Planned, RtXen, Scheme};
use rtvirtio_bench::stage::Treatment;
use rtvirtio_model::{Config, Forecast, HostModel, Learned, ModelError, TailModel};
use rtvirtio_planner::tune::{Seen, TuneGoal, Tuner};
use rtvirtio_planner::{PlanError, Space};
use rtvirtio_spec::{LabKind, Spec};
use rtvirtio_stats::Random;

use super::{TUNED, tiers};
use crate::args::BenchCasesArgs;
use crate::cmd::bench::bed::Bed;
use crate::cmd::bench::runs::{other_host, profile};
use rtvirtio_console::Ui;
use rtvirtio_learn::runs::{Runs, TRIES, Wanted};
use rtvirtio_workflow::Error;
use rtvirtio_workflow::model_choice::read_if;

/// What decides what a run is; more repetitions, tiers or schemes only add runs.
fn command(args: &BenchCasesArgs) -> String {
    let mut s = format!("rtvirtio-lab bench cases {} --for {}", args.runs.device, args.length);
    if args.writes {
        s.push_str(" --writes");
    }
    if args.scaled {
        s.push_str(" --scaled");
    }
    if args.tries != TRIES {
        s.push_str(&format!(" --tries {}", args.tries));
    }
    // Files from before there was such an option say none.
    s.extend(args.margin.option().map(|margin| format!(" {margin}")));
    if let Some(model) = args.runs.model.as_deref().and_then(Path::file_name) {
        s.push_str(&format!(" --model {}", model.to_string_lossy()));
    }
    s
}

/// A benchmark under way.
pub struct Play<'a> {
    args: &'a BenchCasesArgs,
    bed: &'a Bed<'a>,
    runs: Runs<'a>,
    baseline: Config,
    space: Space,
    learned: Option<Arc<HostModel>>,
    ui: &'a Ui,
}

impl<'a> Play<'a> {
    /// On a bed, going on with the file at `path`.
    pub fn begin(
        args: &'a BenchCasesArgs,
        bed: &'a Bed<'a>,
        path: &Path,
        ui: &'a Ui,
    ) -> anyhow::Result<Self> {
        let learned = read_if(args.runs.model.as_deref())?;
        let profile = profile(&args.runs, learned.as_deref(), &bed.device.spec)?;
        let basis = (profile, learned.as_deref());
        let mut runs = bed.runs(path, command(args), args.length, basis, other_host(&args.runs))?;
        runs.tries = args.tries;
        if let Some(model) = &learned {
            model.fits(&runs.profile)?;
        }
        let mut space = Space { guests: false, ..Space::default() };
        let offered = bed.elevators()?;
        space.elevators.retain(|e| offered.contains(e));
        Ok(Self { args, bed, runs, baseline: bed.baseline()?, space, learned, ui })
    }

    /// All repetitions of all cases asked for.
    pub fn all(&mut self) -> anyhow::Result<()> {
        let cost = self.bed.cost(&self.runs.profile)?;
        let options = CaseOptions {
            writes: if self.args.writes { WRITES } else { 0.0 },
            third_of: if self.args.scaled { Some(&*cost) } else { None },
        };
        let mut todo: Vec<Case> = tiers(self.args).into_iter().flat_map(|t| cases(t, &options)).collect();
        if let Some(only) = &self.args.only {
            todo.retain(|c| c.name.contains(only.as_str()));
        }
        let total = (todo.len() * self.args.repeat) as u64;
        let mut bar = self.ui.bar(&format!("{} cases, {} repetitions", todo.len(), self.args.repeat), total);
        for repetition in 0..self.args.repeat {
            for (i, case) in todo.iter().enumerate() {
                bar.set((repetition * todo.len() + i) as u64);
                bar.say(&case.name);
                self.case(case, repetition)?;
            }
        }
        Ok(())
    }

    /// All schemes in one case, in an order of chance: schemes with equal settings share a run.
    fn case(&mut self, case: &Case, repetition: usize) -> anyhow::Result<()> {
        let spec = spec(&case.vms, self.bed.device.spec.clone(), LabKind::Process);
        let mut baseline = self.baseline.clone();
        baseline.vms.truncate(spec.vms.len());
        let mut treatments: Vec<(String, Treatment)> = Vec::new();
        for scheme in self.schemes() {
            let basis = Basis {
                spec: &spec,
                profile: &self.runs.profile,
                baseline: &baseline,
                space: &self.space,
                learned: self.learned.as_ref(),
                enough: self.args.margin.enough(),
            };
            match scheme.treat(&basis) {
                Ok(treatment) => add(&mut treatments, scheme.name(), treatment),
                // A scheme without its model is left out; the report says so.
                Err(PlanError::Model(ModelError::NotLearned | ModelError::NoNetwork)) => {}
                Err(e) => return Err(e.into()),
            }
        }
        if self.wants(TUNED) {
            let tuned = self.tuned(case, &spec, &baseline)?;
            add(&mut treatments, TUNED, Treatment::knobs(tuned));
        }
        let seed =
            case.name.bytes().fold(repetition as u64 + 1, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        Random::new(seed).shuffle(&mut treatments);
        for (schemes, treatment) in treatments {
            let missing: Vec<&str> =
                schemes.split(',').filter(|s| !self.is_done(&case.name, repetition, s)).collect();
            if !missing.is_empty() {
                let schemes = missing.join(",");
                let id = point_id(&case.name, repetition, &schemes);
                // A scheme that comes later shares the run of those with its settings: a run of its own would be of another hour.
                match self.shared(&case.name, repetition, &treatment) {
                    Some(run) => self.runs.share(&run, id, &schemes)?,
                    None => drop(self.measure(id, &schemes, treatment, &case.vms, seed)?),
                }
            }
        }
        Ok(())
    }

    fn schemes(&self) -> Vec<Box<dyn Scheme>> {
        schemes::all().into_iter().filter(|s| self.wants(s.name())).collect()
    }

    fn wants(&self, scheme: &str) -> bool {
        self.args.schemes.is_empty() || self.args.schemes.iter().any(|s| s == scheme)
    }

    fn is_done(&self, case: &str, repetition: usize, scheme: &str) -> bool {
        let start = format!("{case}/{repetition}/");
        self.runs.points.iter().any(|p| p.id.starts_with(&start) && p.is_of(scheme))
    }

    /// The run of this repetition under the same settings. What budget servers do is not among a run's settings.
    fn shared(&self, case: &str, repetition: usize, treatment: &Treatment) -> Option<Point> {
        if treatment.regulator.is_some() {
            return None;
        }
        let start = format!("{case}/{repetition}/");
        let knobs = Knobs::of(&treatment.config);
        let same = |p: &&Point| {
            let plain = !p.is_of(TRIAL) && !p.is_of(RtXen.name());
            p.id.starts_with(&start) && plain && p.knobs == knobs && p.classes == treatment.classes
        };
        self.runs.points.iter().find(same).cloned()
    }

    fn measure(
        &mut self,
        id: String,
        scheme: &str,
        treatment: Treatment,
        vms: &[Vec<Stream>],
        seed: u64,
    ) -> anyhow::Result<Point> {
        let forecasts = self.forecasts(vms, &treatment);
        // Tuning subtracts the host's own stalls from what it sees: another try shows it nothing new.
        let tries = (scheme == TRIAL).then_some(1);
        Ok(self
            .runs
            .measure(Wanted { id, scheme, treatment, vms, seed, forecasts, tries })
            .map_err(Error::from)?)
    }

    /// What the learned model promises before a run, so that promises about settings that a planner chose are judged too: of many candidates it
    /// takes the one with the smallest bound, which is more often too small than a bound of settings of chance.
    fn forecasts(&self, vms: &[Vec<Stream>], treatment: &Treatment) -> Vec<Forecast> {
        let Some(model) = self.learned.as_ref() else { return Vec::new() };
        // Classes and budget servers are not among the model's inputs.
        if treatment.classes.is_some() || treatment.regulator.is_some() {
            return Vec::new();
        }
        let spec = spec(vms, self.bed.device.spec.clone(), LabKind::Process);
        let learned = Learned::bound(Arc::clone(model));
        learned.forecast(&self.runs.profile, &spec, &treatment.config).unwrap_or_default()
    }

    /// The settings that tuning arrives at, once per case; its trials are in the dataset too.
    fn tuned(&mut self, case: &Case, spec: &Spec, baseline: &Config) -> anyhow::Result<Config> {
        let planned = if self.learned.is_some() { Planned::Bound } else { Planned::Slice };
        let basis = Basis {
            spec,
            profile: &self.runs.profile,
            baseline,
            space: &self.space,
            learned: self.learned.as_ref(),
            enough: self.args.margin.enough(),
        };
        let options = planned.options(&basis)?;
        let mut tuner = Tuner::new(spec, &self.runs.profile, &options, TuneGoal::default())?;
        let mut n = 0;
        while let Some(config) = tuner.next() {
            n += 1;
            let id = point_id(&case.name, n, TRIAL);
            let point = match self.runs.find(&id) {
                Some(point) => point.clone(),
                None => {
                    let seed = 7_000 + n as u64;
                    self.measure(id, TRIAL, Treatment::knobs(config.clone()), &case.vms, seed)?
                }
            };
            // A resumed run follows the trials that were made, also if the model has changed since. A point holds only the knobs that
            // act, so the tuner's own configuration is told where it is the same.
            let tried = if Knobs::of(&config) == point.knobs { config } else { point.knobs.config() };
            tuner.observe(&tried, &seen(&point));
        }
        Ok(tuner.best().map_or_else(|| baseline.clone(), |(_, config)| config.clone()))
    }
}

fn add(treatments: &mut Vec<(String, Treatment)>, scheme: &str, treatment: Treatment) {
    match treatments.iter_mut().find(|(_, t)| *t == treatment) {
        Some((names, _)) => {
            names.push(',');
            names.push_str(scheme);
        }
        None => treatments.push((scheme.to_owned(), treatment)),
    }
}

fn seen(point: &Point) -> Vec<Seen> {
    point
        .tasks()
        .map(|(_, stream, outcome)| Seen {
            latency_ns: outcome.tail().0 as f64,
            kept: stream.rate.map_or(1.0, |r| outcome.rate.0 / r.0),
        })
        .collect()
}
