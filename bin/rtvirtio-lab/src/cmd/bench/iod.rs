//! `rtvirtio-lab bench iod`: the I/O domain beside what is there today.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_bench::iod::{
    Cost, DEPTHS, FIFO, FLOOD_SCHEMES, FloodScheme, IodData, PROTECTED, as_run, claims, flood_config,
    flood_streams, part_of, socket,
};
use rtvirtio_bench::iod_window::{WINDOW_SCHEMES, WindowRun};
use rtvirtio_domain_client::load::{Plan, Stream, run as run_load};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_measure::{HostFacts, Run};
use rtvirtio_report::{BenchSection, BenchTable};
use rtvirtio_spec::LabKind;
use rtvirtio_testbed::RamDisk;
use rtvirtio_testbed::twin::{Access, TwinProfile, mean_service};
use rtvirtio_units::Bytes;

use super::arguments;
use super::backend::{Backend, PEER};
use super::bed::Bed;
use super::found::{Found, read, save};
use super::turns::in_turn;
use super::{iod_crash, iod_startup, page};
use crate::args::BenchIodArgs;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::domain::client as iod;

/// Where the result lies in a directory of results.
const FILE: &str = "iod.json";
/// Size of the device in memory.
const RAM: Bytes = Bytes(512 << 20);
/// Longest run of one window.
const WINDOW_RUN: Duration = Duration::from_secs(5);
/// Before a load is counted.
const WARM_UP: Duration = Duration::from_secs(1);

/// `rtvirtio-lab bench iod`.
pub fn run(args: &BenchIodArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        arguments::device(&args.device)?;
        arguments::result(&args.result)?;
        need_root("bench iod")?;
        save(&path, &measure(args, global, ui)?, ui)?;
    }
    let all = in_dir(&args.result.out)?
        .with_context(|| format!("{} holds no result", args.result.out.display()))?;
    all.tell("rtvirtio: the I/O domain", args.result.html.as_deref(), ui)
}

/// What the results of the I/O domain in a directory show, those with real guests too; `None` when there are none.
pub fn in_dir(dir: &Path) -> anyhow::Result<Option<Found>> {
    type Reader = fn(&Path) -> anyhow::Result<Found>;
    let all: [(&str, Reader); 3] =
        [(FILE, found), (iod_crash::FILE, iod_crash::found), (iod_startup::FILE, iod_startup::found)];
    let there = all.into_iter().map(|(file, read)| (dir.join(file), read)).filter(|(path, _)| path.exists());
    let found = there.map(|(path, read)| read(&path)).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(found.into_iter().reduce(Found::with))
}

/// What a result shows.
fn found(path: &Path) -> anyhow::Result<Found> {
    let data: IodData = read(path)?;
    let claims = claims(&data);
    let lead = vec![format!(
        "{}: {} rounds; {}. Measured by a vhost-user-blk frontend without a VM, from the intended start of each request.",
        data.host.device,
        data.rounds.len(),
        data.command
    )];
    Ok(Found {
        text: page::table(&claims),
        sections: sections(&data),
        // The rest of it has no other place.
        data: vec![serde_json::to_value(&data)?],
        runs: data.rounds.into_iter().flatten().collect(),
        host: data.host,
        claims,
        lead,
    })
}

fn sections(data: &IodData) -> Vec<BenchSection> {
    let windows = (!data.windows.is_empty()).then(|| windows(&data.windows));
    std::iter::once(section(&data.rounds)).chain(windows).collect()
}

fn windows(rounds: &[Vec<WindowRun>]) -> BenchSection {
    let head = ["round", "window", "requests/s", "rates kept", "p50 ms", "p99.99 ms", "at the end"];
    let rows = rounds.iter().enumerate().flat_map(|(round, runs)| {
        runs.iter().zip(&WINDOW_SCHEMES).map(move |(w, scheme)| {
            vec![
                (round + 1).to_string(),
                scheme.name.to_owned(),
                format!("{:.0}", w.iops),
                format!("{:.3}", w.kept),
                format!("{:.2}", w.p50_ms),
                format!("{:.1}", w.p9999_ms),
                w.window.to_string(),
            ]
        })
    });
    BenchSection {
        title: "Windows beside the flood".to_owned(),
        text: vec![
            "Requests per second of all VMs; p50 and p99.99 of the slowest task with a reservation."
                .to_owned(),
        ],
        tables: vec![BenchTable {
            label: "windows".to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: rows.collect(),
        }],
        ..BenchSection::default()
    }
}

fn section(rounds: &[Vec<Run>]) -> BenchSection {
    let head =
        ["round", "scheme", "task", "rate", "p50", "p99", "p99.99", "longest"].map(str::to_owned).to_vec();
    let rows = rounds.iter().enumerate().flat_map(|(i, runs)| {
        runs.iter().flat_map(move |run| {
            run.tasks.iter().map(move |t| {
                vec![
                    (i + 1).to_string(),
                    run.scheme.clone(),
                    format!("{}/{}", t.vm, t.task),
                    format!("{:.0}", t.achieved_rate.0),
                    t.p50_ns.to_string(),
                    t.p99_ns.to_string(),
                    t.p9999_ns.to_string(),
                    t.max_ns.to_string(),
                ]
            })
        })
    });
    BenchSection {
        title: "A flood beside declared rates".to_owned(),
        tables: vec![BenchTable { label: "flood".to_owned(), head, rows: rows.collect() }],
        ..BenchSection::default()
    }
}

fn measure(args: &BenchIodArgs, global: &Global, ui: &Ui) -> anyhow::Result<IodData> {
    let length = Duration::from_nanos(args.length.0);
    let dir = tempfile::Builder::new().prefix("rtvirtio-iod-").tempdir()?;
    let Some(twin) = args.device.strip_prefix("twin:") else {
        bail!("{}: the flood is played on an emulated device, `twin:NAME`", args.device);
    };
    let read = mean_service(&TwinProfile::load(twin)?, Access::Read, 4_096);
    let (mut rounds, mut path) = (Vec::new(), Vec::new());
    let bed = Bed::made(&args.device, 1, LabKind::Process, global, ui)?;
    let facts = bed.facts();
    let (device, size) = bed.plain()?;
    let one = |scheme: &FloodScheme, length: Duration, round: usize| {
        let config = flood_config(scheme, &device, size, read, dir.path());
        flood(scheme, &config, dir.path(), size, length, round as u64)
    };
    let mut bar = ui.bar("a flood beside declared rates", (args.repeat * FLOOD_SCHEMES.len()) as u64);
    for round in 0..args.repeat {
        let run = |scheme: &FloodScheme| Ok(one(scheme, length, round)?.0);
        rounds.push(in_turn(&FLOOD_SCHEMES, round, &mut bar, ui, run)?);
        let config = flood_config(&FLOOD_SCHEMES[0], &device, size, read, dir.path());
        path.push(alone(&config, dir.path(), size, length, round as u64)?);
    }
    drop(bar);
    let mut bar = ui.bar("a flood beside windows of all sizes", (args.repeat * WINDOW_SCHEMES.len()) as u64);
    let mut windows = Vec::new();
    for round in 0..args.repeat {
        let run = |scheme: &FloodScheme| {
            let (run, window) = one(scheme, length.min(WINDOW_RUN), round)?;
            Ok(WindowRun::of(&run, window))
        };
        windows.push(in_turn(&WINDOW_SCHEMES, round, &mut bar, ui, run)?);
    }
    drop(bar);
    bed.remove()?;
    ui.step("the scheduler without a machine");
    let simulated = Some(rtvirtio_bench::iod_sim::measure(length)?);
    let (pairs, late) = if args.no_peer { (Vec::new(), None) } else { costs(args, dir.path(), ui)? };
    Ok(IodData {
        schema: IodData::SCHEMA.to_owned(),
        host: HostFacts { vmm: "none: a frontend without a VM".to_owned(), ..facts },
        command: format!(
            "rtvirtio-lab bench iod {} --for {} --repeat {}",
            args.device, args.length, args.repeat
        ),
        generated: generated(),
        rounds,
        pairs,
        late,
        read,
        simulated,
        path,
        windows,
    })
}

/// One request at a time of the first VM, nothing else: median and longest, ns.
fn alone(config: &str, dir: &Path, size: u64, length: Duration, seed: u64) -> anyhow::Result<(u64, u64)> {
    let domain = Backend::ours(dir, config)?;
    let mut clients = [Client::connect(&socket(dir, 0), Options::default())?];
    let stream = Stream::reads("alone", 1, part_of(size));
    let got = run_load(&mut clients, &[stream], &Plan { warm_up: WARM_UP, length, seed, spin: false })?;
    drop(domain);
    Ok(got.first().map_or((0, 0), |g| (g.percentile(50.0).0, g.max().0)))
}

/// One run, and the device's window at its end.
fn flood(
    scheme: &FloodScheme,
    config: &str,
    dir: &Path,
    size: u64,
    length: Duration,
    seed: u64,
) -> anyhow::Result<(Run, u64)> {
    let domain = Backend::ours(dir, config)?;
    let mut clients = Vec::new();
    for vm in 0..=PROTECTED {
        clients.push(Client::connect(&socket(dir, vm), Options::default())?);
    }
    let streams = flood_streams(scheme.flood, part_of(size));
    let plan = Plan { warm_up: WARM_UP, length, seed, spin: false };
    // Above the engine: what it holds a CPU for is its own.
    let probe = NoiseProbe::start_above(FIFO);
    let got = run_load(&mut clients, &streams, &plan);
    let seen = probe.finish();
    let window = iod::ask(&dir.join("control"))?["devices"][0]["window"].as_u64().unwrap_or(0);
    drop(clients);
    drop(domain);
    let got = got?;
    if let Some(bad) = got.iter().find(|g| g.errors > 0) {
        bail!("{} of {}'s requests were refused; a run with errors says nothing", bad.errors, bad.name);
    }
    Ok((as_run(scheme.name, length.as_secs_f64(), &streams, &got, seen), window))
}

/// Pairs of ours and the peer, and how late a regulator was and how often.
type Costs = (Vec<(Cost, Cost)>, Option<(u64, u64)>);

/// Pairs of ours and the peer over memory, and the p99.99 of how late our regulator was.
fn costs(args: &BenchIodArgs, dir: &Path, ui: &Ui) -> anyhow::Result<Costs> {
    let ram = RamDisk::new(RAM)?;
    let length = Duration::from_nanos(args.length.0).min(Duration::from_secs(3));
    let peer = Command::new(PEER).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let mut pairs = Vec::new();
    if peer.is_ok_and(|s| s.success()) {
        let mut bar = ui.bar(&format!("cost of a request beside {PEER}"), args.repeat as u64);
        for round in 0..args.repeat {
            bar.set(round as u64);
            // Who begins changes from round to round.
            let mut both: [Vec<Cost>; 2] = [Vec::new(), Vec::new()];
            for who in [round % 2, 1 - round % 2] {
                ui.check_cancelled()?;
                let backend = if who == 0 {
                    Backend::ours(dir, &plain_config(ram.device(), dir, ""))?
                } else {
                    Backend::peer(ram.device(), dir)?
                };
                for depth in DEPTHS {
                    both[who].push(cost(&backend, &socket(dir, 0), depth, length)?);
                }
            }
            let [ours, theirs] = both;
            pairs.extend(ours.into_iter().zip(theirs));
        }
    } else {
        ui.warn(&format!("{PEER} is not installed: no comparison of the cost of a request"));
    }
    // 2 000 requests per second let go one by one by a regulator, as many as the flood's runs take.
    let capped = plain_config(ram.device(), dir, "read_cap = { requests = \"2000/s\" }\n");
    let domain = Backend::ours(dir, &capped)?;
    let seconds = Duration::from_nanos(args.length.0);
    cost(&domain, &socket(dir, 0), 32, seconds)?;
    let status = iod::ask(&dir.join("control"))?;
    drop(domain);
    let number = |key: &str| status["devices"][0][key].as_u64();
    Ok((pairs, number("late_p9999_ns").zip(number("held"))))
}

fn plain_config(device: &Path, dir: &Path, more: &str) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"ram\"\nwindow = {{ start = 128, least = 128, most = 128 }}\n\
         [[device.disk]]\nname = \"vm0\"\nsocket = {:?}\npath = {:?}\nshared = true\n{more}",
        dir.join("control").display().to_string(),
        socket(dir, 0).display().to_string(),
        device.display().to_string(),
    )
}

fn cost(backend: &Backend, socket: &Path, depth: usize, length: Duration) -> anyhow::Result<Cost> {
    let mut clients = [Client::connect(socket, Options::default())?];
    let stream = Stream::reads("all", depth, RAM.0);
    let before = backend.cpu()?;
    let begin = Instant::now();
    let got = run_load(&mut clients, &[stream], &Plan { warm_up: WARM_UP, length, seed: 1, spin: false })?;
    let busy = backend.cpu()?.saturating_sub(before);
    let errors: u64 = got.iter().map(|g| g.errors).sum();
    if errors > 0 {
        bail!("{errors} requests were refused; a run with errors says nothing");
    }
    let all = got.first().map_or(0.0, |g| g.rate) * begin.elapsed().as_secs_f64();
    Ok(Cost {
        depth,
        iops: got.first().map_or(0.0, |g| g.rate),
        p50: got.first().map_or(0.0, |g| g.percentile(50.0).0 as f64),
        cpu: busy.as_nanos() as f64 / all.max(1.0),
    })
}
