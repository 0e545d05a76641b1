//! Messages of a compromised QEMU, with descriptors, made of bytes.
//!
//! The input is a sequence of messages: kind, flags of the header, descriptors, length of the
//! payload, payload. Kind 255 sends bytes without a header.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Messages of one input.
const MOST: usize = 40;

/// Descriptors that an attacker may send.
pub fn descriptors() -> Vec<File> {
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

/// Sends all messages of an input on one connection, and waits for its end.
///
/// # Panics
/// The back end does not end the connection.
pub fn say(socket: &Path, kinds: &[File], data: &[u8]) {
    let stream = UnixStream::connect(socket).expect("a connection");
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
            // Version 1; the input decides about NEED_REPLY and sets any higher bits.
            bytes.extend((1u32 | u32::from(flags & 0x0c) | u32::from(flags >> 6) << 30).to_le_bytes());
            let lie = u32::from(flags & 1) * 0x1000;
            bytes.extend((payload.len() as u32 + lie).to_le_bytes());
        }
        bytes.extend(payload);
        if bytes.is_empty() {
            continue;
        }
        // Two bits for each of at most four descriptors; the flags contain their number.
        let count = usize::from(flags >> 4 & 3) + usize::from(*fds != 0);
        let chosen: Vec<_> =
            (0..count).map(|i| kinds[usize::from(fds >> (2 * (i % 4)) & 3)].as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !chosen.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&chosen));
        }
        if sendmsg(&stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).is_err() {
            // The back end closed the connection after an earlier message.
            break;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
    // Replies until the end: a control thread that hangs never gets there.
    let mut sink = [0u8; 4_096];
    loop {
        match (&stream).read(&mut sink) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => break,
            // libFuzzer's alarm.
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => panic!("the connection does not end: {e}"),
        }
    }
}
