//! The order in which points are measured, and when that ends.
//!
//! Reads and writes under `none`, then BFQ, then `none` again, so that a slow change of the host
//! affects both alike. The ends of each series are measured twice, which shows the deviation of all
//! its points. Then what is not known ([`super::known`]) is measured again, until all is or the
//! time is over.

use std::time::{Duration, Instant};

use rtvirtio_units::Percentile;

use super::known::{samples_wanted, set_errors, tail_is_open, unknown};
use super::process::{self, INTERVAL, SHORTEST, Section, length, slot};
use super::series::Series;
use super::{Cell, Extent, Point, ProfileControl, ProfileOptions};
use crate::MeasureError;
use crate::run::add_bins;

/// Slot of a point with one request in flight whose tail is read, and of later measurements of a
/// rate.
const LONG: Duration = Duration::from_millis(400);
/// Longest slot of a later measurement.
const LONGEST_SLOT: Duration = Duration::from_secs(2);
/// Time that one fio process takes beyond its runs (start, clock calibration, end): 0.4 s measured
/// on two cores with fio 3.33.
const START_COST: Duration = Duration::from_millis(500);
/// The elevators, in the order of their processes.
const ELEVATORS: [&str; 2] = ["none", "bfq"];

/// Sections of the processes that are run in any case.
pub(super) fn first(cells: &[Cell]) -> [Vec<Section>; 3] {
    let section = |cell: usize| {
        let long = cells[cell].depth == 1 && cells[cell].point.tail;
        Section { cell, slot: if long { LONG } else { SHORTEST } }
    };
    let of =
        |elevator: &'static str| (0..cells.len()).filter(move |i| cells[*i].series.elevator() == elevator);
    // A larger request alone is left out: it is the end of a series of two.
    let read = |cell: &Cell| cell.point.tail || cell.series == Series::ReadBfq;
    let ends = |elevator: &'static str| of(elevator).filter(move |i| is_end(cells, *i) && read(&cells[*i]));
    let [none, bfq] = ELEVATORS;
    [
        of(none).map(section).collect(),
        of(bfq).chain(ends(bfq)).map(section).collect(),
        ends(none).map(section).collect(),
    ]
}

/// Whether a point is the first or the last of its series and size.
fn is_end(cells: &[Cell], i: usize) -> bool {
    let other = |cell: Option<&Cell>| {
        cell.is_none_or(|cell| cell.series != cells[i].series || cell.block != cells[i].block)
    };
    other(i.checked_sub(1).and_then(|before| cells.get(before))) || other(cells.get(i + 1))
}

/// Time of [`first`]: the least that a measurement takes.
pub(super) fn first_time(cells: &[Cell]) -> Duration {
    first(cells).iter().filter(|sections| !sections.is_empty()).map(|s| START_COST + length(s)).sum()
}

/// Slot of a later measurement: until the tail is known if it stays as it is, or [`LONG`] for the
/// rate alone.
fn wanted(point: &Point) -> Duration {
    if !tail_is_open(point) {
        return LONG;
    }
    let rate = point.iops.iter().sum::<f64>() / point.iops.len() as f64;
    let more = (samples_wanted(point) - point.latencies.n() as f64).max(0.0) / rate.max(1.0);
    slot(Duration::from_secs_f64(more.min(LONGEST_SLOT.as_secs_f64()))).min(LONGEST_SLOT)
}

/// Longest slot of each of so many points in a later process that takes at most `left`; `None` when
/// no slot of a meaningful length fits.
fn fitting(points: usize, left: Duration) -> Option<Duration> {
    let points = u32::try_from(points).ok().filter(|points| *points > 0)?;
    let intervals = (left.checked_sub(START_COST)? / points).as_millis() / INTERVAL.as_millis();
    Some(INTERVAL * u32::try_from(intervals).ok()?).filter(|slot| *slot >= SHORTEST)
}

/// Measures all points, each at least once, and sets their errors.
///
/// # Errors
/// [`MeasureError::Elevator`]; any error of fio.
pub(super) fn run(
    options: &ProfileOptions,
    control: &mut ProfileControl<'_>,
    cells: &mut [Cell],
) -> Result<(), MeasureError> {
    let mut rounds = Rounds { options, control, cells, started: Instant::now(), processes: 0 };
    for sections in first(rounds.cells) {
        rounds.process(&sections)?;
    }
    while rounds.again()? {}
    Ok(())
}

struct Rounds<'a, 'c> {
    options: &'a ProfileOptions,
    control: &'a mut ProfileControl<'c>,
    cells: &'a mut [Cell],
    started: Instant,
    /// Number of processes so far.
    processes: u64,
}

impl Rounds<'_, '_> {
    /// Measures again what is not known; false when there is nothing, or no time for it.
    fn again(&mut self) -> Result<bool, MeasureError> {
        set_errors(self.cells);
        let all = self.options.all_of_budget;
        let open: Vec<usize> = if all { (0..self.cells.len()).collect() } else { unknown(self.cells) };
        let mut measured = false;
        for elevator in ELEVATORS {
            let of: Vec<usize> =
                open.iter().copied().filter(|i| self.cells[*i].series.elevator() == elevator).collect();
            let left = self.options.budget.saturating_sub(self.started.elapsed());
            let Some(most) = fitting(of.len(), left) else { continue };
            let section = |cell: usize| Section { cell, slot: wanted(&self.cells[cell].point).min(most) };
            let sections: Vec<Section> = of.into_iter().map(section).collect();
            self.process(&sections)?;
            measured = true;
        }
        Ok(measured)
    }

    /// Runs one process; none without sections.
    fn process(&mut self, sections: &[Section]) -> Result<(), MeasureError> {
        let Some(first) = sections.first() else { return Ok(()) };
        let elevator = self.cells[first.cell].series.elevator();
        if self.options.extent != Extent::Gentle {
            (self.control.set_elevator)(elevator)
                .map_err(|e| MeasureError::Elevator { elevator, reason: e.to_string() })?;
        }
        // Other addresses in each process: it has fewer than 256 sections.
        let seed = self.options.seed.wrapping_add(self.processes << 8);
        self.processes += 1;
        let (cells, started, budget) = (&*self.cells, self.started, self.options.budget);
        let progress = &mut *self.control.progress;
        let mut on_tick = |elapsed: Duration| {
            let cell = &cells[running(sections, elapsed)];
            let done = started.elapsed().min(budget);
            let what = format!("{}, {} in flight", cell.series.label(), cell.depth);
            progress(millis(done), millis(budget), &what);
        };
        let cancel = self.control.cancel;
        let stats = process::run(self.options, cells, sections, seed, &mut on_tick, cancel)?;
        for (section, (stats, less)) in sections.iter().zip(&stats) {
            let Cell { series, point, .. } = &mut self.cells[section.cell];
            let direction = if series.writes() { &stats.write } else { &stats.read };
            let max = match less {
                Some(less) => {
                    point.latencies.merge(less);
                    less.at(Percentile(100.0))
                }
                None => {
                    add_bins(&mut point.latencies, direction, None)?;
                    direction.max()
                }
            };
            point.iops.push(direction.iops);
            point.max = point.max.max(max);
        }
        Ok(())
    }
}

/// Point that is measured at this time of a process.
fn running(sections: &[Section], elapsed: Duration) -> usize {
    let mut end = Duration::ZERO;
    let now = sections.iter().find(|section| {
        end += section.slot;
        elapsed < end
    });
    now.or(sections.last()).map_or(0, |section| section.cell)
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use rtvirtio_stats::Latencies;
    use rtvirtio_units::{Bytes, Nanos};

    use super::*;

    fn cells(extent: Extent, bfq: bool, writes: bool) -> Vec<Cell> {
        let series = extent.series(bfq, writes);
        series.iter().flat_map(|s| s.cells(Bytes::from_kib(4), extent)).collect()
    }

    #[test]
    fn the_first_processes_measure_all_points_and_their_ends_twice() {
        let cells = cells(Extent::Whole, true, true);
        assert_eq!(cells.len(), 23);
        let first = first(&cells);
        let elevators = first.each_ref().map(|sections| {
            let mut of: Vec<_> = sections.iter().map(|s| cells[s.cell].series.elevator()).collect();
            of.dedup();
            of
        });
        assert_eq!(elevators, [["none"], ["bfq"], ["none"]], "one elevator in each");
        let times = |i: usize| first.iter().flatten().filter(|s| s.cell == i).count();
        for (i, cell) in cells.iter().enumerate() {
            let large = cell.block != Bytes::from_kib(4);
            let inner = [2, 4, 8, 16].contains(&cell.depth) || large && cell.depth == 1;
            assert_eq!(times(i), if inner { 1 } else { 2 }, "{}", cell.name());
        }
        // fio starts sections at whole intervals.
        let whole = |s: &Section| s.slot >= SHORTEST && s.slot.as_millis() % INTERVAL.as_millis() == 0;
        assert!(first.iter().flatten().all(whole));
    }

    #[test]
    fn the_least_time_is_a_third_of_the_default() {
        let budget = ProfileOptions::new("/dev/x".into(), Bytes(1 << 30), "/x".into()).budget;
        let time = |extent, bfq, writes| first_time(&cells(extent, bfq, writes));
        assert!(time(Extent::Whole, true, true) * 3 < budget);
        assert_eq!(time(Extent::Whole, true, true), Duration::from_millis(9_100));
        assert_eq!(time(Extent::Whole, true, false), Duration::from_millis(5_700));
        assert_eq!(time(Extent::Gentle, true, false), Duration::from_millis(2_400));
        assert!(time(Extent::Whole, false, false) < time(Extent::Whole, true, false));
    }

    #[test]
    fn later_slots_fit_what_is_left() {
        let ms = Duration::from_millis;
        assert_eq!(fitting(0, ms(60_000)), None);
        assert_eq!(fitting(2, ms(2_000)), Some(ms(700)));
        assert_eq!(fitting(2, ms(899)), None);
        assert_eq!(fitting(2, ms(900)), Some(SHORTEST));
        assert_eq!(fitting(1, ms(400)), None);
    }

    #[test]
    fn a_later_slot_is_as_long_as_the_tail_needs() {
        let ms = Duration::from_millis;
        let point = |rate: f64, largest: u64| {
            let mut latencies = Latencies::new();
            latencies.record(Nanos(100_000), 2_000);
            latencies.record(Nanos(largest), 1);
            Point { iops: vec![rate], latencies, max: Nanos(largest), tail: true, error: 0.0 }
        };
        assert_eq!(wanted(&point(1e4, 110_000)), LONG, "only the rate can be open");
        // Some 6 800 samples are wanted, 4 800 more: 0.48 s.
        assert_eq!(wanted(&point(1e4, 500_000)), ms(600));
        assert_eq!(wanted(&point(1e5, 500_000)), SHORTEST);
        assert_eq!(wanted(&point(100.0, 500_000)), LONGEST_SLOT);
        assert_eq!(wanted(&point(0.0, 500_000)), LONGEST_SLOT);
    }

    #[test]
    fn the_point_of_a_moment_is_known() {
        let of = |cell, ms| Section { cell, slot: Duration::from_millis(ms) };
        let sections = [of(7, 200), of(3, 400)];
        let at = |ms| running(&sections, Duration::from_millis(ms));
        assert_eq!((at(0), at(199), at(200), at(599), at(5_000)), (7, 7, 3, 3, 3));
    }
}
