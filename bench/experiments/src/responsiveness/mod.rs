//! Start-up time of applications in a guest under guest and host load, cell by cell: the matrix of
//! Spyridakis and Raho, *On Application Responsiveness and Storage Latency in Virtualized
//! Environments* (sections IV and V), with two answers to its missing link next to each other.
//!
//! Caches are cold before every start. The guest's are dropped. The host caches no data of the
//! disk: QEMU, the loop device and the loads use direct I/O, and the device's own page cache is
//! flushed after the making of the file system; the bytes that each start reads from the guest's
//! disk are in the result.

mod cell;
mod load;
mod measure;
mod page;
mod script;
mod service;
mod test_bed;
mod video;

pub use cell::{APPS, App, Cell, Choice, GUEST_LOADS, HOST_LOADS, Plane, SCHEDULERS};
pub use measure::{ResponsivenessOptions, measure};
pub use page::{report_of_video, svg};
pub use video::{Frames, Video};

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_stats::Summary;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;

/// File name of videos, with the few start-ups that go before them.
pub const VIDEO_FILE: &str = "responsiveness-video.json";
/// Start-up time under BFQ over the idle one from which on the kernel's plane must help.
const BAD: f64 = 3.0;

/// Smallest rate of the host's readers, bytes/s, of which a share is meaningful.
const LEAST_READERS: f64 = 1e5;

/// Measured start-up of an application.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// From exec to exit, or the limit, s by the guest's clock.
    pub seconds: f64,
    /// Whether the start-up did not end within the limit.
    pub timed_out: bool,
    /// Bytes that the guest read from its disk meanwhile, its load's included.
    pub read: u64,
}

/// The paper's single run: start-ups in a row under one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOfStarts {
    /// Device, application, loads and schedulers.
    pub cell: Cell,
    /// Way in which the VM was served.
    pub plane: Plane,
    pub repetition: usize,
    /// Start-ups in order. After a start over the limit the others are skipped, as in the paper.
    pub starts: Vec<Start>,
    /// Aggregate throughput before the first start, bytes/s: of the device, and the guest's part.
    pub throughput: [f64; 2],
    /// `throughput` while the application started; `None` without load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meanwhile: Option<[f64; 2]>,
    /// Time for which the kernel's plane favoured the VM, s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub favoured: Option<f64>,
}

impl RunOfStarts {
    /// Whether a start was over the limit.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.starts.iter().any(|s| s.timed_out)
    }

    /// Summary of the starts' durations, s; `None` without starts.
    #[must_use]
    pub fn summary(&self) -> Option<Summary> {
        Summary::from_values(&self.starts.iter().map(|s| s.seconds).collect::<Vec<_>>())
    }
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResponsivenessData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the last part.
    pub command: String,
    /// Date of the last part, and version of the program.
    pub generated: String,
    /// Time limit of a start-up, s.
    pub limit: f64,
    /// Bytes of the applications' file system.
    pub app_bytes: u64,
    /// Runs in the order measured.
    pub runs: Vec<RunOfStarts>,
    /// Two VMs that play a video.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub videos: Vec<Video>,
}

/// Results of a cell under a plane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Summary of all starts of all runs.
    pub all: Summary,
    /// Summary of the runs' means, of which the paper shows the mean.
    pub means: Summary,
    /// Whether a start was over the limit.
    pub failed: bool,
    /// Mean over the runs, as [`RunOfStarts::throughput`].
    pub throughput: [f64; 2],
    /// Mean over the runs, as [`RunOfStarts::meanwhile`].
    pub meanwhile: Option<[f64; 2]>,
}

impl ResponsivenessData {
    /// Results of a cell under a plane; `None` without a start.
    #[must_use]
    pub fn point(&self, cell: &Cell, plane: Plane) -> Option<Point> {
        let runs: Vec<&RunOfStarts> = self
            .runs
            .iter()
            .filter(|r| r.plane == plane && r.cell == *cell && !r.starts.is_empty())
            .collect();
        let starts: Vec<f64> = runs.iter().flat_map(|r| &r.starts).map(|s| s.seconds).collect();
        let means: Vec<f64> = runs.iter().filter_map(|r| Some(r.summary()?.mean)).collect();
        let mean =
            |rates: &[[f64; 2]]| [0, 1].map(|i| rates.iter().map(|r| r[i]).sum::<f64>() / rates.len() as f64);
        let meanwhile: Option<Vec<[f64; 2]>> = runs.iter().map(|r| r.meanwhile).collect();
        Some(Point {
            all: Summary::from_values(&starts)?,
            means: Summary::from_values(&means)?,
            failed: runs.iter().any(|r| r.failed()),
            throughput: mean(&runs.iter().map(|r| r.throughput).collect::<Vec<_>>()),
            meanwhile: meanwhile.map(|rates| mean(&rates)),
        })
    }

    /// Rate of the host's readers during a start under a plane, over their rate during a start
    /// without any plane; `None` without readers, or when either was not measured.
    #[must_use]
    pub fn readers_kept(&self, cell: &Cell, plane: Plane) -> Option<f64> {
        cell.host().filter(|load| load.readers > 0)?;
        let readers =
            |plane: Plane| self.point(cell, plane)?.meanwhile.map(|[all, guest]| (all - guest).max(0.0));
        // Where the readers' rate without a plane is near zero, a share of it is meaningless.
        Some(readers(plane)? / readers(Plane::Default).filter(|rate| *rate > LEAST_READERS)?)
    }

    /// All cells with a run, sorted.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells: Vec<Cell> = self.runs.iter().map(|r| r.cell.clone()).collect();
        cells.sort();
        cells.dedup();
        cells
    }

    /// Mean start-up over that of the same application on the idle device without any plane;
    /// `None` when either was not measured.
    #[must_use]
    pub fn over_idle(&self, cell: &Cell, plane: Plane) -> Option<f64> {
        let idle = self.point(&cell.idle(), Plane::Default)?;
        Some(self.point(cell, plane)?.all.mean / idle.all.mean)
    }

    /// The worst cell of a plane among those that `counts`: cell, factor over idle, starts.
    fn worst(&self, plane: Plane, counts: impl Fn(&Cell) -> bool) -> Option<(Cell, f64, usize)> {
        let ratio = |cell: Cell| {
            let (over, n) = (self.over_idle(&cell, plane)?, self.point(&cell, plane)?.all.n);
            Some((cell, over, n))
        };
        let all = self.cells().into_iter().filter(counts).filter_map(ratio);
        all.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Whether a plane's start-ups of a cell are longer than those without, by more than both
    /// intervals; `None` when either is unknown.
    fn is_worse(&self, cell: &Cell, plane: Plane) -> Option<bool> {
        let (with, without) = (self.point(cell, plane)?.all, self.point(cell, Plane::Default)?.all);
        let known = with.interval.is_finite() && without.interval.is_finite();
        // Without a spread, as of two starts that both took the limit, the clock's 10 ms remain.
        let least = with.interval.max(without.interval).max(0.01);
        known.then_some(with.mean - without.mean > least)
    }
}

/// Claims of the start-ups and videos.
#[must_use]
pub fn claims(data: &ResponsivenessData) -> Vec<Claim> {
    let mut claims = Vec::new();
    let bad = |cell: &Cell| data.over_idle(cell, Plane::Default).is_some_and(|over| over >= BAD);
    for plane in Plane::ALL {
        let counts = |cell: &Cell| plane != Plane::Kernel || bad(cell);
        let Some((cell, over, n)) = data.worst(plane, counts) else { continue };
        let known = |cell: &Cell| counts(cell) && data.over_idle(cell, plane).is_some();
        let cells = data.cells().into_iter().filter(known).count();
        let of = match plane {
            Plane::Default => "without any plane, QEMU and the host's readers in one group",
            Plane::Grouped => "with the VM in a cgroup of its own, weights as they are",
            Plane::Kernel => {
                "with the VM's weight raised while something starts in its guest, in cells where BFQ alone takes at least 3 times idle"
            }
            Plane::Domain => "with the I/O domain and the guest's priority",
        };
        let what = format!(
            "mean start-up over that on the idle device, {of}: the worst of {cells} cells ({}, {}, {}, guest {}, host {}); a start over the limit counts as the limit",
            cell.device,
            cell.app,
            cell.loads(),
            cell.guest_scheduler,
            cell.host_scheduler
        );
        let claim = Claim::new(format!("startup.{plane}.worst_over_idle"), what, over, "times", n);
        claims.push(match plane {
            Plane::Kernel => claim.at_most(2.0),
            Plane::Domain => claim.at_most(1.3),
            Plane::Default | Plane::Grouped => claim,
        });
    }
    let ours = [Plane::Kernel, Plane::Domain];
    let cells = data.cells();
    let compared: Vec<bool> =
        cells.iter().flat_map(|cell| ours.iter().filter_map(|plane| data.is_worse(cell, *plane))).collect();
    if !compared.is_empty() {
        let what = "cells in which the start-up is longer with one of our planes than without, by more than both 95 % intervals";
        let worse = compared.iter().filter(|worse| **worse).count();
        claims.push(
            Claim::new("startup.worse_than_default", what, worse as f64, "cells", compared.len())
                .at_most(0.0),
        );
    }
    for plane in ours {
        let kept: Vec<f64> = cells.iter().filter_map(|cell| data.readers_kept(cell, plane)).collect();
        if kept.is_empty() {
            continue;
        }
        let what = format!(
            "what the host's readers get while the application starts with the plane `{plane}`, over what they get then without any: median of the cells with such readers"
        );
        let (id, n) = (format!("startup.{plane}.readers_kept"), kept.len());
        claims.push(Claim::new(id, what, median(kept), "share", n));
    }
    let frames = |planes: &[Plane]| {
        let of = data.videos.iter().filter(|v| planes.contains(&v.plane)).flat_map(|v| &v.vms);
        of.fold((0, 0), |(late, all), vm| (late + vm.late, all + vm.frames))
    };
    let (late, all) = frames(&ours);
    if all > 0 {
        let what = "late frames of two VMs that each play a video (24 reads of 256 KiB a second, three seconds of buffer) next to readers of the host, \
                    with the VMs' weights raised and with the I/O domain's reservations";
        let n = usize::try_from(all).unwrap_or(usize::MAX);
        claims.push(Claim::new("startup.late_frames", what, late as f64, "frames", n).at_most(0.0));
    }
    let (late, all) = frames(&[Plane::Default]);
    if all > 0 {
        let what = "the same without any plane";
        let n = usize::try_from(all).unwrap_or(usize::MAX);
        claims.push(Claim::new("startup.late_frames.default", what, late as f64, "frames", n));
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    fn cell(guest_load: &str, host_load: &str) -> Cell {
        Cell {
            device: "microsd".to_owned(),
            app: "small".to_owned(),
            guest_load: guest_load.to_owned(),
            host_load: host_load.to_owned(),
            guest_scheduler: "bfq".to_owned(),
            host_scheduler: "bfq".to_owned(),
        }
    }

    fn run(cell: Cell, plane: Plane, seconds: &[f64]) -> RunOfStarts {
        let meanwhile = [if plane == Plane::Default { 9e6 } else { 5e6 }, 1e6];
        let starts = seconds.iter().map(|s| Start { seconds: *s, timed_out: *s >= 60.0, read: 1 }).collect();
        RunOfStarts {
            cell,
            plane,
            repetition: 0,
            starts,
            throughput: [2e6, 1e6],
            meanwhile: Some(meanwhile),
            favoured: None,
        }
    }

    fn data(runs: Vec<RunOfStarts>) -> ResponsivenessData {
        ResponsivenessData {
            schema: ResponsivenessData::SCHEMA.to_owned(),
            host: HostFacts { cpus: 2, ..HostFacts::default() },
            command: String::new(),
            generated: String::new(),
            limit: 60.0,
            app_bytes: 0,
            runs,
            videos: Vec::new(),
        }
    }

    #[test]
    fn claims_are_of_the_worst_cells() {
        let data = data(vec![
            run(cell("none", "none"), Plane::Default, &[1.0, 1.1, 0.9]),
            run(cell("none", "1r"), Plane::Default, &[2.0, 2.1, 1.9]),
            run(cell("none", "1r"), Plane::Kernel, &[2.5, 2.6, 2.4]),
            run(cell("5r-seq", "5r"), Plane::Default, &[60.0]),
            run(cell("5r-seq", "5r"), Plane::Kernel, &[1.8, 1.9, 1.7]),
            run(cell("5r-seq", "5r"), Plane::Domain, &[1.2, 1.25, 1.15]),
        ]);
        let claims = claims(&data);
        let of = |id: &str| claims.iter().find(|c| c.id == id).unwrap();
        let default = of("startup.default.worst_over_idle");
        assert!((default.value - 60.0).abs() < 1e-9 && default.n == 1 && default.at_most.is_none());
        let kernel = of("startup.kernel.worst_over_idle");
        assert!((kernel.value - 1.8).abs() < 1e-9, "only cells that are bad without: {}", kernel.value);
        assert!(kernel.met && kernel.n == 3);
        assert!(of("startup.domain.worst_over_idle").met);
        let kept = of("startup.kernel.readers_kept");
        assert_eq!((kept.value, kept.n), (0.5, 2));
        let worse = of("startup.worse_than_default");
        // A single start has no interval, so that cell is not compared.
        assert_eq!((worse.value, worse.n, worse.met), (1.0, 1, false));
        assert!(
            claims.iter().all(|c| c.id != "startup.grouped.worst_over_idle"),
            "nothing measured, no claim"
        );
    }

    #[test]
    fn runs_of_a_cell_are_one_point() {
        let all = data(vec![
            run(cell("none", "none"), Plane::Default, &[1.0, 3.0]),
            run(cell("none", "none"), Plane::Default, &[2.0, 4.0]),
        ]);
        let point = all.point(&cell("none", "none"), Plane::Default).unwrap();
        assert_eq!((point.all.n, point.means.n, point.all.mean, point.failed), (4, 2, 2.5, false));
        assert_eq!((point.means.min, point.throughput), (2.0, [2e6, 1e6]));
        assert!(all.point(&cell("none", "none"), Plane::Kernel).is_none());
        assert!(all.over_idle(&cell("none", "1r"), Plane::Default).is_none());
    }
}
