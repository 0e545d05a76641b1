//! One fio process of a profile: points one after the other, under one elevator.

use std::fmt::Write as _;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_stats::Latencies;

use super::{Cell, ProfileOptions, watched};
use crate::MeasureError;
use crate::fio::{COMMON, JobStats, escaped, parse_json};
use crate::local::{Control, Load, run_text};
use crate::noise::NoiseProbe;

/// Interval at which fio looks whether a section's `startdelay` is over (`run_threads` in its
/// backend.c); it takes another one to start the section. With slots of whole intervals all
/// sections start equally late.
pub(super) const INTERVAL: Duration = Duration::from_millis(100);
/// Shortest slot: with shorter ones fio would start a section late.
pub(super) const SHORTEST: Duration = Duration::from_millis(200);
/// Time at the start of each point that does not count.
const RAMP: Duration = Duration::from_millis(30);
/// Pause between two points, for requests in flight.
const GAP: Duration = Duration::from_millis(10);

/// Measurement of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// Index of the point.
    pub(super) cell: usize,
    /// Time from its start to the start of the next.
    pub(super) slot: Duration,
}

/// Shortest slot with this much time that counts.
pub(super) fn slot(measured: Duration) -> Duration {
    let intervals = (measured + RAMP + GAP).as_millis().div_ceil(INTERVAL.as_millis());
    (INTERVAL * u32::try_from(intervals).unwrap_or(u32::from(u16::MAX))).max(SHORTEST)
}

pub(super) fn length(sections: &[Section]) -> Duration {
    sections.iter().map(|section| section.slot).sum()
}

/// Job file with these sections, in sequence by `startdelay`. (`stonewall` would do the same, but
/// fio 3.33 then takes a quarter of a second to start each next section.)
pub(super) fn job_text(options: &ProfileOptions, cells: &[Cell], sections: &[Section], seed: u64) -> String {
    let mut s = format!("[global]\n{COMMON}");
    // Cannot fail: writing to a String.
    let _ = writeln!(
        s,
        "filename={}\nsize={}\nramp_time={}ms",
        escaped(&options.device),
        options.size.0,
        RAMP.as_millis(),
    );
    if options.watch {
        s.push_str(&watched::log_options(&options.dir));
    }
    let mut start = Duration::ZERO;
    for (i, section) in sections.iter().enumerate() {
        let cell = &cells[section.cell];
        let _ = write!(
            s,
            "\n[p{i}]\nstartdelay={}ms\nruntime={}ms\n{}bs={}\niodepth={}\nrandseed={}\n",
            start.as_millis(),
            section.slot.saturating_sub(RAMP + GAP).as_millis(),
            cell.series.options(),
            cell.block.0,
            cell.depth,
            seed.wrapping_add(i as u64 + 1),
        );
        start += section.slot;
    }
    s
}

/// Statistics of each section, and its latencies less the host's stalls where these are known.
///
/// # Errors
/// Any of fio; [`MeasureError::Task`] for a point that failed.
pub(super) fn run(
    options: &ProfileOptions,
    cells: &[Cell],
    sections: &[Section],
    seed: u64,
    on_tick: &mut dyn FnMut(Duration),
    cancel: &AtomicBool,
) -> Result<Vec<(JobStats, Option<Latencies>)>, MeasureError> {
    let mut control = Control { cgroup_procs: &[], cancel, grace: Duration::from_secs(30), on_tick };
    let text = job_text(options, cells, sections, seed);
    let logs = if options.watch { watched::log_paths(&options.dir, sections.len()) } else { Vec::new() };
    let load = Load {
        dir: &options.dir,
        text: &text,
        logs: &logs,
        read_only: !sections.iter().any(|section| cells[section.cell].series.writes()),
        environment: &[],
        duration: length(sections),
    };
    let probe = options.watch.then(NoiseProbe::start);
    let output = run_text(&load, &mut control);
    let stalls = probe.and_then(|probe| probe.finish().1);
    let output = output?;
    let stats = parse_json(&output.json)?;
    if stats.len() != sections.len() {
        return Err(MeasureError::Json {
            reason: format!("{} sections for {} points", stats.len(), sections.len()),
        });
    }
    let mut out = Vec::with_capacity(stats.len());
    for (i, (stats, section)) in stats.into_iter().zip(sections).enumerate() {
        let cell = &cells[section.cell];
        if stats.error != 0 {
            let reason = std::io::Error::from_raw_os_error(stats.error).to_string();
            return Err(MeasureError::Task { task: cell.name(), reason });
        }
        let less = match (&stalls, output.logs.get(i).and_then(Option::as_deref)) {
            (Some(stalls), Some(log)) => Some(watched::latencies(&cell.name(), log, stalls)?),
            _ => None,
        };
        out.push((stats, less));
    }
    Ok(out)
}
