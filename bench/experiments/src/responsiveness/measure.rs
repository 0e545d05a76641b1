//! All cells in random order, the planes of a cell in sequence; a stopped matrix continues.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::LabKind;
use rtvirtio_stats::Random;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_workflow::{Progress, cpus, generated, is_there, kernel_release};

use super::cell::{Cell, Choice, Plane};
use super::test_bed::{DeviceTestBed, RunPlan};
use super::{ResponsivenessData, RunOfStarts};
use crate::experiment::host_facts;
use crate::iod_startup::Tuning;
use crate::report::{read, write};
use crate::saved::Saved as _;
use rtvirtio_harness::test_bed::{TestBed, device_name, spec_device};

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct ResponsivenessOptions {
    /// Devices, `twin:NAME` or `file:PATH`.
    pub devices: Vec<String>,
    /// Cells and planes to measure.
    pub choice: Choice,
    /// Start-ups in a row.
    pub starts: usize,
    /// Repetitions of each run.
    pub repeat: usize,
    /// Time limit of a start-up.
    pub limit: Nanos,
    /// From the start of the load to the first start-up.
    pub settle: Nanos,
    /// Under the I/O domain: largest pieces that are not urgent, urgent ones, pieces at the device.
    pub pieces: (Bytes, Bytes, u32),
    /// Length of a video in two VMs under each plane next to each host load, in s; 0 without.
    pub video: u64,
    /// Command line for the result.
    pub command: String,
}

impl ResponsivenessOptions {
    /// Refuses options that cannot be measured, before a device is made.
    ///
    /// # Errors
    /// An unknown device, application, load or scheduler.
    pub fn check(&self) -> anyhow::Result<()> {
        self.choice.check()?;
        ensure!(self.starts > 0 && self.repeat > 0, "no start-up is asked for: --starts and --repeat from 1");
        ensure!(self.limit.0 > 0, "--limit: a start-up takes some time");
        for device in &self.devices {
            spec_device(device)?;
        }
        Ok(())
    }
}

/// Groups of a test bed: two VMs, and the host's readers next to both.
const VMS: usize = 3;

/// A run that is to be made.
type Wanted = (Cell, Plane, usize);

/// Measures all cells that the file lacks. The file is written after each run.
///
/// # Errors
/// A device that cannot be made, a file of another host or limit, and cancellation.
pub fn measure(
    options: &ResponsivenessOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let _lock = labs.dirs.lock_vms()?;
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut data = begin(options, path)?;
    let wanted: Vec<(&String, Vec<Wanted>)> =
        options.devices.iter().map(|device| (device, wanted(options, device, &data.runs))).collect();
    let total: usize = wanted.iter().map(|(_, runs)| runs.len()).sum();
    progress.step(&format!(
        "{total} runs of {} start-ups to be made, {} are there",
        options.starts,
        data.runs.len()
    ));
    let begin = Instant::now();
    let mut bar = progress.bar("runs of start-ups", total as u64);
    let mut done = 0;
    for (device, runs) in wanted.into_iter().filter(|(_, runs)| !runs.is_empty()) {
        let bed = TestBed::make(device, VMS, LabKind::Process, labs, progress)?;
        let dir = tempfile::Builder::new().prefix("rtvirtio-responsiveness-").tempdir()?;
        let measured = measure_on(
            &bed,
            device,
            options,
            dir.path(),
            labs,
            progress,
            &mut |run| {
                if let Some((facts, app_bytes)) = run.1 {
                    data.host = HostFacts { device: String::new(), ..facts };
                    data.app_bytes = app_bytes;
                }
                data.runs.push(run.0);
                data.generated = generated();
                data.command.clone_from(&options.command);
                write(path, &data)?;
                done += 1;
                bar.set(done as u64);
                let left = begin.elapsed().mul_f64((total - done) as f64 / done as f64);
                progress.step(&format!("{done} of {total} runs, about {} left", spoken(left)));
                Ok(())
            },
            runs,
        );
        bed.remove()?;
        measured?;
    }
    drop(bar);
    if options.video > 0 {
        videos(options, &mut data, path, labs, progress)?;
    }
    Ok(())
}

/// Plays in two VMs on each device, under each plane and next to each host load without a result.
fn videos(
    options: &ResponsivenessOptions,
    data: &mut ResponsivenessData,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    for device in &options.devices {
        let lacking = lacking_videos(data, device_name(device), &options.choice);
        if lacking.is_empty() {
            continue;
        }
        let bed = TestBed::make(device, VMS, LabKind::Process, labs, progress)?;
        let dir = tempfile::Builder::new().prefix("rtvirtio-video-").tempdir()?;
        let tuning = tuning(&bed, device, options, progress)?;
        let mut save = |video| {
            data.videos.push(video);
            data.generated = generated();
            data.command.clone_from(&options.command);
            write(path, data)
        };
        let measured = super::video::measure(
            &bed,
            tuning.as_ref(),
            &lacking,
            options.video,
            dir.path(),
            labs,
            progress,
            &mut save,
        );
        bed.remove()?;
        measured?;
    }
    Ok(())
}

/// Host loads without a result, by plane.
fn lacking_videos(data: &ResponsivenessData, device: &str, choice: &Choice) -> Vec<(Plane, Vec<String>)> {
    let is_there = |plane: Plane, load: &str| {
        data.videos.iter().any(|v| v.device == device && v.plane == plane && v.host_load == load)
    };
    let of = |plane: Plane| {
        let loads = choice.host_loads.iter().filter(|load| !is_there(plane, load)).cloned();
        (plane, loads.collect::<Vec<_>>())
    };
    choice.planes.iter().map(|plane| of(*plane)).filter(|(_, loads)| !loads.is_empty()).collect()
}

/// Service times and options of the I/O domain: an emulated device's as declared, a real device's
/// as measured. Data on the device are lost.
fn tuning(
    bed: &TestBed<'_>,
    device: &str,
    options: &ResponsivenessOptions,
    progress: &dyn Progress,
) -> anyhow::Result<Option<Tuning>> {
    if !options.choice.planes.contains(&Plane::Domain) {
        return Ok(None);
    }
    Ok(Some(match device.strip_prefix("twin:") {
        Some(twin) => crate::iod_startup::tuning(&rtvirtio_files::load_twin(twin)?, options.pieces),
        None => {
            let (device, _) = bed.without_elevator()?;
            progress.step("measuring service times for the I/O domain");
            super::service::measure(&device, options.pieces)?
        }
    }))
}

/// A run, with the host and the bytes of the applications.
type Made = (RunOfStarts, Option<(HostFacts, u64)>);

#[expect(clippy::too_many_arguments, reason = "what is measured, where, and who hears of it")]
fn measure_on(
    bed: &TestBed<'_>,
    device: &str,
    options: &ResponsivenessOptions,
    dir: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
    on_run: &mut dyn FnMut(Made) -> anyhow::Result<()>,
    runs: Vec<Wanted>,
) -> anyhow::Result<()> {
    let tuning = tuning(bed, device, options, progress)?;
    let mut bed = DeviceTestBed::make(bed, tuning, dir, labs, progress)?;
    let plan = RunPlan {
        starts: options.starts,
        limit: options.limit,
        settle: Duration::from_nanos(options.settle.0),
    };
    for (cell, plane, repetition) in runs {
        progress.check_cancelled()?;
        let run = match bed.run(&cell, plane, repetition, &plan) {
            Ok(run) => run,
            Err(e) => {
                // A cancellation explains the error.
                progress.check_cancelled()?;
                let what = format!("{} on {}, {}, plane {plane}", cell.app, cell.device, cell.loads());
                return Err(e.context(what));
            }
        };
        let facts = bed.facts.clone().map(|facts| (facts, bed.app_bytes()));
        on_run((run, facts))?;
    }
    Ok(())
}

/// The result so far, or an empty one.
fn begin(options: &ResponsivenessOptions, path: &Path) -> anyhow::Result<ResponsivenessData> {
    if !is_there(path)? {
        let host = host_facts(("", ""), "");
        return Ok(ResponsivenessData {
            schema: ResponsivenessData::SCHEMA.to_owned(),
            host,
            command: options.command.clone(),
            generated: generated(),
            limit: options.limit.as_secs_f64(),
            app_bytes: 0,
            runs: Vec::new(),
            videos: Vec::new(),
        });
    }
    let data: ResponsivenessData = read(path)?;
    let (kernel, cpus) = (kernel_release(), cpus());
    ensure!(
        data.host.kernel == kernel && data.host.cpus == cpus,
        "{} is of a host with Linux {} and {} CPUs, this one has {kernel} and {cpus}: name another directory with --out",
        path.display(),
        data.host.kernel,
        data.host.cpus
    );
    ensure!(
        (data.limit - options.limit.as_secs_f64()).abs() < 1e-9,
        "{} is of start-ups up to {} s: name another directory with --out, or --limit {}s",
        path.display(),
        data.limit,
        data.limit
    );
    Ok(data)
}

/// Missing runs of a device: by repetition, cells in random order, the planes of a cell in random
/// order one after the other. The idle cell comes first: all others are compared with it.
fn wanted(options: &ResponsivenessOptions, device: &str, there: &[RunOfStarts]) -> Vec<Wanted> {
    let mut all = Vec::new();
    for repetition in 0..options.repeat {
        let mut random = Random::new(repetition as u64 + 1);
        let mut cells = options.choice.cells(device_name(device));
        random.shuffle(&mut cells);
        cells.sort_by_key(|(cell, _)| *cell != cell.idle());
        for (cell, mut planes) in cells {
            random.shuffle(&mut planes);
            let is_new = |plane: &Plane| {
                !there.iter().any(|r| r.repetition == repetition && r.plane == *plane && r.cell == cell)
            };
            planes.retain(is_new);
            all.extend(planes.into_iter().map(|plane| (cell.clone(), plane, repetition)));
        }
    }
    all
}

fn spoken(time: Duration) -> String {
    match time.as_secs() {
        0..=90 => format!("{} s", time.as_secs()),
        91..=5_400 => format!("{} min", time.as_secs().div_ceil(60)),
        s => format!("{:.1} h", s as f64 / 3_600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::super::video::Video;
    use super::*;

    fn options() -> ResponsivenessOptions {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        ResponsivenessOptions {
            devices: vec!["twin:microsd".to_owned()],
            choice: Choice {
                apps: names(&["small"]),
                guest_loads: names(&["5r-seq", "none"]),
                host_loads: names(&["5r", "none"]),
                guest_schedulers: names(&["bfq"]),
                host_schedulers: names(&["bfq"]),
                planes: Plane::ALL.to_vec(),
            },
            starts: 5,
            repeat: 2,
            limit: Nanos(60_000_000_000),
            settle: Nanos(3_000_000_000),
            pieces: (Bytes::from_kib(16), Bytes::from_kib(128), 1),
            video: 0,
            command: String::new(),
        }
    }

    #[test]
    fn what_is_there_is_not_measured_again() {
        let options = options();
        options.check().unwrap();
        let all = wanted(&options, "twin:microsd", &[]);
        assert_eq!(all.len(), 4 * 4 * 2);
        assert!(all[..4].iter().all(|(cell, ..)| *cell == cell.idle()), "the reference first");
        let made = |(cell, plane, repetition): &Wanted| RunOfStarts {
            cell: cell.clone(),
            plane: *plane,
            repetition: *repetition,
            starts: Vec::new(),
            throughput: [0.0; 2],
            meanwhile: None,
            favoured: None,
        };
        let there: Vec<RunOfStarts> = all.iter().take(10).map(made).collect();
        assert_eq!(wanted(&options, "twin:microsd", &there), all[10..]);
        assert_eq!(wanted(&options, "twin:emmc", &there).len(), all.len(), "another device");
    }

    #[test]
    fn videos_go_on_where_they_were_stopped() {
        let choice = options().choice;
        let mut data: ResponsivenessData = begin(&options(), Path::new("/nonexistent/none.json")).unwrap();
        let lacking = |data: &ResponsivenessData| lacking_videos(data, "emmc", &choice);
        assert_eq!(lacking(&data).len(), 4);
        for (device, host_load) in [("emmc", "5r"), ("microsd", "none")] {
            let (device, host_load) = (device.to_owned(), host_load.to_owned());
            data.videos.push(Video { device, plane: Plane::Kernel, host_load, vms: Vec::new() });
        }
        let left = lacking(&data);
        let of = |plane: Plane| left.iter().find(|(p, _)| *p == plane).unwrap().1.clone();
        assert_eq!(
            (of(Plane::Kernel), of(Plane::Domain)),
            (vec!["none".to_owned()], choice.host_loads.clone())
        );
    }

    #[test]
    fn what_cannot_be_measured_is_refused_first() {
        let refused = |change: &dyn Fn(&mut ResponsivenessOptions)| {
            let mut options = options();
            change(&mut options);
            options.check().unwrap_err().to_string()
        };
        assert!(refused(&|o| o.devices[0] = "twin:none-such".to_owned()).contains("none-such"));
        assert!(refused(&|o| o.starts = 0).contains("--starts"));
        assert_eq!(spoken(Duration::from_secs(45)), "45 s");
        assert_eq!(spoken(Duration::from_secs(601)), "11 min");
        assert_eq!(spoken(Duration::from_secs(7_200)), "2.0 h");
    }
}
