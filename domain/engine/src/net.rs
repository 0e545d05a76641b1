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
//! - Each port has a queue in the kernel. It is read only while the VM has buffers and tokens: of a
//!   flood the kernel drops the rest before it costs anybody.
//! - Toward a VM nothing waits: without a buffer the frame is dropped.

pub mod command;
pub mod frame;
mod pool;
mod port;
mod run;
pub mod uplink;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rtvirtio_domain_config::{Network, Poll, Power};
use rtvirtio_sched::ConfigError;

pub use self::command::{Drops, Flow, NetCommand, NetHandle, NetStatus, PortStatus};
pub use self::port::QUEUES;
use self::uplink::Uplink;
use crate::confine::{Confine, Role};
use crate::engine::EngineHandle;

/// Why a network does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetError {
    /// An invalid scheduler configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// io_uring, an eventfd or a thread.
    #[error("{what}: {source}")]
    Io {
        /// What failed.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> NetError {
    move |source| NetError::Io { what, source }
}

/// A running network; it ends when this is dropped.
#[derive(Debug)]
pub struct NetEngine {
    handle: NetHandle,
    thread: Option<JoinHandle<()>>,
    restricted: bool,
}

impl NetEngine {
    /// Starts the thread. Uplinks are in the order of the ports.
    ///
    /// # Errors
    /// [`NetError`].
    pub fn start(
        network: &Network,
        uplinks: Vec<Uplink>,
        power: Power,
        confine: &Confine,
    ) -> Result<Self, NetError> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let doorbell = rustix::event::eventfd(0, flags).map_err(|e| failed("eventfd")(e.into()))?;
        let doorbell = Arc::new(doorbell);
        let (sender, commands): (SyncSender<NetCommand>, Receiver<NetCommand>) = sync_channel(64);
        let handle = EngineHandle::new(sender, Arc::clone(&doorbell));
        let (ready, is_ready) = sync_channel(1);
        let (network, confine) = (network.clone(), confine.clone());
        let poll = Poll::new(power, network.poll, network.fifo);
        let name: String = format!("net-{}", network.name).chars().take(15).collect();
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || {
                let _ends = crate::engine::AbortOnPanic;
                let made = run::NetLoop::new(&network, uplinks, commands, doorbell, poll);
                let confined = |engine| match confine.apply(Role::Network) {
                    Ok(()) => Ok(engine),
                    Err(source) => Err(failed("cannot confine the network's thread")(source)),
                };
                match made.and_then(confined) {
                    Ok(mut engine) => {
                        let _ = ready.send(Ok(engine.is_restricted()));
                        engine.run();
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })
            .map_err(failed("cannot start a thread"))?;
        match is_ready.recv() {
            Ok(Ok(restricted)) => Ok(Self { handle, thread: Some(thread), restricted }),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(failed("the network's thread ended at once")(io::Error::other("no reason given"))),
        }
    }

    /// Whether the kernel refuses every io_uring operation that the thread does not use.
    #[must_use]
    pub fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// A handle for control threads.
    #[must_use]
    pub fn handle(&self) -> NetHandle {
        self.handle.clone()
    }
}

impl Drop for NetEngine {
    fn drop(&mut self) {
        let _ = self.handle.send(NetCommand::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
