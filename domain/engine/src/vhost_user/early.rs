//! Messages that the `vhost` crate does not handle.
//!
//! QEMU enables the queues of a network when its device is made, long before it sets features. The
//! specification makes the message valid as soon as protocol features are negotiated; the crate
//! (0.18) refuses it until features are set, without the reply for which QEMU 10 waits. And the
//! crate keeps the channel to the front end to itself, by which it is notified of a new size of its
//! disk.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

/// Requests by which a front end negotiates: `VHOST_USER_GET_FEATURES`, `_SET_FEATURES`,
/// `_GET_PROTOCOL_FEATURES` and `_SET_PROTOCOL_FEATURES`.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
/// Feature `VHOST_USER_F_PROTOCOL_FEATURES`.
const HAS_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Request `VHOST_USER_SET_VRING_ENABLE`.
const SET_VRING_ENABLE: u32 = 18;
/// Request `VHOST_USER_SET_LOG_FD`.
const SET_LOG_FD: u32 = 7;
/// Request `VHOST_USER_SEND_RARP`.
const SEND_RARP: u32 = 19;
/// Request `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_CHANNEL: u32 = 21;
/// Flags of a message: version 1, that it is a reply, that the sender waits for one.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a header: request, flags, size of the body.
const HEADER: usize = 12;
/// Bytes of the body: index and state, or an address.
const BODY: usize = 8;

/// A message that is handled here.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) what: Early,
    pub(super) reply: Reply,
}

/// Content of a message that is handled here.
#[derive(Debug)]
pub(super) enum Early {
    /// Enables or disables a queue.
    Enable {
        /// Index of the queue.
        index: u32,
        /// Whether the queue is enabled, or disabled.
        enable: bool,
    },
    /// Hands over the channel to the front end; `None` where no descriptor came.
    Channel(Option<OwnedFd>),
    /// Announces a network port by its address, after a migration.
    Announce([u8; 6]),
    /// Asks for a signal of writes that are logged.
    LogSignal,
}

/// A reply, if the sender waits for one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    request: u32,
    is_needed: bool,
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
}

/// Waits for the first message, and leaves it. Whether it sets features with protocol features: the
/// front end has negotiated these on an earlier connection, and does so no more.
pub(super) fn is_negotiated(stream: &UnixStream) -> io::Result<bool> {
    let mut message = [0; HEADER + BODY];
    let header = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (len, _) = rustix::net::recv(stream.as_fd(), &mut message[..HEADER], header)?;
    if len < HEADER || (word(&message, 0), word(&message, 8) as usize) != (SET_FEATURES, BODY) {
        return Ok(false);
    }
    let (len, _) = rustix::net::recv(stream.as_fd(), &mut message, header)?;
    let features = u64::from(word(&message, 16)) << 32 | u64::from(word(&message, 12));
    Ok(len == message.len() && features & HAS_PROTOCOL_FEATURES != 0)
}

/// Messages by which a front end takes all protocol features that are `offered`.
pub(super) fn negotiation(offered: u64) -> [Vec<u8>; 3] {
    let message = |request: u32, body: &[u8]| {
        let header = [request, VERSION, body.len() as u32];
        header.into_iter().flat_map(u32::to_ne_bytes).chain(body.iter().copied()).collect()
    };
    let get = |request| message(request, &[]);
    let set = message(SET_PROTOCOL_FEATURES, &offered.to_ne_bytes());
    [get(GET_FEATURES), get(GET_PROTOCOL_FEATURES), set]
}

/// Waits for the next message, and takes it if it is handled here; else leaves it. Before features
/// are set, `is_early`, that is so of more of them.
pub(super) fn take(stream: &UnixStream, is_early: bool) -> io::Result<Option<Message>> {
    let mut header = [0; HEADER];
    let flags = RecvFlags::PEEK | RecvFlags::WAITALL;
    let (len, _) = rustix::net::recv(stream.as_fd(), &mut header, flags)?;
    if len < HEADER {
        return Ok(None);
    }
    let (request, size) = (word(&header, 0), word(&header, 8) as usize);
    let reply = Reply { request, is_needed: word(&header, 4) & NEED_REPLY != 0 };
    let what = match (request, size) {
        (SET_VRING_ENABLE, BODY) if is_early => {
            let mut message = [0; HEADER + BODY];
            (&mut &*stream).read_exact(&mut message)?;
            Early::Enable { index: word(&message, 12), enable: word(&message, 16) == 1 }
        }
        (SEND_RARP, BODY) => {
            let mut message = [0; HEADER + BODY];
            (&mut &*stream).read_exact(&mut message)?;
            let [.., a, b, c, d, e, f, _, _] = message;
            Early::Announce([a, b, c, d, e, f])
        }
        (SET_LOG_FD, 0) => {
            drop(take_descriptor(stream)?);
            Early::LogSignal
        }
        (SET_CHANNEL, 0) => Early::Channel(take_descriptor(stream)?),
        _ => return Ok(None),
    };
    Ok(Some(Message { what, reply }))
}

/// Takes a header with its descriptor. Others are closed.
fn take_descriptor(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut header = [0; HEADER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut header)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = rustix::net::recvmsg(stream.as_fd(), &mut parts, &mut ancillary, flags)?;
    if received.bytes != HEADER {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    // A send to a descriptor of another kind, or its close, may block.
    Ok(descriptors.flatten().next().filter(is_unix_stream))
}

fn is_unix_stream(fd: &OwnedFd) -> bool {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    sockopt::socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
        && sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM)
}

impl Reply {
    /// Sends the reply, if one is needed.
    pub(super) fn send(self, stream: &UnixStream, done: bool) -> io::Result<()> {
        if !self.is_needed {
            return Ok(());
        }
        let words = [self.request, VERSION | REPLY, 8, u32::from(!done), 0];
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
    fn a_front_end_that_sets_features_first_has_negotiated() {
        let all = (HAS_PROTOCOL_FEATURES | 1 << 32, [HAS_PROTOCOL_FEATURES as u32, 1]);
        let is_negotiated_by = |sent: &[u8]| {
            let (qemu, ours) = UnixStream::pair().unwrap();
            (&qemu).write_all(sent).unwrap();
            drop(qemu);
            let is_negotiated = is_negotiated(&ours).unwrap();
            let mut left = Vec::new();
            (&ours).read_to_end(&mut left).unwrap();
            assert_eq!(left, sent, "the message is left to the handler");
            is_negotiated
        };
        assert!(is_negotiated_by(&message(SET_FEATURES, VERSION, &all.1)));
        assert!(!is_negotiated_by(&message(SET_FEATURES, VERSION, &[0, 1])), "no protocol features");
        assert!(!is_negotiated_by(&message(GET_FEATURES, VERSION, &[])));
        assert!(!is_negotiated_by(&message(GET_FEATURES, VERSION, &all.1)));
        assert!(!is_negotiated_by(&message(SET_FEATURES, VERSION, &all.1)[..15]), "its end is missing");
        assert!(!is_negotiated_by(&[]));
        let [_, _, set] = negotiation(all.0);
        assert_eq!(set, message(SET_PROTOCOL_FEATURES, VERSION, &all.1));
    }

    #[test]
    fn a_channel_is_taken_with_its_descriptor() {
        let (qemu, ours) = UnixStream::pair().unwrap();
        let (there, mut here) = UnixStream::pair().unwrap();
        let header = message(SET_CHANNEL, VERSION, &[]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        let fds = [there.as_fd()];
        assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
        let part = [io::IoSlice::new(&header)];
        rustix::net::sendmsg(&qemu, &part, &mut ancillary, rustix::net::SendFlags::NOSIGNAL).unwrap();
        let Some(Message { what: Early::Channel(Some(fd)), reply }) = take(&ours, true).unwrap() else {
            panic!("no channel");
        };
        reply.send(&ours, true).unwrap();
        UnixStream::from(fd).write_all(b"x").unwrap();
        drop(there);
        let mut got = Vec::new();
        here.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"x");
        // Without a descriptor there is none.
        (&qemu).write_all(&message(SET_CHANNEL, VERSION | NEED_REPLY, &[])).unwrap();
        let message = take(&ours, true).unwrap().unwrap();
        assert!(matches!(message.what, Early::Channel(None)));
    }

    #[test]
    fn only_a_unix_stream_is_a_channel() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let file = tempfile::tempfile().unwrap();
        let all: [OwnedFd; 4] = [stream.into(), datagram.into(), tcp.into(), file.into()];
        assert_eq!(all.each_ref().map(is_unix_stream), [true, false, false, false]);
    }

    #[test]
    fn only_these_messages_are_taken() {
        let (qemu, ours) = UnixStream::pair().unwrap();
        (&qemu).write_all(&message(SET_VRING_ENABLE, VERSION | NEED_REPLY, &[1, 1])).unwrap();
        let enable = take(&ours, true).unwrap().unwrap();
        assert!(matches!(enable.what, Early::Enable { index: 1, enable: true }));
        enable.reply.send(&ours, true).unwrap();
        let mut reply = [0; 20];
        (&qemu).read_exact(&mut reply).unwrap();
        assert_eq!(reply[..], message(SET_VRING_ENABLE, VERSION | REPLY, &[0, 0]));
        (&qemu).write_all(&message(19, VERSION, &[0x0302_0100, 0xffff_0504])).unwrap();
        let rarp = take(&ours, false).unwrap().unwrap();
        assert!(matches!(rarp.what, Early::Announce([0, 1, 2, 3, 4, 5])));
        (&qemu).write_all(&message(7, VERSION, &[])).unwrap();
        assert!(matches!(take(&ours, false).unwrap().unwrap().what, Early::LogSignal));
        // Another one stays where it is.
        let other = message(1, VERSION, &[]);
        (&qemu).write_all(&other).unwrap();
        assert!(take(&ours, true).unwrap().is_none());
        let mut there = [0; HEADER];
        (&ours).read_exact(&mut there).unwrap();
        assert_eq!(there[..], other);
        // A wrong size is the crate's to refuse; so is the end.
        (&qemu).write_all(&message(SET_VRING_ENABLE, VERSION, &[1])).unwrap();
        assert!(take(&ours, true).unwrap().is_none());
        (&ours).read_exact(&mut [0; 16]).unwrap();
        drop(qemu);
        assert!(take(&ours, true).unwrap().is_none());
    }
}
