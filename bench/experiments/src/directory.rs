//! The report of all datasets and results in a directory.

use std::path::{Path, PathBuf};

use anyhow::Context;
use rayon::prelude::*;
use rtvirtio_learn::dataset::Dataset;
use rtvirtio_learn::train::{MISS, TrainError};
use rtvirtio_paper::PaperModels;
use rtvirtio_workflow::{Progress, model_choice};

use crate::accuracy::judge::FOLDS;
use crate::accuracy::{self, AccuracyOptions};
use crate::ageing::AgeingData;
use crate::before_after::BeforeAfterData;
use crate::blame::BlameData;
use crate::cases::{self, Tier};
use crate::cores::CoresData;
use crate::cpu_predict::CpuPredictData;
use crate::cyclictest::CyclictestData;
use crate::daemon::DaemonData;
use crate::daemon::day::DayData;
use crate::daemon::scale::ScaleData;
use crate::demo_busy::DemoBusyData;
use crate::experiment::{self, Experiment};
use crate::fleet::FleetData;
use crate::fleet_cluster::ClusterData;
use crate::fleet_cluster::slow::SlowData;
use crate::iod::IodData;
use crate::iod_added::AddedData;
use crate::iod_attach::AttachData;
use crate::iod_crash::CrashData;
use crate::iod_migrate::MigrateData;
use crate::iod_startup::StartupData;
use crate::isolation::IsolationData;
use crate::net::NetData;
use crate::net::timeline::TimelineData;
use crate::paravirt::ParavirtData;
use crate::planning::Planning;
use crate::profile_time::ProfileTimeData;
use crate::regulation::RegulationData;
use crate::regulation::planned::PlannedData;
use crate::report::ExperimentReport;
use crate::reservation::ReservationData;
use crate::responsiveness::ResponsivenessData;
use crate::sweep::IN_GUESTS;
use crate::tails::TailsData;
use crate::{contention, fleet_cluster, paravirt, responsiveness};

/// File extension of datasets.
const DATASET: &str = "jsonl";

/// Reads a saved result.
type Reader = fn(&Path) -> anyhow::Result<ExperimentReport>;

/// File of an experiment, and the function that reads it.
fn saved<E: Experiment>() -> (&'static str, Reader) {
    (E::FILE, experiment::report::<E>)
}

/// The report of every dataset and result in a directory.
///
/// # Errors
/// A directory that holds none.
pub fn report(dir: &Path, progress: &dyn Progress) -> anyhow::Result<ExperimentReport> {
    // A file that is still being measured does not hide the others.
    let usable = |path: &Path, report: anyhow::Result<ExperimentReport>| {
        report.inspect_err(|e| progress.warn(&format!("{} is left out: {e:#}", path.display()))).ok()
    };
    let iod = iod_report(dir)?;
    let results = [
        saved::<BeforeAfterData>(),
        saved::<BlameData>(),
        saved::<CpuPredictData>(),
        saved::<DemoBusyData>(),
        saved::<IsolationData>(),
        saved::<Planning>(),
        saved::<CoresData>(),
        saved::<AgeingData>(),
        saved::<TailsData>(),
        saved::<ProfileTimeData>(),
        saved::<ReservationData>(),
        saved::<CyclictestData>(),
        saved::<DaemonData>(),
        saved::<DayData>(),
        saved::<ScaleData>(),
        saved::<FleetData>(),
        saved::<ClusterData>(),
        (fleet_cluster::DOMAINS_FILE, experiment::report::<ClusterData>),
        (fleet_cluster::PAUSED_FILE, experiment::report::<ClusterData>),
        (fleet_cluster::FENCING_FILE, experiment::report::<ClusterData>),
        saved::<SlowData>(),
        saved::<ParavirtData>(),
        (paravirt::CHAIN_FILE, experiment::report::<ParavirtData>),
        (paravirt::BOX_FILES[0], paravirt::report_in_box),
        (paravirt::BOX_FILES[1], paravirt::report_in_box),
        (paravirt::BOX_FILES[2], paravirt::report_in_box),
        (paravirt::BOX_FILES[3], paravirt::report_in_box),
        saved::<RegulationData>(),
        saved::<PlannedData>(),
        saved::<ResponsivenessData>(),
        (responsiveness::VIDEO_FILE, responsiveness::report_of_video),
    ];
    let results = results.map(|(file, read)| (dir.join(file), read)).into_iter().filter(|(p, _)| p.exists());
    let results: Vec<ExperimentReport> =
        results.filter_map(|(path, read)| usable(&path, read(&path))).collect();
    // Each dataset is judged by models fitted on it.
    let judge = |(name, path): (String, PathBuf)| (of_dataset(dir, &name, &path, progress), path);
    let data: Vec<_> = datasets(dir)?.into_par_iter().map(judge).collect();
    let data = data.into_iter().filter_map(|(report, path)| usable(&path, report));
    let all = data.chain(iod).chain(results).reduce(ExperimentReport::and);
    all.with_context(|| format!("{} holds no dataset", dir.display()))
}

/// The report of the I/O domain's results in a directory, those with guests included; `None`
/// without results.
pub fn iod_report(dir: &Path) -> anyhow::Result<Option<ExperimentReport>> {
    let all = [
        saved::<IodData>(),
        saved::<AddedData>(),
        saved::<AttachData>(),
        saved::<CrashData>(),
        saved::<MigrateData>(),
        saved::<StartupData>(),
        saved::<NetData>(),
        saved::<TimelineData>(),
    ];
    let present =
        all.into_iter().map(|(file, read)| (dir.join(file), read)).filter(|(path, _)| path.exists());
    let reports = present.map(|(path, read)| read(&path)).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(reports.into_iter().reduce(ExperimentReport::and))
}

/// Names and paths of the datasets in a directory, sorted. Runs in guests are judged with those of
/// process VMs.
fn datasets(dir: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let Some(name) = path.file_stem().and_then(|n| n.to_str()).map(str::to_owned) else { continue };
        if path.extension().is_some_and(|e| e == DATASET) && !name.ends_with(IN_GUESTS) {
            all.push((name, path));
        }
    }
    all.sort();
    Ok(all)
}

fn of_dataset(
    dir: &Path,
    name: &str,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<ExperimentReport> {
    if let Some(suffix) = name.strip_prefix(cases::PREFIX) {
        return Ok(cases::report(&Tier::ALL, &Dataset::load(path)?).with_suffix(suffix));
    }
    if let Some(device) = name.strip_prefix(contention::PREFIX) {
        let model = dir.join(format!("{device}.model.json"));
        let data = Dataset::load(path)?;
        let model = Some(model.as_path()).filter(|m| m.exists());
        let models = (model_choice::read_if(model)?, PaperModels::read_if(model)?);
        let models = (models.0.as_ref(), &models.1);
        return Ok(contention::report(models, &data, progress)?.with_suffix(device));
    }
    let guests = dir.join(format!("{name}{IN_GUESTS}.{DATASET}"));
    let judged = |miss| {
        let options = AccuracyOptions {
            folds: FOLDS,
            seed: 1,
            miss,
            guests: Some(guests.as_path()).filter(|g| g.exists()),
            model: None,
        };
        accuracy::report(path, &options, progress)
    };
    // A dataset too small for a bound at 99 % is judged at a lower confidence, which its claims
    // name.
    let is_too_small = |e: &anyhow::Error| matches!(e.downcast_ref(), Some(TrainError::TooFew { .. }));
    let at_lower_confidence = |miss: f64| {
        move |e: anyhow::Error| {
            if !is_too_small(&e) {
                return Err(e);
            }
            progress.warn(&format!(
                "{}: {e:#}; judged at {:.0} % instead",
                path.display(),
                100.0 * (1.0 - miss)
            ));
            judged(miss)
        }
    };
    judged(MISS).or_else(at_lower_confidence(0.05)).or_else(at_lower_confidence(0.1))
}
