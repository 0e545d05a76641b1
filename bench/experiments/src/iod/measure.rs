//! Runs of the flood, of windows, and of the cost of a request.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::window::{WINDOW_SCHEMES, WindowRun};
use super::{
    Cost, DEPTHS, FIFO, FLOOD_SCHEMES, FloodScheme, IodData, PROTECTED, as_run, flood_config, flood_streams,
    part_of, simulated, socket,
};
use anyhow::{Context as _, bail};
use clap::Args;
use rtvirtio_domain_client::load::{Plan, Stream, run as run_load};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_domain_protocol::status::{DeviceStatus, Regulators};
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_measure::{HostFacts, Run};
use rtvirtio_spec::LabKind;
use rtvirtio_testbed::RamDisk;
use rtvirtio_testbed::twin::{Access, mean_service};
use rtvirtio_units::{Bytes, Nanos};

use crate::backend::{Backend, PEER};
use crate::interleave::{Counter, interleaved};
use crate::saved::Saved as _;
use rtvirtio_harness::test_bed::TestBed;
use rtvirtio_testbed::LabHost;
use rtvirtio_workflow::domain::client;
use rtvirtio_workflow::{Progress, generated};

/// Size of the device in memory.
const RAM: Bytes = Bytes(512 << 20);
/// Longest run of one window.
const WINDOW_RUN: Duration = Duration::from_secs(5);
/// From the start of a load to its first counted request.
const WARM_UP: Duration = Duration::from_secs(1);

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct IodOptions {
    /// Emulated device for the flood.
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// Length of each run.
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Leave out the comparison with qemu-storage-daemon, and the regulator.
    #[arg(long)]
    pub no_peer: bool,
}

/// Measures the flood, the windows, the cost of a request and the simulation.
///
/// # Errors
/// A device that cannot be made, requests that fail, and cancellation.
pub fn measure(options: &IodOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<IodData> {
    let length = Duration::from_nanos(options.length.0);
    let dir = tempfile::Builder::new().prefix("rtvirtio-iod-").tempdir()?;
    let Some(twin) = options.device.strip_prefix("twin:") else {
        bail!("{}: the flood is played on an emulated device, `twin:NAME`", options.device);
    };
    let read = mean_service(&rtvirtio_files::load_twin(twin)?, Access::Read, 4_096);
    let (mut rounds, mut path) = (Vec::new(), Vec::new());
    let bed = TestBed::make(&options.device, 1, LabKind::Process, labs, progress)?;
    let facts = bed.facts();
    let (device, size) = bed.without_elevator()?;
    let one = |scheme: &FloodScheme, length: Duration, round: usize| {
        let config = flood_config(scheme, &device, size, read, dir.path());
        flood(scheme, &config, dir.path(), size, length, round as u64)
    };
    let mut counter =
        Counter::new(progress, "a flood next to declared rates", options.repeat * FLOOD_SCHEMES.len());
    for round in 0..options.repeat {
        let run = |scheme: &FloodScheme| Ok(one(scheme, length, round)?.0);
        rounds.push(interleaved(&FLOOD_SCHEMES, round, &mut counter, progress, run)?);
        let config = flood_config(&FLOOD_SCHEMES[0], &device, size, read, dir.path());
        path.push(alone(&config, dir.path(), size, length, round as u64)?);
    }
    drop(counter);
    let mut counter =
        Counter::new(progress, "a flood under windows of all sizes", options.repeat * WINDOW_SCHEMES.len());
    let mut windows = Vec::new();
    for round in 0..options.repeat {
        let run = |scheme: &FloodScheme| {
            let (run, window) = one(scheme, length.min(WINDOW_RUN), round)?;
            Ok(WindowRun::from_run(&run, window))
        };
        windows.push(interleaved(&WINDOW_SCHEMES, round, &mut counter, progress, run)?);
    }
    drop(counter);
    bed.remove()?;
    progress.step("the scheduler without a machine");
    let simulated = Some(simulated::measure(length)?);
    let (pairs, many, late) =
        if options.no_peer { (Vec::new(), Vec::new(), None) } else { costs(options, dir.path(), progress)? };
    Ok(IodData {
        schema: IodData::SCHEMA.to_owned(),
        host: HostFacts { vmm: "none: a frontend without a VM".to_owned(), ..facts },
        command: format!(
            "rtvirtio-bench iod {} --for {} --repeat {}",
            options.device, options.length, options.repeat
        ),
        generated: generated(),
        rounds,
        pairs,
        many,
        late,
        read,
        simulated,
        path,
        windows,
    })
}

/// Median and longest latency of single requests of the first VM without other load, ns.
fn alone(config: &str, dir: &Path, size: u64, length: Duration, seed: u64) -> anyhow::Result<(u64, u64)> {
    let domain = Backend::start_domain(dir, config)?;
    let mut clients = [Client::connect(&socket(dir, 0), Options::default())?];
    let stream = Stream::reads("alone", 1, part_of(size));
    let stream_results =
        run_load(&mut clients, &[stream], &Plan { warm_up: WARM_UP, length, seed, spin: false })?;
    drop(domain);
    Ok(stream_results.first().map_or((0, 0), |g| (g.percentile(50.0).0, g.max().0)))
}

/// Runs a scheme; returns the results, and the device's window at the end.
fn flood(
    scheme: &FloodScheme,
    config: &str,
    dir: &Path,
    size: u64,
    length: Duration,
    seed: u64,
) -> anyhow::Result<(Run, u64)> {
    let domain = Backend::start_domain(dir, config)?;
    let mut clients = Vec::new();
    for vm in 0..=PROTECTED {
        clients.push(Client::connect(&socket(dir, vm), Options::default())?);
    }
    let streams = flood_streams(scheme.flood, part_of(size));
    let plan = Plan { warm_up: WARM_UP, length, seed, spin: false };
    // Above the engine's priority, so that the engine's CPU time does not count as noise.
    let probe = NoiseProbe::start_above(FIFO);
    let results = run_load(&mut clients, &streams, &plan);
    let noise = probe.finish();
    let window = device_status(dir)?.window.context("the domain does not say its window")?;
    drop(clients);
    drop(domain);
    let results = results?;
    if let Some(bad) = results.iter().find(|g| g.errors > 0) {
        bail!("{} of {}'s requests failed: a run with errors is not counted", bad.errors, bad.name);
    }
    Ok((as_run(scheme.name, length.as_secs_f64(), &streams, &results, noise), u64::from(window)))
}

/// Pairs of the I/O domain's and the peer's cost; rates of one busy disk on engines of one and of
/// 64; p99.99 of a regulator's lateness and the number of pieces.
type Costs = (Vec<(Cost, Cost)>, Vec<[f64; 2]>, Option<(u64, u64)>);

/// Cost of a request over a RAM disk, and the lateness of the I/O domain's regulator.
fn costs(options: &IodOptions, dir: &Path, progress: &dyn Progress) -> anyhow::Result<Costs> {
    let ram = RamDisk::new(RAM)?;
    let length = Duration::from_nanos(options.length.0).min(Duration::from_secs(3));
    let peer = Command::new(PEER).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let mut pairs = Vec::new();
    if peer.is_ok_and(|s| s.success()) {
        let mut bar = progress.bar(&format!("cost of a request, with {PEER}'s"), options.repeat as u64);
        for round in 0..options.repeat {
            bar.set(round as u64);
            // The first backend alternates.
            let mut both: [Vec<Cost>; 2] = [Vec::new(), Vec::new()];
            for side in [round % 2, 1 - round % 2] {
                progress.check_cancelled()?;
                let backend = if side == 0 {
                    Backend::start_domain(dir, &plain_config(ram.device(), dir, ""))?
                } else {
                    Backend::start_peer(ram.device(), dir)?
                };
                for (depth, spin) in DEPTHS.into_iter().flat_map(|depth| [(depth, false), (depth, true)]) {
                    both[side].push(cost(&backend, &socket(dir, 0), depth, length, spin)?);
                }
            }
            let [domain, peer] = both;
            pairs.extend(domain.into_iter().zip(peer));
        }
    } else {
        progress.warn(&format!("{PEER} is not installed: no comparison of the cost of a request"));
    }
    let mut many = Vec::new();
    for round in 0..options.repeat {
        progress.check_cancelled()?;
        let mut rates = [0.0; 2];
        for side in [round % 2, 1 - round % 2] {
            rates[side] = busy_one_of([1, 64][side], ram.device(), dir, length)?;
        }
        many.push(rates);
    }
    // A regulator releases 2 000 requests per second one by one, for as long as a run of the flood.
    let capped = plain_config(ram.device(), dir, "read_cap = { requests = \"2000/s\" }\n");
    let domain = Backend::start_domain(dir, &capped)?;
    let seconds = Duration::from_nanos(options.length.0);
    cost(&domain, &socket(dir, 0), 32, seconds, false)?;
    let status = device_status(dir)?;
    drop(domain);
    let Regulators { held, late_p9999_ns, .. } = status.regulators;
    Ok((pairs, many, late_p9999_ns.zip(held)))
}

/// The status of the only device.
fn device_status(dir: &Path) -> anyhow::Result<DeviceStatus> {
    client::ask(&dir.join("control"))?.devices.into_iter().next().context("the domain has no device")
}

pub(crate) fn plain_config(device: &Path, dir: &Path, more: &str) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"ram\"\nwindow = {{ start = 128, least = 128, most = 128 }}\n\
         [[device.disk]]\nname = \"vm0\"\nsocket = {:?}\npath = {:?}\nshared = true\n{more}",
        dir.join("control").display().to_string(),
        socket(dir, 0).display().to_string(),
        device.display().to_string(),
    )
}

/// Requests per second at depth 32 of one disk, next to others that are attached and idle.
fn busy_one_of(disks: usize, device: &Path, dir: &Path, length: Duration) -> anyhow::Result<f64> {
    let mut config = plain_config(device, dir, "");
    for i in 1..disks {
        config.push_str(&format!(
            "[[device.disk]]\nname = \"vm{i}\"\nsocket = {:?}\npath = {:?}\nshared = true\n",
            socket(dir, i).display().to_string(),
            device.display().to_string(),
        ));
    }
    let _domain = Backend::start_domain(dir, &config)?;
    let connect = |i| Client::connect(&socket(dir, i), Options::default());
    let mut clients = (0..disks).map(connect).collect::<Result<Vec<_>, _>>()?;
    let stream = Stream::reads("all", 32, RAM.0);
    // The clients of the others have nothing to do: only the first is driven.
    let results =
        run_load(&mut clients[..1], &[stream], &Plan { warm_up: WARM_UP, length, seed: 1, spin: false })?;
    Ok(results.first().map_or(0.0, |g| g.rate))
}

fn cost(
    backend: &Backend,
    socket: &Path,
    depth: usize,
    length: Duration,
    spin: bool,
) -> anyhow::Result<Cost> {
    let mut clients = [Client::connect(socket, Options::default())?];
    let stream = Stream::reads("all", depth, RAM.0);
    let before = backend.cpu_time()?;
    let begin = Instant::now();
    let stream_results =
        run_load(&mut clients, &[stream], &Plan { warm_up: WARM_UP, length, seed: 1, spin })?;
    let busy = backend.cpu_time()?.saturating_sub(before);
    let errors: u64 = stream_results.iter().map(|g| g.errors).sum();
    if errors > 0 {
        bail!("{errors} requests failed: a run with errors is not counted");
    }
    let all = stream_results.first().map_or(0.0, |g| g.rate) * begin.elapsed().as_secs_f64();
    Ok(Cost {
        depth,
        iops: stream_results.first().map_or(0.0, |g| g.rate),
        p50: stream_results.first().map_or(0.0, |g| g.percentile(50.0).0 as f64),
        cpu: busy.as_nanos() as f64 / all.max(1.0),
        spin,
    })
}
