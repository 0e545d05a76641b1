//! `rtvirtio profile` on many hosts: shares of a sweep, their library, and devices of a known kind.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_console::{Global, Ui, generated, save_model, save_profile, show, write_result};
use rtvirtio_kernel::trusted::Refusal;
use rtvirtio_kernel::{Root, Stack};
use rtvirtio_learn::library::{
    Confirmation, DeviceKind, Library, Merged, Shard, Share, confirm, merge as merged,
};
use rtvirtio_learn::on_device::shard_on_device;
use rtvirtio_learn::train::{FEWEST, TrainSettings};
use rtvirtio_model::Profile;
use rtvirtio_workflow::profile::{Access, few_points_of};
use rtvirtio_workflow::{Error, Progress as _, is_there, model_choice};
use serde::Serialize;

use crate::args::{ProfileArgs, ProfileMergeArgs, ShardArg};

/// Part of a sweep that this host measures.
pub struct Part {
    shard: Shard,
    kind: DeviceKind,
    out: PathBuf,
}

impl Part {
    /// Reads the options and the device's kind, before anything is measured.
    pub fn from_args(shard: ShardArg, args: &ProfileArgs, stack: &Stack) -> anyhow::Result<Self> {
        let shard = match shard {
            ShardArg::Given(shard) => shard,
            ShardArg::Slurm => {
                Shard::of_slurm(&|name| std::env::var(name).ok()).map_err(|why| anyhow::anyhow!(why))?
            }
        };
        let kind = DeviceKind::read(&Root::default(), &stack.device, args.kind.as_deref())?;
        let out = args.out.clone().context("--shard needs --out FILE for the share")?;
        Ok(Self { shard, kind, out })
    }

    /// Measures the part's runs and saves the share.
    pub fn measure(
        self,
        device: &str,
        profile: &Profile,
        time: Duration,
        global: &Global,
        ui: &Ui,
    ) -> anyhow::Result<()> {
        let runs = shard_on_device(device, profile, (self.shard, time), &generated(), &global.dirs(), ui)?;
        let share = Share::new(self.kind, self.shard, profile, &runs);
        write_result(&self.out, &serde_json::to_vec(&share)?, global)?;
        ui.step(&format!(
            "part {} of {} runs: saved {}; `rtvirtio profile merge` takes it with the others",
            self.shard,
            runs.len(),
            self.out.display()
        ));
        Ok(())
    }
}

/// `rtvirtio profile merge` as JSON.
#[derive(Serialize)]
struct MergeReport<'a> {
    kind: &'a DeviceKind,
    file: PathBuf,
    shares: usize,
    runs: usize,
    conditions: usize,
    /// Shards of the sweep that no share has.
    missing: &'a [Shard],
    model: Option<PathBuf>,
    written: bool,
}

pub fn merge(args: &ProfileMergeArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let load = |path: &PathBuf| Share::load(path).map(|share| (path.clone(), share));
    let shares: Vec<_> = args.files.iter().map(load).collect::<Result<_, _>>().map_err(Error::from)?;
    let library = Library::new(&args.library);
    if let (false, Some((_, first))) = (args.replace, shares.first()) {
        library.refuse_existing(&first.kind).map_err(Error::from)?;
    }
    let all = merged(&shares, &TrainSettings::default(), &generated()).map_err(Error::from)?;
    let kind = &all.entry.kind;
    if !args.dry_run {
        std::fs::create_dir_all(&args.library)
            .with_context(|| format!("cannot create {}", args.library.display()))?;
        // Other users with write access to the library could replace an entry's file by a link.
        for file in [library.model_file(kind), library.entry_file(kind)] {
            if std::fs::symlink_metadata(&file).is_ok_and(|there| there.is_symlink()) {
                return Err(std::io::Error::from(Refusal::Link)).context(file.display().to_string());
            }
        }
        if let Some(model) = &all.model {
            write_result(&library.model_file(kind), &serde_json::to_vec(model)?, global)?;
        } else if is_there(&library.model_file(kind))? {
            // The old model belongs to the entry that is replaced.
            std::fs::remove_file(library.model_file(kind))
                .with_context(|| format!("cannot remove {}", library.model_file(kind).display()))?;
        }
        write_result(&library.entry_file(kind), &serde_json::to_vec_pretty(&all.entry)?, global)?;
    }
    let report = MergeReport {
        kind,
        file: library.entry_file(kind),
        shares: all.entry.shares,
        runs: all.entry.runs,
        conditions: all.conditions,
        missing: &all.missing,
        model: all.model.as_ref().map(|_| library.model_file(kind)),
        written: !args.dry_run,
    };
    show(ui, &report, || merge_text(&report, &all))?;
    Ok(ExitCode::SUCCESS)
}

fn merge_text(report: &MergeReport<'_>, all: &Merged) -> String {
    let mut out = format!("{}: {} shares, {} runs", report.kind.model, report.shares, report.runs);
    let best = all.entry.profile.read.iter().map(|p| p.iops.0).fold(0.0, f64::max);
    // Writing to a String cannot fail.
    let _ = writeln!(out, ", {best:.0} reads per second at the best depth");
    if !report.missing.is_empty() {
        let missing: Vec<String> = report.missing.iter().map(Shard::to_string).collect();
        let _ = writeln!(out, "no share of part {}", missing.join(", "));
    }
    match &report.model {
        Some(path) => {
            let _ = writeln!(out, "a model was learned: {}", path.display());
        }
        None => {
            let _ =
                writeln!(out, "no model: {} different runs of {FEWEST} that one needs", report.conditions);
        }
    }
    let done = if report.written { "saved" } else { "not written, as asked:" };
    let _ = writeln!(out, "{done} {}", report.file.display());
    out
}

/// Confirms and saves a device of a kind in the library. `None` when a full measurement is needed,
/// which is reported with the reason.
pub fn known(
    library: &Path,
    args: &ProfileArgs,
    stack: &Stack,
    access: Access,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<Option<ExitCode>> {
    let dirs = &global.dirs();
    let kind = DeviceKind::read(&Root::default(), &stack.device, args.kind.as_deref())?;
    let library = Library::new(library);
    let name = &stack.device.name;
    let Some(entry) = library.find(&kind).map_err(Error::from)? else {
        ui.step(&format!(
            "{name}: no device of its kind ({}) is in the library: it is measured whole",
            kind.key()
        ));
        return Ok(None);
    };
    if access == Access::DestroyData && entry.profile.write.is_empty() {
        ui.step(&format!("{name}: the library has no writes of its kind: it is measured whole"));
        return Ok(None);
    }
    let few = few_points_of(stack, access, dirs, ui)?;
    let answer = confirm(&entry, &few);
    for p in &answer.points {
        ui.step(&format!(
            "{name}: {} at depth {}: {:.0} per second, {:.0} in the library ({:+.1} %), median {:+.1} %, longest {:.2} times",
            p.series,
            p.depth,
            p.iops,
            p.library_iops,
            p.throughput * 100.0,
            p.median * 100.0,
            p.longest
        ));
    }
    if let Some(why) = &answer.differs {
        ui.warn(&format!("{name} is not like the library's devices ({why}): it is measured whole"));
        return Ok(None);
    }
    ui.step(&format!(
        "{name}: confirmed, at most {:.0} % off {} devices of the library",
        answer.largest() * 100.0,
        entry.shares
    ));
    let path = args.out.clone().unwrap_or_else(|| dirs.profile(name));
    save_profile(&answer.profile(&entry, &few), &path, global, ui)?;
    let model = library.model_file(&kind);
    if is_there(&model)? {
        let model = Confirmation::model(&model_choice::read(&model)?, &few);
        save_model(&model, &dirs.model(name), global, ui)?;
    }
    Ok(Some(ExitCode::SUCCESS))
}
