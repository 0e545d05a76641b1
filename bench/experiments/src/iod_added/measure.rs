//! Runs on the bare device and through the I/O domain, in turn.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use rtvirtio_domain_client::load::{Plan, Stream, StreamResult, run as run_load};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_harness::test_bed::{TestBed, device_name, spec_device};
use rtvirtio_learn::load::{Stream as TaskStream, spec};
use rtvirtio_measure::MeasureError;
use rtvirtio_measure::fio::{Engine, FioOutput, JobFile, JobOptions, LogClock, Region};
use rtvirtio_measure::local::{Control, ensure_fio, run_fio};
use rtvirtio_measure::run::task_measurements;
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_testbed::{LabHost, RamDisk};
use rtvirtio_units::{Bytes, Nanos, Percentile};
use rtvirtio_workflow::{Error, Progress, generated};

use super::{AddedData, DEPTHS, DeviceRounds, MEMORY, Reads, Round, WAYS, Way};
use crate::backend::Backend;
use crate::experiment::{from_one, host_facts};
use crate::interleave::{Counter, interleaved};
use crate::iod::measure::plain_config;
use crate::iod::socket;
use crate::saved::Saved as _;

/// Size of the device in memory.
const RAM: Bytes = Bytes(512 << 20);
/// From the start of a load to its first counted request; shorter runs have as much warm-up as they
/// are long.
const WARM_UP: Duration = Duration::from_secs(1);
/// Time beyond its duration that fio may take.
const GRACE: Duration = Duration::from_secs(60);

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct AddedOptions {
    /// Pairs of runs at each depth, for each kind of client.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = from_one())]
    pub pairs: usize,
    /// Length of each run.
    #[arg(long = "for", value_name = "TIME", default_value = "5s")]
    pub length: Nanos,
    /// A device besides memory, again for each: emulated, or `file:PATH` for a file that is made on
    /// a disk of this machine and removed afterwards.
    #[arg(long = "device", value_name = "twin:NAME")]
    pub devices: Vec<String>,
}

impl AddedOptions {
    /// Refuses devices that cannot be measured, before one is made.
    ///
    /// # Errors
    /// An unknown device, and two of one name.
    pub fn check(&self) -> anyhow::Result<()> {
        for (i, device) in self.devices.iter().enumerate() {
            spec_device(device)?;
            let name = device_name(device);
            ensure!(
                self.devices[..i].iter().all(|other| device_name(other) != name),
                "{device}: the result has another device of the name {name}; measure it with another --out"
            );
        }
        Ok(())
    }

    fn command(&self) -> String {
        let devices: String = self.devices.iter().map(|device| format!(" --device {device}")).collect();
        format!("rtvirtio-bench iod-added --pairs {} --for {}{devices}", self.pairs, self.length)
    }
}

/// Measures memory, then the other devices.
///
/// # Errors
/// No fio, a device or an I/O domain that cannot be made, requests that fail, and cancellation.
pub fn measure(options: &AddedOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<AddedData> {
    options.check()?;
    ensure_fio().map_err(Error::from)?;
    let mut devices = vec![on_memory(options, progress)?];
    for device in &options.devices {
        devices.push(on_test_bed(device, options, labs, progress)?);
    }
    let described: Vec<&str> = devices.iter().map(|d| d.device.as_str()).collect();
    let host = host_facts(("none: a frontend without a VM", "none"), described.join("; "));
    Ok(AddedData {
        schema: AddedData::SCHEMA.to_owned(),
        host,
        command: options.command(),
        generated: generated(),
        devices,
    })
}

fn on_memory(options: &AddedOptions, progress: &dyn Progress) -> anyhow::Result<DeviceRounds> {
    let ram = RamDisk::new(RAM)?;
    let rounds = rounds(MEMORY, (ram.device(), RAM.0), options, progress)?;
    Ok(DeviceRounds::new(MEMORY, format!("RAM disk of {RAM}"), rounds))
}

fn on_test_bed(
    device: &str,
    options: &AddedOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<DeviceRounds> {
    let bed = TestBed::make(device, 1, LabKind::Process, labs, progress)?;
    let description = bed.facts().device;
    let (path, size) = bed.without_elevator()?;
    let name = device_name(device);
    let rounds = rounds(name, (path.as_path(), size), options, progress)?;
    bed.remove()?;
    Ok(DeviceRounds::new(name, description, rounds))
}

/// Rounds on a device of this path and size in bytes.
fn rounds(
    name: &str,
    (device, size): (&Path, u64),
    options: &AddedOptions,
    progress: &dyn Progress,
) -> anyhow::Result<Vec<Round>> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-iod-").tempdir()?;
    let length = Duration::from_nanos(options.length.0);
    let target = Target { device, size, length, dir: dir.path(), progress };
    let total = options.pairs * DEPTHS.len() * WAYS.len();
    let mut counter = Counter::new(progress, &format!("{name}, bare and through the I/O domain"), total);
    let mut rounds = Vec::new();
    for pair in 0..options.pairs {
        for depth in DEPTHS {
            let run = |way: &Way| target.run(*way, depth, pair as u64 + 1);
            let runs = interleaved(&WAYS, rounds.len(), &mut counter, progress, run)?;
            let &[bare, sleeping, polling] = runs.as_slice() else { bail!("a way has no run: a defect") };
            rounds.push(Round { depth, bare, sleeping, polling });
        }
    }
    Ok(rounds)
}

/// Device of the runs, with what they have in common.
struct Target<'a> {
    device: &'a Path,
    /// Bytes from the device's begin that are read.
    size: u64,
    length: Duration,
    /// Directory for sockets, configurations and fio's files.
    dir: &'a Path,
    progress: &'a dyn Progress,
}

impl Target<'_> {
    fn run(&self, way: Way, depth: u32, seed: u64) -> anyhow::Result<Reads> {
        match way {
            Way::Bare => self.bare(depth, seed),
            Way::Through { polling } => self.through(depth, seed, polling),
        }
    }

    fn bare(&self, depth: u32, seed: u64) -> anyhow::Result<Reads> {
        let dir = self.dir.join("fio");
        std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        let job = bare_job((self.device, self.size), (depth, seed), self.length, &dir)?;
        let cancel = self.progress.cancel_flag();
        let mut control = Control { cgroup_procs: &[], cancel, grace: GRACE, on_tick: &mut |_| {} };
        let output = run_fio(&job, &mut control).map_err(Error::from)?;
        of_fio(&job, &output)
    }

    fn through(&self, depth: u32, seed: u64, polling: bool) -> anyhow::Result<Reads> {
        let domain = Backend::start_domain(self.dir, &plain_config(self.device, self.dir, ""))?;
        let mut clients = [Client::connect(&socket(self.dir, 0), Options::default())?];
        let stream = Stream::reads("added", depth as usize, self.size);
        let plan = Plan { warm_up: WARM_UP.min(self.length), length: self.length, seed, spin: polling };
        let before = [thread_cpu_time(), domain.cpu_time()?];
        let begin = Instant::now();
        let results = run_load(&mut clients, &[stream], &plan)?;
        let after = [thread_cpu_time(), domain.cpu_time()?];
        let elapsed = begin.elapsed();
        let busy = [0_usize, 1].map(|i| after[i].saturating_sub(before[i]));
        of_client(results.first().context("the load has no result")?, elapsed, busy)
    }
}

/// fio's job of random reads of 4 KiB from the first `size` bytes of a device, by io_uring with
/// registered buffers and files.
///
/// # Errors
/// A path that a job file cannot hold, and no time to run.
pub fn bare_job(
    (device, size): (&Path, u64),
    (depth, seed): (u32, u64),
    length: Duration,
    dir: &Path,
) -> Result<JobFile, MeasureError> {
    let reads = vec![TaskStream::flood(depth)];
    let vm = spec(&[reads], Device::Path(device.to_owned()), LabKind::Process).vms.remove(0);
    let options = JobOptions {
        target: device.to_owned(),
        region: Some(Region { offset: Bytes(0), size: Bytes(size) }),
        warmup: WARM_UP.min(length),
        runtime: length,
        seed,
        dir: dir.to_owned(),
        io_class: None,
        clock: LogClock::JobStart,
        preload: false,
    };
    Ok(JobFile::new(&vm, options)?.with_engine(Engine::IoUring))
}

/// Values of a run of fio. The CPU time is that of its thread without the warm-up.
fn of_fio(job: &JobFile, output: &FioOutput) -> anyhow::Result<Reads> {
    let measured = task_measurements(job, output, &[])?;
    let task = measured.first().context("fio measured no task")?;
    let result = &task.result;
    ensure!(result.n > 0, "fio completed no request");
    let at = |percentile: f64| task.latencies.at(Percentile(percentile)).min(result.max_ns).0;
    Ok(Reads {
        n: result.n,
        iops: result.achieved_rate.0,
        p50_ns: at(50.0),
        p99_ns: at(99.0),
        p999_ns: at(99.9),
        p9999_ns: at(99.99),
        client_cpu_ns: result.fio_cpus * 1e9 / result.achieved_rate.0.max(1e-9),
        domain_cpu_ns: 0.0,
    })
}

/// Values of a run of the client. `busy` is the CPU time of its thread and of the I/O domain over
/// all of `elapsed`, the warm-up included, which has as many requests in each second as the rest.
fn of_client(result: &StreamResult, elapsed: Duration, busy: [Duration; 2]) -> anyhow::Result<Reads> {
    if result.errors > 0 {
        bail!("{} requests failed: a run with errors is not counted", result.errors);
    }
    ensure!(result.n > 0, "the I/O domain completed no request");
    let requests = (result.rate * elapsed.as_secs_f64()).max(1.0);
    let [client_cpu_ns, domain_cpu_ns] = busy.map(|time| time.as_nanos() as f64 / requests);
    let at = |percentile: f64| result.percentile(percentile).0;
    Ok(Reads {
        n: result.n,
        iops: result.rate,
        p50_ns: at(50.0),
        p99_ns: at(99.0),
        p999_ns: at(99.9),
        p9999_ns: at(99.99),
        client_cpu_ns,
        domain_cpu_ns,
    })
}

/// CPU time of the calling thread, which drives the client.
fn thread_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(depth: u32) -> JobFile {
        let length = Duration::from_secs(5);
        bare_job((Path::new("/dev/loop7"), RAM.0), (depth, 3), length, Path::new("/run/x")).unwrap()
    }

    #[test]
    fn fio_reads_by_a_ring_with_registered_buffers_and_files() {
        let job = job(8);
        let text = job.text();
        for line in [
            "ioengine=io_uring",
            "fixedbufs=1",
            "registerfiles=1",
            "hipri=0",
            "iodepth=8",
            "rw=randread",
            "bs=4096",
            "direct=1",
            "filename=/dev/loop7",
            "offset=0",
            "size=536870912",
            "ramp_time=1000ms",
            "runtime=5000ms",
        ] {
            assert!(text.lines().any(|l| l == line), "no {line}: {text}");
        }
        assert!(job.args().contains(&"--readonly".to_owned()));
        assert!(!job.writes() && job.preload_path().is_none());
    }

    #[test]
    fn cpu_time_of_fio_is_that_of_a_request() {
        let job = job(1);
        let name = &job.sections()[0].name;
        let json = format!(
            r#"{{"jobs":[{{"jobname":"{name}","job_runtime":5000,"usr_cpu":10.0,"sys_cpu":30.0,
            "read":{{"total_ios":100000,"runtime":5000,"lat_ns":{{"max":90000,
            "bins":{{"10000":99500,"20000":480,"80000":20}}}}}},"write":{{"total_ios":0}}}}]}}"#
        );
        let output = FioOutput { json: json.into_bytes(), ..FioOutput::default() };
        let reads = of_fio(&job, &output).unwrap();
        // 0.4 CPUs at 20 000 requests per second.
        assert_eq!((reads.n, reads.iops), (100_000, 20_000.0));
        assert!((reads.client_cpu_ns - 20_000.0).abs() < 1e-6 && reads.domain_cpu_ns == 0.0, "{reads:?}");
        let near = |found: u64, value: u64| found.abs_diff(value) <= value / 500;
        assert!(near(reads.p50_ns, 10_000) && near(reads.p99_ns, 10_000), "{reads:?}");
        assert!(near(reads.p999_ns, 20_000) && near(reads.p9999_ns, 80_000), "{reads:?}");
    }

    #[test]
    fn devices_are_known_and_named_once() {
        let check = |devices: &[&str]| {
            let devices = devices.iter().map(|d| (*d).to_owned()).collect();
            AddedOptions { devices, length: Nanos::from_millis(1), pairs: 1 }.check()
        };
        assert!(check(&[]).is_ok() && check(&["twin:emmc", "file:/var/tmp/x"]).is_ok());
        assert!(check(&["twin:nothing"]).is_err());
        assert!(check(&["file:/var/tmp/x", "file:/var/tmp/y"]).is_err());
    }
}
