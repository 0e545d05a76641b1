//! Start-up time of an application in a guest, under load in the guest and load of another VM: the
//! experiment of Spyridakis and Raho, *On Application Responsiveness and Storage Latency in
//! Virtualized Environments* (section V), on the I/O domain.
//!
//! The host in the paper cannot see which of a guest's requests are urgent. Here the guest's kernel
//! marks them in each request's header, and the I/O domain reads the mark.

mod measure;
mod page;

pub use measure::{StartupOptions, measure};
pub(crate) use measure::{copy, tuning};

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rtvirtio_domain_client::load::Stream;
use rtvirtio_measure::HostFacts;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use rtvirtio_learn::statistic::median;

/// Bytes of each VM's disk.
pub const DISK: u64 = 512 << 20;
/// Requests that the other VM keeps outstanding.
pub const FLOOD_DEPTH: usize = 32;
/// Bytes of a request of the other VM.
pub const FLOOD_BLOCK: u32 = 64 << 10;
/// Sequential readers in the guest; a sequential writer comes on top.
pub const READERS: u64 = 4;
/// Bytes of the part that each reader and the writer cycle through.
const PART: u64 = 48 << 20;
/// Offset of these parts, bytes: the application's file system is before.
pub const LOAD_FROM: u64 = DISK - (READERS + 1) * PART;

/// Mount point of the application's file system in the guest.
pub const MOUNT: &str = "/root";

/// Policy of the I/O domain for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// First come first served, all passed on: as backends without a scheduler do.
    HandOn,
    /// A reservation for all of the VM's requests; the guest's priorities are ignored.
    Reserve,
    /// A reservation for the requests that the guest marks real-time.
    Urgent,
}

/// Policy, load and priority of a start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// Id in results and claims.
    pub name: &'static str,
    /// Description for pages and reports.
    pub what: &'static str,
    /// Policy of the I/O domain.
    pub treatment: Treatment,
    /// Whether there is load in the guest and from the other VM.
    pub load: bool,
    /// Whether the application is started with `ionice -c 1`.
    pub real_time: bool,
    /// Whether the guest's page cache is dropped before; else the application has run before.
    pub cold: bool,
}

const fn scheme(name: &'static str, what: &'static str, treatment: Treatment, load: bool) -> Scheme {
    Scheme { name, what, treatment, load, real_time: matches!(treatment, Treatment::Urgent), cold: true }
}

/// Compared schemes, without load first.
pub const SCHEMES: [Scheme; 6] = [
    scheme("idle", "no load, first come first served", Treatment::HandOn, false),
    scheme("idle_urgent", "no load, as under load with guest priority", Treatment::Urgent, false),
    Scheme {
        cold: false,
        ..scheme("warm", "no load, all in the guest's page cache", Treatment::HandOn, false)
    },
    scheme("fifo", "load, first come first served", Treatment::HandOn, true),
    scheme("reserve", "load, a reservation for the VM without guest priority", Treatment::Reserve, true),
    scheme("urgent", "load, a reservation for what the guest calls real-time", Treatment::Urgent, true),
];

/// Settings of the I/O domain that depend on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Largest piece of requests that are not urgent, where the guest's priority is read.
    pub quantum: Bytes,
    /// Largest piece of urgent requests.
    pub urgent_quantum: Bytes,
    /// Window: pieces at the device.
    pub window: u32,
    /// Cost of a read: base, and for each MiB.
    pub read: (Nanos, Nanos),
    /// Cost of a write: base, and for each MiB.
    pub write: (Nanos, Nanos),
    /// Longest time without progress of the device.
    pub stall: Nanos,
}

/// Paths of the sockets of the guest's disk and the other VM's.
#[must_use]
pub fn socket(dir: &Path, vm: usize) -> PathBuf {
    dir.join(["guest.sock", "flood.sock"][vm])
}

/// Configuration of the device, without policy and window.
pub(crate) fn tuned_device(tuning: &Tuning, dir: &Path) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"bench\"\nfifo = {}\nstall = \"{}ns\"\n\
         cost = {{ read = {{ base = \"{}ns\", per_mib = \"{}ns\" }}, write = {{ base = \"{}ns\", per_mib = \"{}ns\" }} }}\n",
        dir.join("control").display().to_string(),
        crate::iod::FIFO,
        tuning.stall.0,
        tuning.read.0.0,
        tuning.read.1.0,
        tuning.write.0.0,
        tuning.write.1.0,
    )
}

/// Configuration of the I/O domain.
#[must_use]
pub fn config(treatment: Treatment, tuning: &Tuning, device: &Path, dir: &Path) -> String {
    let mut s = tuned_device(tuning, dir);
    s += &match treatment {
        // Requests are passed on whole and at once.
        Treatment::HandOn => "policy = \"fifo\"\nwindow = 64\nquantum = \"1MiB\"\n".to_owned(),
        // The default quantum: smaller pieces have no benefit where all of the VM is under one
        // reservation.
        Treatment::Reserve => format!("policy = \"edf\"\nwindow = {}\n", tuning.window),
        Treatment::Urgent => {
            format!("policy = \"edf\"\nwindow = {}\nquantum = \"{}B\"\n", tuning.window, tuning.quantum.0)
        }
    };
    for vm in 0..2 {
        let _ = write!(
            s,
            "[[device.disk]]\nname = {:?}\nsocket = {:?}\npath = {:?}\noffset = \"{}B\"\nsize = \"{DISK}B\"\nshared = true\n",
            ["guest", "flood"][vm],
            socket(dir, vm).display().to_string(),
            device.display().to_string(),
            vm as u64 * DISK,
        );
        // A start-up is a burst; the unused share is available to others.
        let promise = "{ share = \"80%\", burst = \"400ms\", deadline = \"1s\" }";
        match (vm, treatment) {
            (0, Treatment::Reserve) => s += &format!("reserve = {promise}\n"),
            (0, Treatment::Urgent) => {
                let _ = write!(
                    s,
                    "guest_priority = {{ ceiling = \"real-time\" }}\nurgent = {promise}\nurgent_quantum = \"{}B\"\n",
                    tuning.urgent_quantum.0
                );
            }
            _ => {}
        }
    }
    s
}

/// Load of the other VM.
#[must_use]
pub fn flood() -> Stream {
    Stream { block: FLOOD_BLOCK, ..Stream::reads("flood", FLOOD_DEPTH, DISK) }
}

/// Load in the guest: readers and a writer, each going over a part of the disk in order, bypassing
/// the guest's page cache.
#[must_use]
pub fn guest_load() -> Vec<String> {
    let mut args: Vec<String> =
        ["fio", "--filename=/dev/vda", "--bs=128k", "--direct=1", "--ioengine=psync", "--thread"]
            .map(str::to_owned)
            .to_vec();
    args.extend(["--time_based".to_owned(), "--runtime=1h".to_owned(), format!("--size={PART}")]);
    for i in 0..=READERS {
        let (name, rw) = if i < READERS { ("reader", "read") } else { ("writer", "write") };
        args.extend([
            format!("--name={name}{i}"),
            format!("--rw={rw}"),
            format!("--offset={}", LOAD_FROM + i * PART),
        ]);
    }
    args
}

/// Shell script that starts the application in the guest: `$1` seconds at most, then the program
/// and its arguments. Prints the status, and the guest's uptime before and after.
#[must_use]
pub fn script(scheme: &Scheme) -> String {
    let nice = if scheme.real_time { "ionice -c 1 -n 0 " } else { "" };
    let start = format!("{nice}timeout $limit chroot {MOUNT} \"$@\" >/dev/null");
    let before = if scheme.cold { "echo 3 >/proc/sys/vm/drop_caches" } else { &start };
    format!(
        "limit=$1; shift; {before}; read a x </proc/uptime; {start}; r=$?; read b x </proc/uptime; echo $r $a $b"
    )
}

/// Status and seconds from the output of [`script`].
#[must_use]
pub fn read_script(said: &str) -> Option<(i32, f64)> {
    let mut fields = said.split_whitespace();
    let status = fields.next()?.parse().ok()?;
    let from: f64 = fields.next()?.parse().ok()?;
    let to: f64 = fields.next()?.parse().ok()?;
    Some((status, to - from))
}

/// Measured start-up of the application.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Id of the scheme ([`Scheme::name`]).
    pub scheme: String,
    pub round: usize,
    /// From exec to exit, or the limit, s.
    pub seconds: f64,
    /// Whether the application did not end within the limit.
    pub timed_out: bool,
    /// Requests of the guest that the I/O domain completed meanwhile.
    pub requests: u64,
    /// Bytes of these requests.
    pub bytes: u64,
    /// Pieces of these requests that were dispatched by a reservation.
    pub reserved: u64,
    /// Bytes per second of the other VM meanwhile.
    pub flood: f64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartupData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// The application with its arguments.
    pub app: Vec<String>,
    /// Bytes of the application and all files with it.
    pub app_bytes: u64,
    /// Time limit of a start-up, s.
    pub limit: f64,
    /// Start-ups in the order measured.
    pub starts: Vec<Start>,
}

impl StartupData {
    /// Start-ups of a scheme.
    #[must_use]
    pub fn starts_of(&self, scheme: &str) -> Vec<&Start> {
        self.starts.iter().filter(|s| s.scheme == scheme).collect()
    }

    /// Median seconds of a scheme.
    #[must_use]
    pub fn seconds(&self, scheme: &str) -> f64 {
        median(self.starts_of(scheme).iter().map(|s| s.seconds).collect())
    }
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &StartupData) -> Vec<Claim> {
    let idle = data.seconds("idle").max(1e-9);
    let n = |scheme: &str| data.starts_of(scheme).len();
    let over = |id: &str, what: &str, scheme: &str| {
        Claim::new(id, what, data.seconds(scheme) / idle, "times", n(scheme).min(n("idle")))
    };
    let flood = |scheme: &str| median(data.starts_of(scheme).iter().map(|s| s.flood).collect());
    let mut claims = vec![
        over(
            "iod.startup.over_idle",
            "start-up of an application in a guest under load in the guest and from another VM, real-time by the guest's word, over that without load: medians",
            "urgent",
        )
        .at_most(1.5),
        over(
            "iod.startup.over_idle.reserve",
            "the same with the reservation for the whole VM, the guest's word not read",
            "reserve",
        ),
        over(
            "iod.startup.over_idle.fifo",
            "the same first come first served with all that is asked handed on; what takes longer than the limit counts as the limit",
            "fifo",
        ),
        over("iod.startup.over_idle.idle_urgent", "without load, but as with guest priority: what small pieces cost", "idle_urgent"),
    ];
    for s in &SCHEMES {
        let what = format!("start-up: {}", s.what);
        claims.push(Claim::new(
            format!("iod.startup.seconds.{}", s.name),
            what,
            data.seconds(s.name),
            "s",
            n(s.name),
        ));
    }
    claims.push(Claim::new(
        "iod.startup.flood_kept",
        "what the other VM gets while the application starts with guest priority, of what it gets first come first served",
        flood("urgent") / flood("fifo").max(1.0),
        "share",
        n("urgent"),
    ));
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_configurations_are_such() {
        let tuning = Tuning {
            quantum: Bytes::from_kib(16),
            urgent_quantum: Bytes::from_kib(128),
            window: 1,
            read: (Nanos(600_000), Nanos(59 * MS)),
            write: (Nanos(2 * MS), Nanos(157 * MS)),
            stall: Nanos(120 * MS),
        };
        let parse = |treatment| {
            let text = config(treatment, &tuning, Path::new("/dev/loop0"), Path::new("/run/x"));
            let file = rtvirtio_domain_config::File::parse(Path::new("x"), &text).unwrap();
            file.devices[0].sched()
        };
        let plain = parse(Treatment::HandOn);
        assert_eq!((plain.window.most, plain.quantum, plain.vms[0].priority.read), (64, 1 << 20, false));
        let reserve = parse(Treatment::Reserve);
        assert_eq!((reserve.quantum, reserve.vms[0].urgent_quantum), (64 << 10, None));
        assert!(reserve.vms[0].normal.is_some() && !reserve.vms[0].priority.read);
        let urgent = parse(Treatment::Urgent);
        assert_eq!((urgent.quantum, urgent.vms[0].urgent_quantum), (16 << 10, Some(128 << 10)));
        assert!(urgent.vms[0].urgent.is_some() && urgent.vms[0].priority.read);
        assert!(!urgent.vms[1].priority.read, "the other VM has no priorities");
        assert_eq!(urgent.vms[0].urgent, reserve.vms[0].normal, "the same promise");
    }

    #[test]
    fn the_load_keeps_off_the_application() {
        let load = guest_load();
        let last = format!("--offset={}", DISK - PART);
        assert_eq!(load.iter().filter(|a| a.starts_with("--name=reader")).count(), READERS as usize);
        assert_eq!(load.last(), Some(&last));
        assert!(load.contains(&format!("--offset={LOAD_FROM}")));
    }

    #[test]
    fn the_script_says_what_it_took() {
        assert_eq!(read_script("0 10.50 12.75\n"), Some((0, 2.25)));
        assert_eq!(read_script("sh: no\n"), None);
        let script_of = |name: &str| script(SCHEMES.iter().find(|s| s.name == name).unwrap());
        assert!(script_of("urgent").contains("ionice -c 1") && !script_of("fifo").contains("ionice"));
        assert!(script_of("idle").contains("drop_caches") && !script_of("warm").contains("drop_caches"));
    }

    #[test]
    fn claims_are_ratios_of_medians() {
        let start = |scheme: &str, seconds, flood| Start {
            scheme: scheme.to_owned(),
            round: 0,
            seconds,
            timed_out: false,
            requests: 1,
            bytes: 1,
            reserved: 0,
            flood,
        };
        let host = HostFacts { cpus: 1, ..HostFacts::default() };
        let data = StartupData {
            schema: StartupData::SCHEMA.to_owned(),
            host,
            command: String::new(),
            generated: String::new(),
            app: Vec::new(),
            app_bytes: 0,
            limit: 60.0,
            starts: vec![
                start("idle", 1.0, 0.0),
                start("idle", 2.0, 0.0),
                start("idle", 9.0, 0.0),
                start("urgent", 2.8, 10.0),
                start("urgent", 2.9, 20.0),
                start("urgent", 40.0, 30.0),
                start("fifo", 60.0, 40.0),
            ],
        };
        let claims = claims(&data);
        let of = |id: &str| claims.iter().find(|c| c.id == id).unwrap();
        assert_eq!((of("iod.startup.over_idle").value, of("iod.startup.over_idle").n), (1.45, 3));
        assert!(of("iod.startup.over_idle").met);
        assert_eq!((of("iod.startup.over_idle.fifo").value, of("iod.startup.over_idle.fifo").n), (30.0, 1));
        assert_eq!(of("iod.startup.flood_kept").value, 0.5);
    }
}
