//! The engine: the input is a guest's memory with its rings, and in-flight memory of a previous
//! process. A real engine serves it by io_uring on a real file, with a neighbour that must get
//! every completion, with correct data.
//!
//! Layout of the input: flags, base (2 bytes), queue size; 112 bytes of in-flight memory if a flag
//! is set; the rest is guest memory from address 0 on, with the rings.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rtvirtio_domain_resources::backing::{Backing, BackingConfig};
use rtvirtio_engine::engine::{
    Command, Disk, Engine, EngineConfig, EngineHandle, QueueCommand, QueueId, VmStatus, VringStart,
};
use rtvirtio_engine::inflight::Region;
use rtvirtio_engine::memory::{GuestMem, Memory};
use rtvirtio_sched::{Config, VmConfig, VmId};
use vm_memory::{Bytes, GuestAddress};

/// Bytes of guest memory.
pub const MEMORY: usize = 0x2_0000;
/// Bytes of each disk.
const DISK: u64 = 128 << 10;
/// Addresses of the attacker's available and used rings; the table is at 0. Sixteen descriptors at
/// most.
pub const AVAIL: u64 = 0x100;
pub const USED: u64 = 0x140;
/// Longest wait for a completion.
const PATIENCE: Duration = Duration::from_secs(20);

/// An engine with two VMs: the attacker, driven by the input, and a neighbour.
pub struct House {
    pub handle: EngineHandle,
    attacker: Arc<GuestMem>,
    neighbour: Neighbour,
    _engine: Engine,
    pub dir: tempfile::TempDir,
}

/// A guest's memory.
///
/// # Panics
/// Without memory.
pub fn memory() -> Memory {
    GuestMem::anonymous(&[(GuestAddress(0), MEMORY)]).expect("memory")
}

/// An eventfd.
///
/// # Panics
/// Without descriptors.
pub fn eventfd() -> File {
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    File::from(rustix::event::eventfd(0, flags).expect("an eventfd"))
}

/// The only engine of this process; inputs use it in turn.
pub fn house() -> &'static Mutex<House> {
    static HOUSE: OnceLock<Mutex<House>> = OnceLock::new();
    HOUSE.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("disk");
        let pattern: Vec<u8> = (0..2 * DISK).map(|i| (i >> 9) as u8).collect();
        std::fs::write(&path, pattern).expect("a disk");
        let disks = [0, DISK].map(|offset| {
            let (path, size) = (path.clone(), Some(DISK));
            let config = BackingConfig { path, offset, size, shared: true, ..BackingConfig::default() };
            let backing = Backing::open(&config).expect("a disk");
            Disk { name: offset.to_string(), backing, serial: "fuzz".into(), queues: 2, waits_for_room: true }
        });
        let sched =
            Config { vms: vec![VmConfig { depth: 8, ..VmConfig::default() }; 2], ..Config::default() };
        let config = EngineConfig { name: "fuzz".into(), ..EngineConfig::default() };
        let engine = Engine::start(config, &sched, disks.into()).expect("an engine: io_uring is needed");
        let handle = engine.handle();
        let neighbour = Neighbour::new(&handle);
        let attacker = Arc::new(GuestMem::from_mapped(memory()));
        Mutex::new(House { handle, attacker, neighbour, _engine: engine, dir })
    })
}

/// Runs an input.
///
/// # Panics
/// The engine does not stop the queue, keeps a request of it, or fails its neighbour.
pub fn play(data: &[u8]) {
    let [flags, base @ .., size] = data.first_chunk::<4>().copied().unwrap_or_default();
    let Some(rest) = data.get(4..) else { return };
    let mut house = house().lock().expect("an engine that lives");
    let House { handle, attacker, neighbour, .. } = &mut *house;
    let (inflight, rest) = if flags & 1 != 0 && rest.len() > 112 {
        let (file, layout) = Region::create(1, 16).expect("in-flight memory");
        // Header: features 0, version 1, 16 descriptors; then from the input.
        file.write_all_at(&[1, 0, 16, 0], 8).expect("in-flight memory");
        file.write_all_at(&rest[..4], 12).expect("in-flight memory");
        for (i, d) in rest[4..112].chunks_exact(6).take(16).enumerate() {
            let at = 16 + 16 * i as u64;
            file.write_all_at(&d[..1], at).expect("in-flight memory");
            file.write_all_at(&d[1..3], at + 6).expect("in-flight memory");
            file.write_all_at(&d[3..5], at + 8).expect("in-flight memory");
        }
        let region = Arc::new(Region::open(file, &layout).expect("in-flight memory"));
        (region.queue(0), &rest[112..])
    } else {
        (None, rest)
    };
    let mem = &attacker.mem;
    let rest = &rest[..rest.len().min(MEMORY)];
    mem.write_slice(&vec![0; 0x4000], GuestAddress(0)).expect("memory");
    mem.write_slice(rest, GuestAddress(0)).expect("memory");
    let kick = eventfd();
    let start = VringStart {
        mem: Arc::clone(attacker),
        size: 1 << (size % 5),
        desc: GuestAddress(0),
        avail: GuestAddress(AVAIL),
        used: GuestAddress(USED),
        base: u16::from_le_bytes([base[0], base[1]]),
        event_idx: flags & 2 != 0,
        features: if flags & 4 != 0 { 0 } else { rtvirtio_engine::feature::blk::FLUSH },
        kick: kick.try_clone().expect("a descriptor").into(),
        call: (flags & 8 != 0).then(eventfd),
        inflight,
    };
    let started = handle.ask(|reply| QueueCommand::Start {
        vm: VmId(0),
        queue: QueueId(0),
        start: Box::new(start),
        reply,
    });
    if started.expect("the engine lives").is_ok() {
        if flags & 16 != 0 {
            // Memory changes while the engine reads it.
            let more: u16 = mem.read_obj(GuestAddress(AVAIL + 2)).expect("memory");
            mem.write_obj(more.wrapping_add(u16::from(size >> 5)), GuestAddress(AVAIL + 2)).expect("memory");
            rustix::io::write(&kick, &1u64.to_ne_bytes()).expect("a kick");
        }
        if flags & 32 != 0 {
            neighbour.reads(u64::from(flags));
        }
        if flags & 64 != 0 {
            handle
                .ask(|reply| QueueCommand::Disconnect { vm: VmId(0), reply: Some(reply) })
                .expect("the engine lives");
        } else {
            handle
                .ask(|reply| QueueCommand::Stop { vm: VmId(0), queue: QueueId(0), for_good: true, reply })
                .expect("the engine lives");
        }
    }
    let status = vm_status(handle, VmId(0));
    assert_eq!((status.outstanding, status.queues), (0, 0), "something of the queue is left");
    let status = vm_status(handle, VmId(1));
    neighbour.reads(u64::from(size));
    // The start of its disk, adjacent to the attacker's.
    neighbour.reads(0);
    let faults = status.faults;
    assert_eq!((faults.malformed, faults.errors, faults.broken_queues), (0, 0, 0));
}

/// The counters of a VM.
///
/// # Panics
/// The engine has ended, or has no such VM.
pub fn vm_status(handle: &EngineHandle, vm: VmId) -> VmStatus {
    let status = handle.ask(|reply| Command::VmStatus { vm, reply }).expect("the engine lives");
    *status.expect("a VM in this place")
}

/// A well-behaved guest: one read at a time, on its own disk.
struct Neighbour {
    mem: Arc<GuestMem>,
    kick: File,
    asked: u16,
}

impl Neighbour {
    const HEADER: u64 = 0x1000;
    const DATA: u64 = 0x2000;
    const STATUS: u64 = 0x1100;

    fn new(handle: &EngineHandle) -> Self {
        let mem = Arc::new(GuestMem::from_mapped(memory()));
        let descriptors: [(u64, u32, u16, u16); 3] =
            [(Self::HEADER, 16, 1, 1), (Self::DATA, 4_096, 3, 2), (Self::STATUS, 1, 2, 0)];
        for (i, (addr, len, flags, next)) in descriptors.into_iter().enumerate() {
            let at = GuestAddress(16 * i as u64);
            let mut d = addr.to_le_bytes().to_vec();
            d.extend(len.to_le_bytes());
            d.extend(flags.to_le_bytes());
            d.extend(next.to_le_bytes());
            mem.mem.write_slice(&d, at).expect("memory");
        }
        let kick = eventfd();
        let start = VringStart {
            mem: Arc::clone(&mem),
            size: 4,
            desc: GuestAddress(0),
            avail: GuestAddress(AVAIL),
            used: GuestAddress(USED),
            base: 0,
            event_idx: false,
            features: rtvirtio_engine::feature::blk::FLUSH,
            kick: kick.try_clone().expect("a descriptor").into(),
            call: None,
            inflight: None,
        };
        let start = Box::new(start);
        let started =
            handle.ask(|reply| QueueCommand::Start { vm: VmId(1), queue: QueueId(0), start, reply });
        started.expect("the engine lives").expect("a queue as Linux makes it");
        Self { mem, kick, asked: 0 }
    }

    fn reads(&mut self, seed: u64) {
        let (mem, sector) = (&self.mem.mem, seed * 8 % (DISK / 512 - 8));
        mem.write_obj(0u64, GuestAddress(Self::HEADER)).expect("memory");
        mem.write_obj(sector.to_le(), GuestAddress(Self::HEADER + 8)).expect("memory");
        mem.write_obj(255u8, GuestAddress(Self::STATUS)).expect("memory");
        // Every entry of the ring is head 0.
        self.asked = self.asked.wrapping_add(1);
        fence(Ordering::SeqCst);
        mem.write_obj(self.asked.to_le(), GuestAddress(AVAIL + 2)).expect("memory");
        fence(Ordering::SeqCst);
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("a kick");
        let begin = Instant::now();
        loop {
            let used: u16 = mem.read_obj(GuestAddress(USED + 2)).expect("memory");
            if u16::from_le(used) == self.asked {
                break;
            }
            assert!(begin.elapsed() < PATIENCE, "the neighbour got no answer");
            std::thread::yield_now();
        }
        fence(Ordering::SeqCst);
        let status: u8 = mem.read_obj(GuestAddress(Self::STATUS)).expect("memory");
        let mut got = [0u8; 4_096];
        mem.read_slice(&mut got, GuestAddress(Self::DATA)).expect("memory");
        let right = got.chunks(512).enumerate().all(|(i, s)| {
            let ours = (((DISK >> 9) + sector) as usize + i) as u8;
            s.iter().all(|b| *b == ours)
        });
        assert!(status == 0 && right, "the neighbour got status {status} or somebody else's bytes");
    }
}
