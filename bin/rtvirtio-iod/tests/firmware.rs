//! Firmware as a client: it knows few features, polls, has one request at a time in a small ring,
//! and leaves that ring alive when it starts the operating system.
//!
//! Features, sizes and rings are what SeaBIOS 1.16, OVMF 2022.11, U-Boot 2023.01 and SLOF send.

mod common;

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use common::{Iod, completion, disk, two_disks};
use rtvirtio_domain_client::{BlkRequest, Client, Options};
use rtvirtio_testkit::HANG;

/// What a firmware's driver sends.
#[derive(Clone, Copy, Debug)]
struct Firmware {
    name: &'static str,
    features: u64,
    ring: u16,
    /// Bits in the type of every request.
    kind: u32,
    priority: u32,
    /// Bytes of each read.
    reads: &'static [u32],
}

const VERSION_1: u64 = 1 << 32;

const ALL: [Firmware; 5] = [
    Firmware {
        name: "SeaBIOS",
        features: VERSION_1 | 0x44,
        ring: 128,
        kind: 0,
        priority: 0,
        reads: &[512, 32_256, 32_768],
    },
    Firmware { name: "OVMF", features: 0x640, ring: 128, kind: 0, priority: 0, reads: &[512, 32_768] },
    Firmware { name: "U-Boot", features: 0, ring: 128, kind: 0, priority: 0, reads: &[512, 4_096] },
    Firmware {
        name: "SLOF",
        features: VERSION_1 | 0x40,
        ring: 128,
        kind: 1 << 31,
        priority: 1,
        reads: &[2_048],
    },
    // The smallest ring that has room for a request.
    Firmware { name: "tiny", features: 0, ring: 4, kind: 0, priority: 0, reads: &[512] },
];

fn bytes(sector: u64, len: u32) -> Vec<u8> {
    (0..u64::from(len)).map(|i| (sector * 31 + i / 512 * 31 + i * 7) as u8).collect()
}

impl Firmware {
    fn connect(self, bed: &Bed) -> Client {
        let options =
            Options { size: self.ring, buffer: 32_768, features: self.features, ..Options::default() };
        let mut client = Client::connect(&bed.dir.path().join("a"), options).unwrap();
        client.queues[0].disable_calls();
        client
    }

    /// A request that is polled for.
    fn request(self, client: &mut Client, kind: u32, sector: u64, len: u32, data: &[u8]) -> Vec<u8> {
        let mem = Arc::clone(&client.mem);
        let queue = &mut client.queues[0];
        let ask = BlkRequest { kind: kind | self.kind, priority: self.priority, sector, len };
        // The client takes the direction of data from the type, in which firmware sets a flag.
        let slot = if kind == 0 { queue.push_read(&ask) } else { queue.push_with(&ask, data) };
        let slot = slot.unwrap();
        let at = queue.data(slot);
        queue.kick.write(1).unwrap();
        let done = completion(queue).unwrap_or_else(|| panic!("{}: no answer", self.name));
        assert_eq!((done.slot, done.status), (slot, 0), "{}: {len} bytes", self.name);
        mem.read(at, len as usize)
    }
}

struct Bed {
    dir: tempfile::TempDir,
    iod: Iod,
    file: std::fs::File,
}

impl Bed {
    fn new() -> Self {
        let dir = disk(16);
        let path = dir.path().join("disk");
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let iod = Iod::start(dir.path(), &two_disks(dir.path(), 16, ""));
        Self { dir, iod, file }
    }
}

#[test]
fn firmware_reads_and_writes_by_polling() {
    for firmware in ALL {
        let bed = Bed::new();
        let mut client = firmware.connect(&bed);
        let mut sector = 0;
        for round in 0..20 {
            let len = firmware.reads[round % firmware.reads.len()];
            bed.file.write_all_at(&bytes(sector, len), sector * 512).unwrap();
            bed.file.sync_data().unwrap();
            let got = firmware.request(&mut client, 0, sector, len, &[]);
            assert!(got == bytes(sector, len), "{}: read {round}", firmware.name);
            // No FLUSH was negotiated by most: what is answered is in the file.
            let write = bytes(sector + 5, len);
            firmware.request(&mut client, 1, sector, len, &write);
            let mut there = vec![0; len as usize];
            bed.file.read_exact_at(&mut there, sector * 512).unwrap();
            assert!(there == write, "{}: write {round}", firmware.name);
            sector += u64::from(len / 512);
        }
        // One call at the start, for what a former process may have completed.
        let calls = client.queues[0].call.read().unwrap_or(0);
        assert!(calls <= 1, "{}: {calls} calls that nobody wants", firmware.name);
        let disk = bed.iod.disk("a");
        assert_eq!((&disk["malformed"], &disk["broken"]), (&0.into(), &0.into()), "{}", firmware.name);
        assert!(disk["refused_requests"].as_object().unwrap().values().all(|n| *n == 0), "{disk}");
    }
}

/// The driver of the operating system resets a ring that the firmware left alive, whatever has
/// become of its memory meanwhile.
#[test]
fn a_ring_that_is_left_alive_is_reset_by_the_next_driver() {
    for (firmware, is_overwritten) in ALL.into_iter().flat_map(|f| [(f, false), (f, true)]) {
        if firmware.ring < 128 {
            continue;
        }
        let bed = Bed::new();
        let mut client = firmware.connect(&bed);
        for n in 0..7 {
            firmware.request(&mut client, 1, n * 8, firmware.reads[0], &bytes(n, firmware.reads[0]));
        }
        if is_overwritten {
            // Nobody kicks; an engine that polls the ring may see it all the same.
            client.mem.write(0, &vec![0xa5; 16_384]);
        }
        std::thread::sleep(Duration::from_millis(100));
        let base = client.hand_over(u64::MAX, 64, 4_096).unwrap();
        assert!(is_overwritten || base == 7, "{}: {base}", firmware.name);
        let begin = std::time::Instant::now();
        for n in 0..64_u64 {
            let (status, got) =
                common::request(&mut client, &common::write(n * 8, 4_096), Some(&bytes(n, 4_096)));
            assert_eq!((status, got.len()), (0, 4_096), "{}: write {n}", firmware.name);
            let (status, got) = common::request(&mut client, &common::read(n * 8, 4_096), None);
            assert!(status == 0 && got == bytes(n, 4_096), "{}: read {n}", firmware.name);
        }
        assert!(begin.elapsed() < HANG);
    }
}
