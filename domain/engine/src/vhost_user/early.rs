//! A message that comes earlier than the `vhost` crate expects.
//!
//! QEMU enables the queues of a network when its device is made, long before it sets features. The
//! specification makes the message valid as soon as protocol features are negotiated; the crate
//! (0.18) refuses it until features are set, without the reply for which QEMU 10 waits.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::net::RecvFlags;

/// Request `VHOST_USER_SET_VRING_ENABLE`.
const SET_VRING_ENABLE: u32 = 18;
/// Flags of a message: version 1, that it is a reply, that the sender waits for one.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a header: request, flags, size of the body.
const HEADER: usize = 12;
/// Bytes of the body: index and state.
const BODY: usize = 8;

/// A message that enables or disables a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Enable {
    /// Index of the queue.
    pub(super) index: u32,
    /// Whether the queue is enabled, or disabled.
    pub(super) enable: bool,
    needs_reply: bool,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

/// Waits for the next message, and takes it if it enables or disables a queue; else leaves it.
pub(super) fn take_enable(stream: &UnixStream) -> io::Result<Option<Enable>> {
    let mut header = [0; HEADER];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (len, _) = rustix::net::recv(stream.as_fd(), &mut header, flags)?;
    let is_enable = len == HEADER && word(&header, 0) == SET_VRING_ENABLE && word(&header, 8) == BODY as u32;
    if !is_enable {
        return Ok(None);
    }
    let mut message = [0; HEADER + BODY];
    (&mut &*stream).read_exact(&mut message)?;
    let needs_reply = word(&message, 4) & NEED_REPLY != 0;
    Ok(Some(Enable { index: word(&message, 12), enable: word(&message, 16) == 1, needs_reply }))
}

impl Enable {
    /// Replies, if the sender waits for it.
    pub(super) fn reply(self, stream: &UnixStream, done: bool) -> io::Result<()> {
        if !self.needs_reply {
            return Ok(());
        }
        let words = [SET_VRING_ENABLE, VERSION | REPLY, 8, u32::from(!done), 0];
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
        (&mut &*stream).write_all(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(request: u32, flags: u32, body: &[u32]) -> Vec<u8> {
        let words = [&[request, flags, body.len() as u32 * 4][..], body].concat();
        words.into_iter().flat_map(u32::to_ne_bytes).collect()
    }

    #[test]
    fn only_this_message_is_taken() {
        let (qemu, ours) = UnixStream::pair().unwrap();
        (&qemu).write_all(&message(SET_VRING_ENABLE, VERSION | NEED_REPLY, &[1, 1])).unwrap();
        let enable = take_enable(&ours).unwrap().unwrap();
        assert_eq!((enable.index, enable.enable), (1, true));
        enable.reply(&ours, true).unwrap();
        let mut reply = [0; 20];
        (&qemu).read_exact(&mut reply).unwrap();
        assert_eq!(reply[..], message(SET_VRING_ENABLE, VERSION | REPLY, &[0, 0]));
        // Another one stays where it is.
        let other = message(1, VERSION, &[]);
        (&qemu).write_all(&other).unwrap();
        assert_eq!(take_enable(&ours).unwrap(), None);
        let mut there = [0; HEADER];
        (&ours).read_exact(&mut there).unwrap();
        assert_eq!(there[..], other);
        // A wrong size is the crate's to refuse; so is the end.
        (&qemu).write_all(&message(SET_VRING_ENABLE, VERSION, &[1])).unwrap();
        assert_eq!(take_enable(&ours).unwrap(), None);
        (&ours).read_exact(&mut [0; 16]).unwrap();
        drop(qemu);
        assert_eq!(take_enable(&ours).unwrap(), None);
    }
}
