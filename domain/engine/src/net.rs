//! The engine of a network: one thread for all ports that share an uplink.
//!
//! ```text
//!  VM: tx queue ─kick─► check, copy ─► scheduler, caps, virtual link ─► tap or packet socket
//!  VM: rx queue ◄─call─ copy ◄─ scheduler, caps ◄─ read, filter ◄─────── kernel queue of the port
//! ```
//!
//! - A frame from a VM is checked (source address, VLAN, header) and copied when it is fetched, and
//!   its buffer is completed at once: completions are in order, so a restart after a crash loses
//!   frames and repeats none. At most `depth` frames of a VM wait here; beyond that its own queue
//!   fills, so caps hold frames and drop none.
//! - Toward the link, frames are ordered by the scheduler that also orders disks; a
//!   [`rtvirtio_sched::VirtualLink`] stands for the link's rate.
//! - A large TCP segment is segmented into frames where frames are ordered or capped, and passes
//!   whole elsewhere.
//! - Each port has a queue in the kernel. It is read only while the VM has buffers and tokens: the
//!   kernel drops the rest of a flood before it costs CPU time.
//! - Toward a VM no frame waits for a buffer: without one it is dropped. The VM may be notified of
//!   several frames at once, as network cards do it (interrupt moderation).
//! - A port with fruitless work (kicks without frames, refused frames) or a used-up part of the CPU
//!   budget is held: neither its queues nor its uplink are polled, and its kicks wake no thread.

pub mod command;
pub mod frame;
mod hold;
mod moderation;
mod packet;
mod pool;
mod port;
pub mod prepared;
mod run;
mod segment;
mod settings;
pub mod trace;
mod uplink;

use rtvirtio_domain_config::{Network, Poll, Power};
use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_units::Nanos;

pub use self::command::{Flow, NetCommand, NetHandle, NetStatus, PortStatus};
pub use self::port::QUEUES;
pub use self::settings::{Drops, PortSettings};
use crate::confine::{Confine, Role};
use crate::engine::EngineError;
use crate::engine::thread::EngineThread;

/// Largest number of descriptors of a queue: that of a split virtqueue (virtio 1.2, section 2.7).
pub(crate) const LARGEST_QUEUE: u16 = 1 << 15;

/// A running network; it ends when this is dropped.
#[derive(Debug)]
pub struct NetEngine(EngineThread<NetCommand>);

impl NetEngine {
    /// Starts the thread. Uplinks are in the order of the ports.
    pub fn start(
        network: &Network,
        uplinks: Vec<Uplink>,
        power: Power,
        confine: &Confine,
    ) -> Result<Self, EngineError> {
        let (name, network) = (format!("net-{}", network.name), network.clone());
        let poll = match network.cpu_limit() {
            // Polling would spend the budget.
            Some(_) => Poll::Fixed(Nanos(0)),
            None => Poll::new(power, network.poll, network.fifo),
        };
        let make = move |commands, doorbell| run::NetLoop::new(&network, uplinks, commands, doorbell, poll);
        Ok(Self(EngineThread::start(&name, confine.clone(), Role::Network, make)?))
    }

    /// Whether the kernel refuses every io_uring operation that the thread does not use.
    #[must_use]
    pub fn is_restricted(&self) -> bool {
        self.0.is_restricted()
    }

    /// A handle for control threads.
    #[must_use]
    pub fn handle(&self) -> NetHandle {
        self.0.handle()
    }
}
