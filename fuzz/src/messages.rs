//! Messages of a QEMU that is none, with descriptors, through the real socket to a real control thread.
//!
//! The input is a row of messages: kind, flags of the header, which descriptors go with it, length of the payload, payload. Kind 255 stands for bytes without a header.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use rtvirtio_iodomain::blk::Limits;
use rtvirtio_iodomain::confine::Confine;
use rtvirtio_iodomain::engine::Command;
use rtvirtio_iodomain::frontend::{DiskInfo, Frontend, Listening};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::engine::house;

/// Messages of one input.
const MOST: usize = 40;

struct Door {
    socket: PathBuf,
    kinds: Vec<File>,
    _frontend: Frontend,
}

/// Descriptors as an attacker may have them.
fn descriptors() -> Vec<File> {
    let memfd = |seal: bool| {
        let file = File::from(
            rustix::fs::memfd_create("rtvirtio-fuzz", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("memory"),
        );
        file.set_len(0x1_0000).expect("memory");
        if seal {
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).expect("a seal");
        }
        file
    };
    let eventfd = || {
        let flags = rustix::event::EventfdFlags::NONBLOCK;
        File::from(rustix::event::eventfd(1, flags).expect("an eventfd"))
    };
    vec![memfd(true), eventfd(), memfd(false), File::open("/dev/zero").expect("/dev/zero")]
}

fn door() -> &'static Mutex<Door> {
    static DOOR: OnceLock<Mutex<Door>> = OnceLock::new();
    DOOR.get_or_init(|| {
        let house = house().lock().expect("an engine that lives");
        let socket = house.dir.path().join("socket");
        let limits = Limits { size: 128 << 10, read_only: false, discard: true };
        let disk = DiskInfo { name: "fuzz".into(), vm: 0, limits, block: 512, queues: 2, hugepages: false };
        let listening = Listening::start(&socket).expect("a socket");
        let frontend =
            Frontend::start(disk, listening, house.handle.clone(), &Confine::none()).expect("a thread");
        Mutex::new(Door { socket, kinds: descriptors(), _frontend: frontend })
    })
}

/// Says all messages of an input, one connection for all of them.
///
/// # Panics
/// When the domain does not end the connection, or keeps something of it.
pub fn play(data: &[u8]) {
    let door = door().lock().expect("a door that stands");
    // Nobody else uses its first VM meanwhile.
    let house = house().lock().expect("an engine that lives");
    let stream = UnixStream::connect(&door.socket).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    stream.set_write_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let mut rest = data;
    for _ in 0..MOST {
        let [kind, flags, fds, len, tail @ ..] = rest else { break };
        let (payload, tail) = tail.split_at(usize::from(*len).min(tail.len()));
        rest = tail;
        let mut bytes = Vec::new();
        if *kind != 255 {
            bytes.extend(u32::from(*kind).to_le_bytes());
            // Version 1; the input says whether an answer is wanted, and lies about the rest in the high bits.
            bytes.extend((1u32 | u32::from(flags & 0x0c) | u32::from(flags >> 6) << 30).to_le_bytes());
            let lie = u32::from(flags & 1) * 0x1000;
            bytes.extend((payload.len() as u32 + lie).to_le_bytes());
        }
        bytes.extend(payload);
        if bytes.is_empty() {
            continue;
        }
        // Two bits for each of at most four descriptors; the flags say how many.
        let count = usize::from(flags >> 4 & 3) + usize::from(*fds != 0);
        let chosen: Vec<_> =
            (0..count).map(|i| door.kinds[usize::from(fds >> (2 * (i % 4)) & 3)].as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !chosen.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&chosen));
        }
        if sendmsg(&stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).is_err() {
            // Hung up on: what came before was too much.
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    // Answers, and then the end: a control thread that hangs would not come to it.
    let mut sink = [0u8; 4_096];
    loop {
        match (&stream).read(&mut sink) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(e) => panic!("the connection does not end: {e}"),
        }
    }
    // The thread closes the socket before or after it tells the engine; the next connection waits for that.
    let again = UnixStream::connect(&door.socket).expect("a connection");
    let _ = again.shutdown(Shutdown::Write);
    let _ = (&again).read(&mut sink);
    let status = house.handle.ask(|reply| Command::Status { reply }).expect("the engine lives");
    assert_eq!((status.vms[0].outstanding, status.vms[0].queues), (0, 0), "something of it is left");
}
