//! Runs of the cases: every scheme's settings applied, measured, reverted.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::passes::{TRIAL, point_id};
use super::schemes::{self, Basis, Planned, RtXen, Scheme};
use super::{Case, CaseOptions, PREFIX, TUNED, Tier, WRITES, cases};
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::design::MAX_VMS;
use rtvirtio_learn::load::{Knobs, Stream, spec};
use rtvirtio_learn::stage::Treatment;
use rtvirtio_model::{Config, Forecast, HostModel, Learned, ModelError, TailModel};
use rtvirtio_paper::PaperModels;
use rtvirtio_planner::tune::{TrialResult, TuneGoal, Tuner};
use rtvirtio_planner::{PlanError, Space};
use rtvirtio_spec::{LabKind, Spec};
use rtvirtio_stats::Random;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::{Nanos, Ratio};

use crate::run_basis::{RunOptions, other_host, profile};
use rtvirtio_harness::test_bed::{TestBed, device_name};
use rtvirtio_learn::runs::{RunRequest, Runs, TRIES};
use rtvirtio_workflow::model_choice::read_if;
use rtvirtio_workflow::{Error, Progress};

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct RunnerOptions {
    /// Device, model and results.
    pub runs: RunOptions,
    /// Tiers whose cases are run.
    pub tiers: Vec<Tier>,
    /// 30 % of the requests write.
    pub writes: bool,
    /// Rates are scaled to a third of the device's throughput.
    pub scaled: bool,
    /// [`rtvirtio_planner::PlanOptions::enough`] of our schemes.
    pub enough: Option<Ratio>,
    /// The option that sets `enough`, as on the command line.
    pub margin_option: Option<String>,
    /// Only cases whose name contains this.
    pub only: Option<String>,
    /// Ids of the schemes to run; all when empty.
    pub schemes: Vec<String>,
    /// Repetitions of every case.
    pub repeat: usize,
    pub length: Nanos,
    /// Most repetitions of a run while the host stalls.
    pub tries: u32,
}

impl RunnerOptions {
    /// Name of the data: the device, and the kind of load.
    #[must_use]
    pub fn data_name(&self) -> String {
        let writes = if self.writes { "-writes" } else { "" };
        format!("{}{writes}", device_name(&self.runs.device))
    }

    /// Refuses options that cannot be measured or written, before a device is made.
    ///
    /// # Errors
    /// An invalid option, by its name.
    pub fn check(&self) -> anyhow::Result<()> {
        check_schemes(&self.schemes)?;
        // A case's name does not depend on its load.
        let unscaled = CaseOptions { writes: 0.0, third_of: None };
        anyhow::ensure!(
            !chosen_cases(self, &unscaled).is_empty(),
            "--only: no case is named like that; `--write DIR` lists them"
        );
        self.runs.check()
    }

    /// File of the dataset, below the results directory.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.runs.out.join(format!("{PREFIX}{}.jsonl", self.data_name()))
    }
}

/// Measures all cases into the dataset.
///
/// # Errors
/// An unknown scheme or case, a device that cannot be made, a dataset of another host, and
/// cancellation.
pub fn measure(options: &RunnerOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<()> {
    options.check()?;
    let _lock = labs.dirs.lock_vms()?;
    let bed = TestBed::make(&options.runs.device, MAX_VMS + 1, LabKind::Process, labs, progress)?;
    let path = options.path();
    let measured = CaseRunner::new(options, &bed, &path, progress).and_then(|mut runner| runner.run_all());
    bed.remove()?;
    measured
}

/// The cases that the options choose.
fn chosen_cases(options: &RunnerOptions, case_options: &CaseOptions<'_>) -> Vec<Case> {
    let all = options.tiers.iter().flat_map(|&tier| cases(tier, case_options));
    all.filter(|case| options.only.as_ref().is_none_or(|only| case.name.contains(only.as_str()))).collect()
}

/// Command line, without options that only add runs: more repetitions, tiers or schemes.
fn command(options: &RunnerOptions) -> String {
    let mut s = format!("rtvirtio-bench cases {} --for {}", options.runs.device, options.length);
    if options.writes {
        s.push_str(" --writes");
    }
    if options.scaled {
        s.push_str(" --scaled");
    }
    if options.tries != TRIES {
        s.push_str(&format!(" --tries {}", options.tries));
    }
    s.extend(options.margin_option.as_ref().map(|margin| format!(" {margin}")));
    if let Some(model) = options.runs.model.as_deref().and_then(Path::file_name) {
        s.push_str(&format!(" --model {}", model.to_string_lossy()));
    }
    s
}

/// Refuses an unknown scheme.
fn check_schemes(names: &[String]) -> anyhow::Result<()> {
    let all: Vec<&str> = schemes::all().iter().map(|s| s.name()).chain([TUNED]).collect();
    match names.iter().find(|name| !all.contains(&name.as_str())) {
        Some(name) => anyhow::bail!("--schemes: there is no scheme {name}; there are {}", all.join(", ")),
        None => Ok(()),
    }
}

/// Runs cases on a test bed.
struct CaseRunner<'a> {
    options: &'a RunnerOptions,
    bed: &'a TestBed<'a>,
    runs: Runs<'a>,
    baseline: Config,
    space: Space,
    learned: Option<Arc<HostModel>>,
    paper: PaperModels,
    progress: &'a dyn Progress,
}

impl<'a> CaseRunner<'a> {
    /// Begins or continues the dataset at `path`.
    fn new(
        options: &'a RunnerOptions,
        bed: &'a TestBed<'a>,
        path: &Path,
        progress: &'a dyn Progress,
    ) -> anyhow::Result<Self> {
        let model = options.runs.model.as_deref();
        let (learned, paper) = (read_if(model)?, PaperModels::read_if(model)?);
        let profile = profile(&options.runs, learned.as_deref(), &bed.device.spec)?;
        let basis = (profile, learned.as_deref());
        let mut runs = bed.runs(path, command(options), options.length, basis, other_host(&options.runs))?;
        runs.tries = options.tries;
        if let Some(model) = &learned {
            model.fits(&runs.profile)?;
        }
        let mut space = Space { guests: false, ..Space::default() };
        let offered = bed.elevators()?;
        space.elevators.retain(|e| offered.contains(e));
        Ok(Self { options, bed, runs, baseline: bed.baseline()?, space, learned, paper, progress })
    }

    /// Runs all repetitions of all chosen cases.
    fn run_all(&mut self) -> anyhow::Result<()> {
        let cost = self.bed.cost(&self.runs.profile)?;
        let case_options = CaseOptions {
            writes: if self.options.writes { WRITES } else { 0.0 },
            third_of: if self.options.scaled { Some(&*cost) } else { None },
        };
        let todo = chosen_cases(self.options, &case_options);
        let total = (todo.len() * self.options.repeat) as u64;
        let mut bar =
            self.progress.bar(&format!("{} cases, {} repetitions", todo.len(), self.options.repeat), total);
        for repetition in 0..self.options.repeat {
            for (i, case) in todo.iter().enumerate() {
                bar.set((repetition * todo.len() + i) as u64);
                bar.set_message(&case.name);
                self.run_case(case, repetition)?;
            }
        }
        Ok(())
    }

    /// Runs all schemes in one case, in random order: schemes with equal settings share a run.
    fn run_case(&mut self, case: &Case, repetition: usize) -> anyhow::Result<()> {
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
                paper: &self.paper,
                enough: self.options.enough,
            };
            match scheme.treat(&basis) {
                Ok(treatment) => add(&mut treatments, scheme.name(), treatment),
                // A scheme without its model is left out; the report names it.
                Err(PlanError::Model(ModelError::NotLearned)) => {}
                Err(e) => return Err(e.into()),
            }
        }
        if self.is_chosen(TUNED) {
            let tuned = self.tune(case, &spec, &baseline)?;
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
                // A scheme that is added later shares the run of its settings: a new run would be
                // of another hour.
                match self.shared(&case.name, repetition, &treatment) {
                    Some(run) => self.runs.share(&run, id, &schemes)?,
                    None => drop(self.measure(id, &schemes, treatment, &case.vms, seed)?),
                }
            }
        }
        Ok(())
    }

    fn schemes(&self) -> Vec<Box<dyn Scheme>> {
        schemes::all().into_iter().filter(|s| self.is_chosen(s.name())).collect()
    }

    fn is_chosen(&self, scheme: &str) -> bool {
        self.options.schemes.is_empty() || self.options.schemes.iter().any(|s| s == scheme)
    }

    fn is_done(&self, case: &str, repetition: usize, scheme: &str) -> bool {
        let start = format!("{case}/{repetition}/");
        self.runs.points.iter().any(|p| p.id.starts_with(&start) && p.is_of(scheme))
    }

    /// The run of this repetition under the same settings, which do not describe budget servers.
    fn shared(&self, case: &str, repetition: usize, treatment: &Treatment) -> Option<Point> {
        if treatment.regulator.is_some() {
            return None;
        }
        let start = format!("{case}/{repetition}/");
        let knobs = Knobs::from_config(&treatment.config);
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
        // Tuning subtracts the host's stalls from its measurements, so a repeated run adds nothing.
        let tries = (scheme == TRIAL).then_some(1);
        Ok(self
            .runs
            .measure(RunRequest { id, scheme, treatment, vms, seed, forecasts, tries })
            .map_err(Error::from)?)
    }

    /// The learned model's forecasts before a run. They judge the bounds of settings that a planner
    /// chose: it takes the smallest bound of many candidates, which is too small more often than
    /// the bound of random settings.
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

    /// The result of tuning, once per case; its trials are in the dataset too.
    fn tune(&mut self, case: &Case, spec: &Spec, baseline: &Config) -> anyhow::Result<Config> {
        let planned = if self.learned.is_some() { Planned::Bound } else { Planned::Slice };
        let basis = Basis {
            spec,
            profile: &self.runs.profile,
            baseline,
            space: &self.space,
            learned: self.learned.as_ref(),
            paper: &self.paper,
            enough: self.options.enough,
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
            // A resumed run follows the trials in the dataset, also when the model has changed
            // since. A point holds only the knobs that act, so the tuner gets its own configuration
            // where both are the same.
            let tried =
                if Knobs::from_config(&config) == point.knobs { config } else { point.knobs.config() };
            tuner.observe(&tried, &observations(&point));
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

fn observations(point: &Point) -> Vec<TrialResult> {
    point
        .tasks()
        .map(|(_, stream, outcome)| TrialResult {
            latency_ns: outcome.tail().0 as f64,
            kept: stream.rate.map_or(1.0, |r| outcome.rate.0 / r.0),
        })
        .collect()
}
