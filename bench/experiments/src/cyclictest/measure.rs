//! Runs of all set-ups, round by round.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_cpu::Contract;
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::LabHost;
use rtvirtio_testbed::image::Kernel;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::kernel_release;
use rtvirtio_workflow::{Progress, generated};

use super::load::write_disk;
use super::pinned_guest::PinnedGuest;
use super::{CyclictestData, Setup};
use crate::interleave::{Counter, interleaved};
use crate::report::{read, write};
use crate::saved::Saved as _;
use rtvirtio_harness::cores::{keep_awake, on_one_core};

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct CyclictestOptions {
    /// Length of each run, in whole seconds.
    #[arg(long = "for", value_name = "TIME", default_value = "60s")]
    pub length: Nanos,
    /// Runs of each set-up, interleaved.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Append the runs to the existing result, which must be of the same host and contract.
    #[arg(long, conflicts_with = "report_only")]
    pub add: bool,
    /// Set-ups to measure, such as guest,aio-lowered [default: all].
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub setups: Vec<Setup>,
    /// Also with Debian's PREEMPT_RT kernel in the guest.
    #[arg(long)]
    pub preempt_rt: bool,
    /// Budget of the VM in each period, for the set-ups with priorities.
    #[arg(long, value_name = "TIME", default_value = "1800us")]
    pub budget: Nanos,
    /// The period.
    #[arg(long, value_name = "TIME", default_value = "2ms")]
    pub period: Nanos,
    /// Directory for the guest's disk, a file of 256 MiB: a file system on a disk, not in memory.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub disk_dir: PathBuf,
    /// Keep idle CPUs from sleeping, as on a real-time host.
    #[arg(long)]
    pub awake: bool,
}

/// Measures all set-ups. The result is written to `path` after each round, so that Ctrl-C loses at
/// most one round.
///
/// # Errors
/// A length or contract out of range, a result that does not fit with `add`, a guest that does not
/// boot, and cancellation.
pub fn measure(
    options: &CyclictestOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let length = Duration::from_nanos(options.length.0);
    if length < Duration::from_secs(1) {
        bail!("--for {}: cyclictest counts whole seconds, at least one", options.length);
    }
    let contract = Contract::new(options.budget, options.period).with_context(|| {
        format!(
            "--budget {} --period {}: at least 1us, and no more than the period",
            options.budget, options.period
        )
    })?;
    let before: Option<CyclictestData> = if options.add { Some(read(path)?) } else { None };
    let contracts = on_one_core(labs, progress)?;
    let awake = if options.awake { keep_awake(progress) } else { None };
    let begun = |facts: &HostFacts| CyclictestData {
        schema: CyclictestData::SCHEMA.to_owned(),
        host: facts.clone(),
        commands: Vec::new(),
        generated: String::new(),
        awake: awake.is_some(),
        watched: true,
        backend: contracts.backend().to_string(),
        contract: contract.to_string(),
        series: Vec::new(),
    };
    let fits = |new: &CyclictestData| {
        if let Some(why) = before.as_ref().and_then(|old| old.differs(new)) {
            bail!(
                "--add: {} holds runs that cannot be compared with these: {why}; give another --out",
                path.display()
            );
        }
        Ok(())
    };
    // Checked before a guest is booted, as far as none is needed.
    if let Some(old) = &before {
        fits(&begun(&old.host))?;
    }
    // On a disk, not in memory: direct I/O.
    let dir = tempfile::Builder::new().prefix("rtvirtio-cyclictest-").tempdir_in(&options.disk_dir);
    let dir = dir.with_context(|| format!("--disk-dir {}", options.disk_dir.display()))?;
    let disk = dir.path().join("disk");
    write_disk(&disk).with_context(|| format!("cannot write {}", disk.display()))?;
    let kernels: &[Kernel] =
        if options.preempt_rt { &[Kernel::Standard, Kernel::Rt] } else { &[Kernel::Standard] };
    let is_chosen = |s: &Setup| options.setups.is_empty() || options.setups.contains(s);
    let all: Vec<Setup> = Setup::ALL.into_iter().filter(is_chosen).collect();
    let once = all.iter().filter(|s| **s == Setup::Host).count();
    let runs = (kernels.len() * (all.len() - once) + once) * usize::from(options.repeat);
    let mut counter = Counter::new(progress, "cyclictest", runs);
    let mut data = before.clone();
    for (index, kernel) in kernels.iter().enumerate() {
        let mut guest = PinnedGuest::boot(*kernel, &contracts, contract, &disk, labs, progress)?;
        let new = begun(&guest.facts);
        fits(&new)?;
        let data = data.get_or_insert(new);
        if index == 0 {
            data.commands.push(command(options));
        }
        // The host's own floor does not depend on the guest: it is measured once, with the first
        // kernel.
        let setups = all.iter().copied().filter(|s| *s != Setup::Host || index == 0).collect::<Vec<_>>();
        for round in 0..options.repeat {
            let measured = interleaved(&setups, round.into(), &mut counter, progress, |s| {
                guest.measure(*s, length, progress)
            })?;
            for (setup, mut latencies) in setups.iter().zip(measured) {
                latencies.seconds = length.as_secs_f64();
                let kernel = if *setup == Setup::Host { kernel_release() } else { guest.release.clone() };
                data.push(*setup, &kernel, latencies);
            }
            data.generated = generated();
            write(path, data)?;
        }
        guest.stop()?;
    }
    drop(counter);
    progress.step(&format!("wrote {}", path.display()));
    Ok(())
}

/// Command line of these options.
fn command(options: &CyclictestOptions) -> String {
    format!(
        "rtvirtio-bench cyclictest --for {} --repeat {} --budget {} --period {}{}{}{}{}",
        options.length,
        options.repeat,
        options.budget,
        options.period,
        if options.preempt_rt { " --preempt-rt" } else { "" },
        if options.awake { " --awake" } else { "" },
        if options.add { " --add" } else { "" },
        setups_option(&options.setups)
    )
}

/// Option `--setups` of the command line; empty for all set-ups.
fn setups_option(named: &[Setup]) -> String {
    let names: Vec<String> = named.iter().map(Setup::to_string).collect();
    if names.is_empty() { String::new() } else { format!(" --setups {}", names.join(",")) }
}
