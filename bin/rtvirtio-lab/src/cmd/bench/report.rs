//! `rtvirtio-lab bench report`: all that was measured, on one page.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use rtvirtio_bench::accuracy::FOLDS;
use rtvirtio_bench::cases::Tier;
use rtvirtio_bench::dataset::Dataset;
use rtvirtio_bench::train::{MISS, TrainError};

use super::found::Found;
use super::sweep::IN_GUESTS;
use super::{accuracy, cases, contention, cyclictest, iod, plan, reservation, tails};
use crate::args::BenchReportArgs;
use rtvirtio_console::Ui;
use rtvirtio_console::write_file;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::model_choice;

/// Ending of datasets.
const DATA: &str = "jsonl";

/// `rtvirtio-lab bench report`.
pub fn run(args: &BenchReportArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    // One that is still being measured is no reason to hide the others.
    let usable = |path: &Path, found: anyhow::Result<Found>| {
        found.inspect_err(|e| ui.warn(&format!("{} is left out: {e:#}", path.display()))).ok()
    };
    let iod = iod::in_dir(&args.data)?;
    type Reader = fn(&Path) -> anyhow::Result<Found>;
    let others: [(&str, Reader); 4] = [
        (plan::FILE, plan::found),
        (tails::FILE, tails::found),
        (reservation::FILE, reservation::found),
        (cyclictest::FILE, cyclictest::found),
    ];
    let others =
        others.map(|(file, read)| (args.data.join(file), read)).into_iter().filter(|(p, _)| p.exists());
    let others: Vec<Found> = others.filter_map(|(path, read)| usable(&path, read(&path))).collect();
    let data = datasets(&args.data)?.into_iter();
    let data = data.filter_map(|(name, path)| usable(&path, one(&args.data, &name, &path, ui)));
    let all = data.chain(iod).chain(others).reduce(Found::with);
    let all = all.with_context(|| format!("{} holds no dataset", args.data.display()))?;
    if let Some(out) = &args.markdown {
        write_file(out, all.markdown().as_bytes())?;
        ui.step(&format!("wrote {}", out.display()));
    }
    all.tell("rtvirtio: experiments", args.html.as_deref(), ui)
}

/// Names and paths of the datasets in a directory, sorted. Runs in guests are judged with those of process VMs.
fn datasets(dir: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let Some(name) = path.file_stem().and_then(|n| n.to_str()).map(str::to_owned) else { continue };
        if path.extension().is_some_and(|e| e == DATA) && !name.ends_with(IN_GUESTS) {
            all.push((name, path));
        }
    }
    all.sort();
    Ok(all)
}

fn one(dir: &Path, name: &str, path: &Path, ui: &Ui) -> anyhow::Result<Found> {
    if let Some(about) = name.strip_prefix(cases::PREFIX) {
        return Ok(cases::found(&Tier::ALL, &Dataset::load(path)?).about(about));
    }
    if let Some(device) = name.strip_prefix(contention::PREFIX) {
        let model = dir.join(format!("{device}.model.json"));
        let data = Dataset::load(path)?;
        let learned = model_choice::read_if(Some(model.as_path()).filter(|m| m.exists()))?;
        return Ok(contention::found(learned.as_ref(), &data, ui)?.about(device));
    }
    let guests = dir.join(format!("{name}{IN_GUESTS}.{DATA}"));
    let judged = |miss| {
        let options = accuracy::Options {
            folds: FOLDS,
            seed: 1,
            miss,
            guests: Some(guests.as_path()).filter(|g| g.exists()),
            model: None,
        };
        accuracy::found(path, &options, ui)
    };
    // A dataset that is too small for a bound at 99 % is judged at what it can carry; its claims say so.
    let small = |e: &anyhow::Error| matches!(e.downcast_ref(), Some(TrainError::TooFew { .. }));
    let lesser = |miss: f64| {
        move |e: anyhow::Error| {
            if !small(&e) {
                return Err(e);
            }
            ui.warn(&format!("{}: {e:#}; judged at {:.0} % instead", path.display(), 100.0 * (1.0 - miss)));
            judged(miss)
        }
    };
    judged(MISS).or_else(lesser(0.05)).or_else(lesser(0.1))
}
