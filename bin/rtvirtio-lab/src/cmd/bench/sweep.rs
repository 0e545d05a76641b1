//! `rtvirtio-lab bench sweep`, and the sweep of `rtvirtio-lab profile`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_console::{Global, Ui, check_writable, generated, need_root};
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_learn::design::MAX_VMS;
use rtvirtio_learn::sweep::{Design, GUESTS, Learning, Sweep};
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_spec::LabKind;
use rtvirtio_workflow::Error;

use super::arguments;
use super::bed::{Bed, device_name, owns};
use crate::args::BenchSweepArgs;

/// Ending of the name of a dataset of runs in QEMU guests.
pub const IN_GUESTS: &str = "-qemu";

/// `rtvirtio-lab bench sweep`.
pub fn run(args: &BenchSweepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let profile = args.profile.as_deref().map(rtvirtio_measure::profile::load).transpose()?;
    // All of them before the first is swept for hours.
    for device in &args.devices {
        let device = arguments::device(device)?;
        profile.as_ref().map_or(Ok(()), |p| owns(&device, p))?;
    }
    check_writable(&args.out.join("runs")).with_context(|| format!("--out {}", args.out.display()))?;
    need_root("bench sweep")?;
    let _lock = global.dirs().lock_vms()?;
    for device in &args.devices {
        let (vms, kind, suffix) = match args.qemu {
            0 => (MAX_VMS + 1, LabKind::Process, ""),
            _ => (GUESTS, LabKind::Qemu, IN_GUESTS),
        };
        let bed = Bed::made(device, vms, kind, global, ui)?;
        let path = args.out.join(format!("{}{suffix}.jsonl", device_name(device)));
        let mut command = format!(
            "rtvirtio-lab bench sweep {device} --points {} --seed {} --for {}",
            args.points, args.seed, args.length
        );
        if args.qemu > 0 {
            command.push_str(" --qemu");
        }
        let swept = sweep(args, &bed, &path, command, profile.clone(), ui);
        bed.remove()?;
        swept?;
    }
    Ok(ExitCode::SUCCESS)
}

fn sweep(
    args: &BenchSweepArgs,
    bed: &Bed<'_>,
    path: &Path,
    command: String,
    profile: Option<Profile>,
    ui: &Ui,
) -> anyhow::Result<()> {
    let runs = bed.runs(path, command, args.length, (profile, None), OtherHost::Refused)?;
    let allowed = bed.allowed(&runs.profile)?;
    let design = Design {
        points: args.points,
        seed: args.seed,
        again: args.again,
        paper: args.paper,
        guests: (args.qemu > 0).then_some(args.qemu),
    };
    Ok(Sweep::new(&bed.device, allowed, runs, ui).design(&design).map_err(Error::from)?)
}

/// Learns a host model on a bed in the given time. The dataset is kept, so that more time later adds
/// to it.
pub fn learn(
    bed: &Bed<'_>,
    profile: &Profile,
    data: &Path,
    time: Duration,
    ui: &Ui,
) -> anyhow::Result<HostModel> {
    let learning = Learning {
        device: &bed.device,
        allowed: bed.allowed(profile)?,
        profile,
        host: bed.facts(),
        data,
        time,
        generated: generated(),
    };
    Ok(rtvirtio_learn::sweep::learn(learning, bed.stage()?, ui).map_err(Error::from)?)
}
