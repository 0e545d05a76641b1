//! `rtvirtio bench cases`: the paper's 24 cases and ours, all schemes side by side.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rtvirtio_bench::cases::{Case, CaseOptions, Tier, WRITES, cases};
use rtvirtio_bench::claims::{BenchFile, Claim};
use rtvirtio_bench::dataset::{Dataset, Point, Recorder};
use rtvirtio_bench::design::MAX_VMS;
use rtvirtio_bench::load::{Knobs, spec};
use rtvirtio_bench::passes::{PUBLISHED, Table, point_id};
use rtvirtio_bench::run::{self, Job};
use rtvirtio_bench::schemes::{self, Basis, Planned, Scheme};
use rtvirtio_bench::stage::{Stage, Treatment};
use rtvirtio_model::{Config, HostModel, Profile};
use rtvirtio_planner::tune::{Seen, TuneGoal, Tuner};
use rtvirtio_planner::{PlanError, Space};
use rtvirtio_report::{BenchPage, bench_html};
use rtvirtio_spec::{LabKind, Spec};
use rtvirtio_stats::Random;

use super::bed::{Bed, twin_name};
use super::page;
use crate::args::{BenchCasesArgs, Global, TierName};
use crate::cmd::verify::generated;
use crate::cmd::{need_root, show, write_file};
use crate::site;
use crate::ui::{Cancelled, Ui};

/// Tries per run when the host is not quiet.
const TRIES: u32 = 2;
/// The scheme that measures as it goes.
const TUNED: &str = "tuned";
/// Prefix of the trials of [`TUNED`] in the dataset.
const TRIAL: &str = "trial";

/// `rtvirtio bench cases`.
pub fn run(args: &BenchCasesArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if let Some(dir) = &args.write {
        return write_specs(dir, ui);
    }
    let path = data_file(args);
    if args.report_only {
        let data = Dataset::load(&path)?;
        return report(args, &data, ui);
    }
    need_root("bench cases")?;
    let _lock = site::lock(global)?;
    let bed = Bed::twin(twin_name(&args.device), MAX_VMS + 1, global, ui)?;
    let played = Play::begin(args, &bed, &path, ui).and_then(|mut play| play.all());
    bed.remove()?;
    played?;
    report(args, &Dataset::load(&path)?, ui)
}

fn data_file(args: &BenchCasesArgs) -> PathBuf {
    let writes = if args.writes { "-writes" } else { "" };
    args.out.join(format!("cases-{}{writes}.jsonl", twin_name(&args.device)))
}

fn tiers(args: &BenchCasesArgs) -> Vec<Tier> {
    let mut tiers: Vec<Tier> = args.tiers.iter().map(|t| Tier::from(*t)).collect();
    if tiers.is_empty() {
        tiers = Tier::ALL.to_vec();
    }
    tiers
}

impl From<TierName> for Tier {
    fn from(name: TierName) -> Self {
        match name {
            TierName::Paper => Self::Paper,
            TierName::Tight => Self::Tight,
            TierName::Strict => Self::Strict,
        }
    }
}

/// The spec files of `examples/cases`.
fn write_specs(dir: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
    let mut n = 0;
    for tier in Tier::ALL {
        for case in cases(tier, &CaseOptions { writes: 0.0, third_of: None }) {
            write_file(&dir.join(format!("{}.toml", case.name)), case.toml().as_bytes())?;
            n += 1;
        }
    }
    ui.step(&format!("wrote {n} specs in {}", dir.display()));
    Ok(ExitCode::SUCCESS)
}

/// A benchmark under way.
struct Play<'a> {
    args: &'a BenchCasesArgs,
    bed: &'a Bed<'a>,
    stage: Stage<'a>,
    baseline: Config,
    space: Space,
    profile: Profile,
    learned: Option<Arc<HostModel>>,
    recorder: Recorder,
    done: BTreeMap<String, Point>,
    ui: &'a Ui,
}

impl<'a> Play<'a> {
    fn begin(args: &'a BenchCasesArgs, bed: &'a Bed<'a>, path: &Path, ui: &'a Ui) -> anyhow::Result<Self> {
        let learned = match &args.model {
            Some(path) => Some(Arc::new(HostModel::from_json(&std::fs::read_to_string(path)?)?)),
            None => None,
        };
        let command = format!("rtvirtio bench cases twin:{} --repeat {}", bed.device, args.repeat);
        let profile = args.profile.as_deref().map(rtvirtio_measure::profile::load).transpose()?;
        let (profile, recorder, points) = bed.record(path, command, profile)?;
        let mut space = Space { guests: false, ..Space::default() };
        let offered = bed.elevators()?;
        space.elevators.retain(|e| offered.contains(e));
        Ok(Self {
            args,
            bed,
            stage: bed.stage()?,
            baseline: bed.baseline()?,
            space,
            profile,
            learned,
            recorder,
            done: points.into_iter().map(|p| (p.id.clone(), p)).collect(),
            ui,
        })
    }

    fn all(&mut self) -> anyhow::Result<()> {
        let cost = self.bed.cost(&self.profile)?;
        let options = CaseOptions {
            writes: if self.args.writes { WRITES } else { 0.0 },
            third_of: if self.args.scaled { Some(&*cost) } else { None },
        };
        let mut todo: Vec<Case> = tiers(self.args).into_iter().flat_map(|t| cases(t, &options)).collect();
        if let Some(only) = &self.args.only {
            todo.retain(|c| c.name.contains(only.as_str()));
        }
        anyhow::ensure!(!todo.is_empty(), "no case is named like that; `--write DIR` lists them");
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
        let spec = spec(&case.vms, self.bed.spec_device.clone(), LabKind::Process);
        let mut baseline = self.baseline.clone();
        baseline.vms.truncate(spec.vms.len());
        let mut treatments: Vec<(String, Treatment)> = Vec::new();
        for scheme in self.schemes() {
            let basis = Basis {
                spec: &spec,
                profile: &self.profile,
                baseline: &baseline,
                space: &self.space,
                learned: self.learned.as_ref(),
            };
            match scheme.treat(&basis) {
                Ok(treatment) => add(&mut treatments, scheme.name(), treatment),
                // A scheme without its model is left out; that is said once, in the report.
                Err(PlanError::Model(rtvirtio_model::ModelError::NotLearned)) => {}
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
                self.measure(id, &schemes, treatment, &case.vms, seed)?;
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
        self.done.iter().any(|(id, p)| id.starts_with(&start) && p.scheme.split(',').any(|s| s == scheme))
    }

    fn measure(
        &mut self,
        id: String,
        scheme: &str,
        treatment: Treatment,
        vms: &[Vec<rtvirtio_bench::load::Stream>],
        seed: u64,
    ) -> anyhow::Result<Point> {
        let job = Job {
            id,
            device: &self.bed.device,
            spec_device: &self.bed.spec_device,
            scheme,
            treatment,
            vms,
            length: Duration::from_nanos(self.args.length.0),
            seed,
            tries: TRIES,
        };
        match run::measure(&job, &self.stage, self.ui.cancel_flag(), &mut |_| {}) {
            Ok(point) => {
                self.recorder.add(&point)?;
                self.done.insert(point.id.clone(), point.clone());
                Ok(point)
            }
            Err(e) if e.is_cancelled() => {
                self.ui.step("what was measured is kept; the same command goes on");
                Err(Cancelled.into())
            }
            Err(e) => Err(e.into()),
        }
    }

    /// The settings that tuning arrives at, once per case; its trials are in the dataset too.
    fn tuned(&mut self, case: &Case, spec: &Spec, baseline: &Config) -> anyhow::Result<Config> {
        let planned = if self.learned.is_some() { Planned::Bound } else { Planned::Slice };
        let basis = Basis {
            spec,
            profile: &self.profile,
            baseline,
            space: &self.space,
            learned: self.learned.as_ref(),
        };
        let options = planned.options(&basis)?;
        let mut tuner = Tuner::new(spec, &self.profile, &options, TuneGoal::default())?;
        let mut n = 0;
        while let Some(config) = tuner.next() {
            n += 1;
            let id = point_id(&case.name, n, TRIAL);
            let point = match self.done.get(&id) {
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
            latency_ns: outcome.p9999.0 as f64,
            kept: stream.rate.map_or(1.0, |r| outcome.rate.0 / r.0),
        })
        .collect()
}

/// Tables and claims from what is measured.
fn report(args: &BenchCasesArgs, data: &Dataset, ui: &Ui) -> anyhow::Result<ExitCode> {
    let options = CaseOptions { writes: 0.0, third_of: None };
    let measured: Vec<Point> = data.points.iter().filter(|p| p.scheme != TRIAL).cloned().collect();
    let mut claims = Vec::new();
    let mut text = String::new();
    let mut tables = Vec::new();
    for tier in tiers(args) {
        let table = Table::new(tier, &cases(tier, &options), &measured);
        if table.cells.iter().flatten().all(|c| c.n == 0) {
            continue;
        }
        claims.extend(table.claims());
        text.push_str(&table_text(&table));
        tables.push(table);
    }
    claims.extend(trials(data));
    if let Some(out) = &args.html {
        let mut sections = vec![page::claims(&claims), page::pass_rates(&tables)];
        sections.extend(tables.iter().map(page::cases));
        let page = BenchPage {
            title: format!("rtvirtio: cases on {}", data.header.host.device),
            lead: vec![format!(
                "{} runs on Linux {} with {} CPUs, process VMs; {}.",
                data.points.len(),
                data.header.host.kernel,
                data.header.host.cpus,
                data.header.command
            )],
            sections,
            generated: generated(),
        };
        write_file(out, bench_html(&page).as_bytes())?;
        ui.step(&format!("wrote {}", out.display()));
    }
    let runs = data.points.iter().map(rtvirtio_bench::run::as_result).collect();
    let met = claims.iter().all(|c| c.met);
    let file = BenchFile::new(data.header.host.clone(), runs, claims);
    show(ui, &file, || text)?;
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::from(2) })
}

/// How many trials tuning took per case.
fn trials(data: &Dataset) -> Option<Claim> {
    let mut by: BTreeMap<&str, usize> = BTreeMap::new();
    for p in data.points.iter().filter(|p| p.scheme == TRIAL) {
        *by.entry(rtvirtio_bench::passes::case_of(&p.id)).or_default() += 1;
    }
    let most = *by.values().max()?;
    Some(
        Claim::new("tune.trials", "most trials that tuning took in a case", most as f64, "trials", by.len())
            .at_most(15.0),
    )
}

fn table_text(table: &Table) -> String {
    use std::fmt::Write as _;
    let mut s = format!("\n{} tier\n{:<26}", table.tier.name(), "case");
    for scheme in &table.schemes {
        let _ = write!(s, " {scheme:>20}");
    }
    s.push('\n');
    for (case, row) in table.cases.iter().zip(&table.cells) {
        if row.iter().all(|c| c.n == 0) {
            continue;
        }
        let _ = write!(s, "{case:<26}");
        for cell in row {
            let worst = rtvirtio_bench::train::median(cell.worst.clone());
            let text =
                if cell.n == 0 { "-".to_owned() } else { format!("{}/{} {worst:.2}", cell.passed, cell.n) };
            let _ = write!(s, " {text:>20}");
        }
        s.push('\n');
    }
    let _ = write!(s, "{:<26}", "pass rate");
    for scheme in &table.schemes {
        let _ = write!(s, " {:>19.1}%", 100.0 * table.pass_rate(scheme).0);
    }
    if table.tier != Tier::Paper {
        s.push_str("\npassed/runs, and the median over runs of the worst measured/target\n");
        return s;
    }
    let _ = write!(s, "\n{:<26}", "published (paper)");
    for scheme in &table.schemes {
        let text = PUBLISHED
            .iter()
            .find(|(n, _)| n == scheme)
            .map_or(String::new(), |(_, v)| format!("{:.1}%", 100.0 * v));
        let _ = write!(s, " {text:>20}");
    }
    s.push_str("\npassed/runs, and the median over runs of the worst measured/target\n");
    s
}
