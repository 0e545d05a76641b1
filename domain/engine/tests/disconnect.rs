//! The end of a connection whose requests the device does not complete: a thread that waits for
//! them waits until they are completed, whatever else ends the connection meanwhile.

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, sync_channel};

use rtvirtio_domain_resources::backing::{Backing, BackingConfig};
use rtvirtio_engine::engine::{
    Command, Disk, Engine, EngineConfig, EngineHandle, QueueCommand, QueueId, VringStart,
};
use rtvirtio_engine::memory::GuestMem;
use rtvirtio_sched::{Config, VmConfig, VmId};
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::wait_for;
use vm_memory::{Bytes as _, GuestAddress};

const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const STATUS: u64 = 0x3100;
const DATA: u64 = 0x4000;

/// An engine with one disk, which is this file.
fn engine(file: File) -> Engine {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, [0; 65_536]).unwrap();
    let config = BackingConfig { path, shared: true, ..BackingConfig::default() };
    let mut backing = Backing::open(&config).unwrap();
    backing.file = file;
    let disk = Disk { name: "a".into(), backing, serial: "a".into(), queues: 1, waits_for_room: false };
    let sched = Config { vms: vec![VmConfig { depth: 8, ..VmConfig::default() }], ..Config::default() };
    let config = EngineConfig { name: "test".into(), ..EngineConfig::default() };
    Engine::start(config, &sched, vec![disk]).unwrap()
}

/// A guest's memory with one read of 4 KiB in its available ring.
fn guest_with_a_read() -> GuestMem {
    let mem = GuestMem::anonymous(&[(GuestAddress(0), 1 << 16)]).unwrap();
    let descriptors: [(u64, u32, u16, u16); 3] = [(HEADER, 16, 1, 1), (DATA, 4_096, 3, 2), (STATUS, 1, 2, 0)];
    for (i, (address, len, flags, next)) in (0..).zip(descriptors) {
        let at = 16 * i;
        mem.write_obj(address, GuestAddress(at)).unwrap();
        mem.write_obj(len, GuestAddress(at + 8)).unwrap();
        mem.write_obj(flags, GuestAddress(at + 12)).unwrap();
        mem.write_obj(next, GuestAddress(at + 14)).unwrap();
    }
    mem.write_obj(1_u16, GuestAddress(AVAIL + 2)).unwrap();
    GuestMem::from_mapped(mem)
}

fn outstanding(handle: &EngineHandle) -> usize {
    let status = handle.ask(|reply| Command::VmStatus { vm: VmId(0), reply }).unwrap();
    status.expect("a VM").outstanding
}

#[test]
fn a_second_end_of_a_connection_leaves_the_first_one_waiting() {
    // A read of an empty pipe does not complete until something is written.
    let (from, to) = rustix::pipe::pipe().unwrap();
    let engine = engine(File::from(from));
    let handle = engine.handle();
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let kick = File::from(rustix::event::eventfd(1, flags).unwrap());
    let start = VringStart {
        mem: Arc::new(guest_with_a_read()),
        size: 4,
        desc: GuestAddress(0),
        avail: GuestAddress(AVAIL),
        used: GuestAddress(USED),
        base: 0,
        event_idx: false,
        features: rtvirtio_engine::feature::blk::FLUSH,
        kick: kick.into(),
        call: None,
        inflight: None,
    };
    let (vm, queue) = (VmId(0), QueueId(0));
    let started = handle.ask(|reply| QueueCommand::Start { vm, queue, start: Box::new(start), reply });
    started.unwrap().unwrap();
    wait_for("the read at the device", || outstanding(&handle) == 1);
    let (reply, ended) = sync_channel(1);
    handle.send(QueueCommand::Disconnect { vm, reply: Some(reply) }).unwrap();
    handle.send(QueueCommand::Disconnect { vm, reply: None }).unwrap();
    assert_eq!(outstanding(&handle), 1);
    assert_eq!(ended.try_recv(), Err(TryRecvError::Empty), "the read is in flight");
    File::from(to).write_all(&[7; 4_096]).unwrap();
    ended.recv_timeout(HANG).unwrap();
    assert_eq!(outstanding(&handle), 0);
}
