//! Queues of a hostile guest, through the real engine of a network.
//!
//! Input: flags (bit 0: receive queue, else transmit queue; 1: event index; 2 to 4: features; 5: a
//! frame arrives; 6: the guest disconnects; 7: that frame has headers of the input), queue size,
//! then guest memory from address 0. Segments are cut: the attacker has caps.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_engine::confine::Confine;
use rtvirtio_engine::engine::{QueueCommand, QueueId, VringStart};
use rtvirtio_engine::feature::{self, VERSION_1};
use rtvirtio_engine::memory::GuestMem;
use rtvirtio_engine::net::{NetCommand, NetEngine, NetHandle, PortStatus};
use rtvirtio_sched::VmId;
use vm_memory::{Bytes, GuestAddress};

use super::engine::{AVAIL, MEMORY, USED, eventfd, memory};

const CONFIG: &str = r#"
[[network]]
name = "n"
[[network.port]]
name = "attacker"
socket = "/a"
tap = "a"
mac = "52:54:00:00:00:0a"
tx_cap = { frames = "10000000/s" }
rx_cap = { frames = "10000000/s" }
[[network.port]]
name = "neighbour"
socket = "/b"
tap = "b"
mac = "52:54:00:00:00:0b"
"#;

/// A frame of the neighbour, with virtio-net's header before it.
fn frame(number: u8) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend([0x52, 0x54, 0, 0, 0, 0xcc, 0x52, 0x54, 0, 0, 0, 0xb, 0x88, 0xb5, number]);
    frame.resize(12 + 60, number);
    frame
}

struct Lan {
    handle: NetHandle,
    attacker: Arc<GuestMem>,
    /// The other ends of the uplinks.
    ends: [UnixDatagram; 2],
    neighbour: Arc<GuestMem>,
    kick: File,
    sent: u16,
    _engine: NetEngine,
}

fn lan() -> &'static Mutex<Lan> {
    static LAN: OnceLock<Mutex<Lan>> = OnceLock::new();
    LAN.get_or_init(|| {
        let file = rtvirtio_domain_config::File::parse(Path::new("fuzz"), CONFIG).expect("a configuration");
        let pairs = [(), ()].map(|()| UnixDatagram::pair().expect("sockets"));
        let mut uplinks = Vec::new();
        let ends = pairs.map(|(end, uplink)| {
            uplink.set_nonblocking(true).expect("a socket");
            uplinks.push(Uplink::from_datagrams(OwnedFd::from(uplink)));
            end
        });
        let network = &file.networks[0];
        let engine = NetEngine::start(network, uplinks, file.power, &Confine::none())
            .expect("an engine: io_uring is needed");
        let handle = engine.handle();
        let neighbour = Arc::new(GuestMem::from_mapped(memory()));
        let kick = eventfd();
        start(
            &handle,
            VmId(1),
            QueueId(1),
            &neighbour,
            16,
            VERSION_1,
            kick.try_clone().expect("a descriptor"),
        )
        .expect("a queue as Linux makes it");
        let attacker = Arc::new(GuestMem::from_mapped(memory()));
        Mutex::new(Lan { handle, attacker, ends, neighbour, kick, sent: 0, _engine: engine })
    })
}

fn start(
    handle: &NetHandle,
    vm: VmId,
    queue: QueueId,
    mem: &Arc<GuestMem>,
    size: u16,
    features: u64,
    kick: File,
) -> Result<u16, rtvirtio_engine::engine::StartError> {
    let start = VringStart {
        mem: Arc::clone(mem),
        size,
        desc: GuestAddress(0),
        avail: GuestAddress(AVAIL),
        used: GuestAddress(USED),
        base: 0,
        event_idx: features & feature::EVENT_IDX != 0,
        features,
        kick: kick.into(),
        call: None,
        inflight: None,
    };
    let start = Box::new(start);
    handle.ask(|reply| QueueCommand::Start { vm, queue, start, reply }).expect("the engine lives")
}

impl Lan {
    fn status(&self, port: VmId) -> PortStatus {
        let status = self.handle.ask(|reply| NetCommand::PortStatus { port, reply });
        *status.expect("the engine lives").expect("a port")
    }

    /// The neighbour sends a frame, and it comes out.
    fn neighbour_sends(&mut self) {
        const DATA: u64 = 0x2000;
        let (mem, slot) = (&self.neighbour.mem, self.sent % 16);
        let frame = frame(self.sent as u8);
        mem.write_slice(&frame, GuestAddress(DATA)).expect("memory");
        let at = 16 * u64::from(slot);
        mem.write_obj(DATA, GuestAddress(at)).expect("memory");
        mem.write_obj(frame.len() as u64, GuestAddress(at + 8)).expect("memory");
        mem.write_obj(slot, GuestAddress(AVAIL + 4 + 2 * u64::from(slot))).expect("memory");
        self.sent = self.sent.wrapping_add(1);
        mem.store(self.sent, GuestAddress(AVAIL + 2), std::sync::atomic::Ordering::Release).expect("memory");
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("a kick");
        let mut got = [0; 2_048];
        let len = self.ends[1].recv(&mut got).expect("the neighbour's frame");
        assert_eq!(got[..len], frame, "the neighbour's frame");
    }
}

/// Runs an input.
///
/// # Panics
/// The engine does not stop the queue, or loses a frame of its neighbour.
pub fn play(data: &[u8]) {
    let [flags, size] = data.first_chunk::<2>().copied().unwrap_or_default();
    let Some(rest) = data.get(2..) else { return };
    let mut lan = lan().lock().expect("an engine that lives");
    let mem = Arc::clone(&lan.attacker);
    let rest = &rest[..rest.len().min(MEMORY)];
    mem.mem.write_slice(&vec![0; 0x4000], GuestAddress(0)).expect("memory");
    mem.mem.write_slice(rest, GuestAddress(0)).expect("memory");
    let mut features = feature::net::offered(flags & 4 != 0);
    for (bit, feature) in [(2, feature::EVENT_IDX), (8, VERSION_1), (16, feature::net::MRG_RXBUF)] {
        features &= if flags & bit != 0 { u64::MAX } else { !feature };
    }
    let queue = QueueId(u16::from(flags & 1 == 0));
    let kick = eventfd();
    if start(
        &lan.handle,
        VmId(0),
        queue,
        &mem,
        1 << (size % 5),
        features,
        kick.try_clone().expect("a descriptor"),
    )
    .is_ok()
    {
        if flags & 32 != 0 {
            let mut arrives = frame(7);
            arrives[12..18].copy_from_slice(&[0x52, 0x54, 0, 0, 0, 0xa]);
            arrives.resize(12 + 60 + usize::from(size) * 8, 7);
            if flags & 128 != 0 {
                let (header, frame) = arrives.split_at_mut(12);
                let fields = header.iter_mut().chain(frame.iter_mut().skip(12));
                fields.zip(rest).for_each(|(to, from)| *to = *from);
            }
            lan.ends[0].send(&arrives).expect("a frame arrives");
        }
        rustix::io::write(&kick, &1u64.to_ne_bytes()).expect("a kick");
        lan.neighbour_sends();
        if flags & 64 != 0 {
            lan.handle
                .ask(|reply| QueueCommand::Disconnect { vm: VmId(0), reply: Some(reply) })
                .expect("the engine lives");
        } else {
            lan.handle
                .ask(|reply| QueueCommand::Stop { vm: VmId(0), queue, for_good: true, reply })
                .expect("the engine lives");
        }
    }
    // What the attacker was allowed to send.
    lan.ends[0].set_nonblocking(true).expect("a socket");
    while lan.ends[0].recv(&mut [0; 16]).is_ok() {}
    lan.neighbour_sends();
    assert_eq!(lan.status(VmId(0)).queues, 0, "a queue is left");
    let neighbour = lan.status(VmId(1));
    assert_eq!((neighbour.drops.malformed, neighbour.broken_queues), (0, 0));
}
