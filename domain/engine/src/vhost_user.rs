//! The vhost-user back end of one VM's device: a socket, and one connection at a time.
//!
//! A connection is between one QEMU and this process: whatever a QEMU sends, or delays, concerns
//! its own device.

mod config_space;
mod connection;
mod descriptors;
mod early;
mod first_uses;
mod front_ends;
mod socket;

use std::fmt;
use std::io;
use std::sync::Arc;

use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_domain_resources::use_lock::UseLock;

pub use self::config_space::ConfigSpace;
use rtvirtio_sched::VmId;

use self::connection::Connection;
pub use self::first_uses::FirstUses;
pub use self::front_ends::FrontEnds;
use self::socket::Socket;
use crate::engine::{Command, EngineHandle, QueueCommand};
use crate::log::Refusals;
use crate::memory::{Pinner, Trust};

/// The vhost-user properties of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name in logs, and of the thread.
    pub name: String,
    /// Index of the VM in its engine.
    pub vm: VmId,
    /// Offered features of virtio.
    pub features: u64,
    /// The configuration space; empty where the VMM provides it, as for network devices.
    pub config: ConfigSpace,
    /// Virtqueues offered to the guest.
    pub queues: u16,
    /// Largest number of descriptors of a queue.
    pub largest_queue: u16,
    /// Trust in the front end.
    pub trust: Trust,
    /// Whether requests in flight are tracked in memory that outlives this process. QEMU has it for
    /// disks only.
    pub has_inflight: bool,
    /// Lock that is held while a queue is served; `None` for a device that does not move.
    pub use_lock: Option<Arc<UseLock>>,
    /// Notes each begin of use by a front end; `None` for a device that does not move.
    pub first_uses: Option<Arc<FirstUses>>,
    /// Pins the guest's memory; `None` for memory that is not.
    pub pinner: Option<Arc<Pinner>>,
}

/// The socket of a device; serves one QEMU at a time.
pub struct VhostUserServer<C: From<QueueCommand> = Command> {
    socket: Arc<Socket<C>>,
    /// Removes the socket's name at the end.
    _listener: SocketListener,
}

impl<C: From<QueueCommand>> fmt::Debug for VhostUserServer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostUserServer").field("device", self.socket.device()).finish_non_exhaustive()
    }
}

impl<C: From<QueueCommand> + Send + 'static> VhostUserServer<C> {
    /// Serves a device's socket.
    ///
    /// # Errors
    /// No descriptor is free, or the thread that waits for front ends has ended.
    pub fn start(
        device: DeviceInfo,
        listener: SocketListener,
        engine: EngineHandle<C>,
        front_ends: &FrontEnds,
    ) -> io::Result<Self> {
        let copy = listener.listener().try_clone()?;
        let socket = Arc::new(Socket::new(device, engine, copy, front_ends.waker()));
        front_ends.add(Arc::clone(&socket) as _)?;
        Ok(Self { socket, _listener: listener })
    }
}

impl<C: From<QueueCommand>> VhostUserServer<C> {
    /// Whether a QEMU is connected, whatever its guest does.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.socket.stream().is_some()
    }

    /// Whether a QEMU is connected whose guest uses the device. QEMU keeps the connection of a
    /// device that was removed (`device_del`), and stops its queues.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.is_connected() && self.socket.is_in_use()
    }

    /// The process that is connected; `None` without one, or where the kernel does not know it in
    /// this PID namespace.
    #[must_use]
    pub fn peer(&self) -> Option<u32> {
        let peer = rustix::net::sockopt::socket_peercred(&*self.socket.stream()?).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Configuration space of the device.
    #[must_use]
    pub fn config(&self) -> &ConfigSpace {
        &self.socket.device().config
    }

    /// The lock of a disk that may move.
    #[must_use]
    pub fn use_lock(&self) -> Option<&UseLock> {
        self.socket.device().use_lock.as_deref()
    }

    /// Messages and connections that were refused.
    #[must_use]
    pub fn refusals(&self) -> &Refusals {
        self.socket.refusals()
    }

    /// Whether all has ended, after [`VhostUserServer::close`]: nothing of the VM is in flight
    /// then.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.socket.has_ended()
    }

    /// Ends the connection and the listener, soon. Dropping waits for that, so several are closed
    /// first and then dropped.
    pub fn close(&self) {
        self.socket.close();
    }
}

impl<C: From<QueueCommand>> Drop for VhostUserServer<C> {
    fn drop(&mut self) {
        self.close();
        self.socket.wait_until_ended();
    }
}
