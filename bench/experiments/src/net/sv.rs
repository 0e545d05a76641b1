//! Sampled values (IEC 61850-9-2): a publisher sends a frame each 250 us to a VM, whose client
//! writes it to its disk and answers; alone, and next to floods of its neighbour on both.
//!
//! Network card and disk of both guests are on the I/O domain, whose threads are real-time threads.
//! Times count from the moment at which a frame is due until its answer has arrived: network, CPU,
//! disk, network. So the VM needs a share of each: next to the floods it runs once with its share
//! of network and disk alone, and once with a CPU contract too.

use std::time::Duration;

use anyhow::Context;
use rtvirtio_cpu::{Backend, Contract, Order};
use rtvirtio_measure::HostFacts;
use rtvirtio_measure::flow::{self, FlowLoad, Peer};
use rtvirtio_spec::{Direction, Flow};
use rtvirtio_testbed::image::GuestImage;
use rtvirtio_testbed::qemu::Accel;
use rtvirtio_testbed::{LabHost, RamDisk};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::Named;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::scoped_contracts::{ScopedContracts, VmContract};
use serde::{Deserialize, Serialize};

use super::measure::NetOptions;
use super::probe::{Flood, PEER};
use super::test_bed::{BedOptions, GUESTS, HOST, NetTestBed, NetThread, System, command};
use crate::guest::{facts, program};
use crate::interleave::{Counter, interleaved};
use crate::page::Table;
use rtvirtio_harness::cores::with_backend;

/// Program of the client in the guest.
const CLIENT: &str = "rtvirtio-guestload";
/// Port on which the client answers.
const PORT: u16 = 7_102;
/// Bytes of a frame with eight values.
const FRAME: Bytes = Bytes(140);
/// Size of each guest's disk.
const DISK: Bytes = Bytes(64 << 20);
/// Frames before the measured ones.
const WARM_UP: Duration = Duration::from_secs(1);
/// From the start of the floods to the first frame.
const SETTLE: Duration = Duration::from_millis(500);

/// Default priority of the I/O domain's thread: above the vCPUs of a contract.
const DOMAIN: u8 = 60;
/// Budget of the client's VM on each CPU, and its period.
const CPU: (Nanos, Nanos) = (Nanos::from_micros(1_800), Nanos::from_micros(2_000));

/// Whether the neighbour floods, and whether the client's VM has a CPU contract.
const SITUATIONS: [(bool, bool); 3] = [(false, false), (true, false), (true, true)];

/// Answers and latencies in one situation of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SvRun {
    /// Whether floods run on network and disk.
    pub flooded: bool,
    /// Whether the client's VM has a CPU contract too.
    #[serde(default)]
    pub contract: bool,
    /// Frames that were answered.
    pub n: u64,
    /// Frames without an answer.
    pub lost: u64,
    /// Frames that this host did not send.
    pub unsent: u64,
    /// Median latency, ns.
    pub p50: u64,
    /// 99.9th percentile of latency, ns.
    pub p999: u64,
    /// Longest latency, ns.
    pub max: u64,
    /// 99.99th percentile of this host's lateness in sending, ns.
    pub sent_late: u64,
    /// Frames per second of the flood.
    pub flood: f64,
}

/// Runs of all rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SvData {
    /// Target of the 99.9th percentile, ns.
    pub target_ns: Nanos,
    /// The situations, round by round.
    pub runs: Vec<SvRun>,
}

/// Measures all situations. Returns the host's description for the result file, too.
///
/// # Errors
/// A namespace, a guest or an I/O domain that cannot be made, a CPU contract that the kernel
/// refuses, and cancellation.
pub fn measure_sv(
    options: &NetOptions,
    labs: &LabHost,
    (image, accel): (&GuestImage, Accel),
    progress: &dyn Progress,
) -> anyhow::Result<(SvData, HostFacts)> {
    let disk = RamDisk::new(Bytes(2 * DISK.0))?;
    progress.step("booting two guests, card and disk on the I/O domain");
    let backing = Some((disk.device(), DISK));
    let contracts = with_backend(&[Backend::Hcbs, Backend::RtGroup, Backend::Throttle], labs, progress)?;
    let of_bed = options.bed();
    let thread = NetThread { fifo: of_bed.thread.fifo.or(Some(DOMAIN)), ..of_bed.thread };
    let of_bed = BedOptions { thread, ..of_bed };
    let mut bed = NetTestBed::new(System::Domain, (image, accel), of_bed, backing, progress)?;
    let host = facts(&mut bed.guests[0], accel, "veth, disk in memory".to_owned())?;
    let program = program(CLIENT)?;
    let bytes = std::fs::read(&program).with_context(|| program.display().to_string())?;
    let path = format!("/usr/bin/{CLIENT}");
    bed.guests[0].write_file(&path, &bytes)?;
    command(&mut bed.guests[0], &format!("chmod 755 {path}"))?;
    let client = format!("{CLIENT} sv {PORT} /dev/vda >/run/sv.log 2>&1");
    bed.guests[0].spawn(&["sh", "-c", &client])?;
    let mut counter = Counter::new(progress, "rounds of sampled values", options.rounds * SITUATIONS.len());
    let mut data = SvData { target_ns: options.target, runs: Vec::new() };
    for round in 0..options.rounds {
        let measured = interleaved(&SITUATIONS, round, &mut counter, progress, |(flooded, contract)| {
            contracts.release()?;
            if *contract {
                set_contract(&contracts, &mut bed)?;
            }
            let run = situation(&mut bed, *flooded, options, progress)?;
            Ok(SvRun { contract: *contract, ..run })
        })?;
        data.runs.extend(measured);
    }
    Ok((data, host))
}

/// Gives the client's VM its CPU contract, as `apply` does.
fn set_contract(contracts: &ScopedContracts<'_>, bed: &mut NetTestBed) -> anyhow::Result<()> {
    let client = &mut bed.guests[0];
    let named = Named::ask(&mut client.qmp()?)?;
    let handle = VmHandle { named, ..VmHandle::of_pid(client.handle().process.pid) };
    let contract = Contract::new(CPU.0, CPU.1).context("a budget within its period")?;
    let of_client = VmContract {
        vm: "a",
        handle,
        vcpus_only: false,
        contract,
        order: Order::Rt,
        used: Vec::new(),
        urgency: None,
    };
    Ok(contracts.set(&[of_client])?)
}

fn situation(
    bed: &mut NetTestBed,
    flooded: bool,
    options: &NetOptions,
    progress: &dyn Progress,
) -> anyhow::Result<SvRun> {
    let flood = if flooded { Some(Flood::start(&bed.namespace, HOST, GUESTS[1])?) } else { None };
    if flooded {
        let load = "fio --name=f --filename=/dev/vda --direct=1 --ioengine=libaio --rw=randwrite --bs=64k --iodepth=32 \
                    --time_based --runtime=600 >/run/fio.log 2>&1";
        bed.guests[1].spawn(&["sh", "-c", load])?;
    }
    std::thread::sleep(SETTLE);
    let run = publish(bed, options, progress);
    if flooded {
        command(&mut bed.guests[1], "killall -9 fio; true")?;
    }
    let flood = flood.map_or(0.0, Flood::end);
    Ok(SvRun { flooded, flood, ..run? })
}

/// Sends the frames from the host's end.
fn publish(bed: &NetTestBed, options: &NetOptions, progress: &dyn Progress) -> anyhow::Result<SvRun> {
    let flow = Flow {
        name: "sv".to_owned(),
        nic: 0,
        direction: Direction::Rx,
        frame: FRAME,
        rate: Iops(options.rate.into()),
        burst: 1,
        mark: None,
        target: None,
    };
    let peer = Peer { namespace: None, interface: PEER.to_owned() };
    let echo = (GUESTS[0].ip, PORT).into();
    let load = FlowLoad { vm: "a".to_owned(), flow, peer, echo, mtu: 1_500 };
    let length = Duration::from_secs_f64(f64::from(options.requests) / f64::from(options.rate));
    bed.namespace.enter()?;
    let stop = || progress.is_cancelled();
    let measured = flow::run(std::slice::from_ref(&load), WARM_UP, length, &stop)?;
    let m = measured.first().context("one flow")?;
    let result = m.result(&load);
    let facts = result.flow.context("facts of a flow")?;
    Ok(SvRun {
        flooded: false,
        contract: false,
        n: result.n,
        lost: facts.lost,
        unsent: facts.unsent,
        p50: result.p50_ns.0,
        p999: m.latencies.at(Percentile(99.9)).0,
        max: result.max_ns.0,
        sent_late: facts.sent_late_p9999_ns.0,
        flood: 0.0,
    })
}

impl SvData {
    /// Table of the rounds.
    pub(super) fn table(&self) -> Table {
        let us = |ns: u64| format!("{:.0}", ns as f64 / 1e3);
        let row = |run: &SvRun| {
            let name = match (run.flooded, run.contract) {
                (false, _) => "idle",
                (true, false) => "floods on network and disk",
                (true, true) => "floods, with a CPU contract",
            };
            let numbers = [run.n, run.lost, run.unsent].map(|n| n.to_string());
            let times = [run.p50, run.p999, run.max, run.sent_late].map(us);
            let flood = format!("{:.0}", run.flood / 1e3);
            [name.to_owned()].into_iter().chain(numbers).chain(times).chain([flood]).collect()
        };
        let head = ["", "n", "lost", "unsent", "p50 us", "p99.9 us", "max us", "sent late us", "flood kpps"];
        Table {
            label: format!("sampled values: publisher to client to disk and back, target {}", self.target_ns),
            head: head.map(str::to_owned).to_vec(),
            rows: self.runs.iter().map(row).collect(),
        }
    }
}
