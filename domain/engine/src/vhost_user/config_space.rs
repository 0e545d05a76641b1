//! Configuration space of a disk, which changes when the disk grows, and the channel by which its
//! front end is notified of that.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::SendFlags;

use crate::blk::SECTOR;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`, version 1, without a body.
const CONFIG_CHANGED: [u32; 3] = [2, 1, 0];

#[derive(Debug)]
struct Shared {
    bytes: Vec<u8>,
    /// Number of changes.
    version: u64,
    /// Channel to the front end that is connected.
    channel: Option<OwnedFd>,
}

/// The configuration space of a device, shared by its connections and by reloads; empty where the
/// VMM provides it.
#[derive(Clone, Debug)]
pub struct ConfigSpace(Arc<Mutex<Shared>>);

impl From<Vec<u8>> for ConfigSpace {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Shared { bytes, version: 0, channel: None })))
    }
}

impl ConfigSpace {
    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the VMM provides it.
    pub(super) fn is_empty(&self) -> bool {
        self.shared().bytes.is_empty()
    }

    /// Contents, and the number of changes before them.
    pub(super) fn read(&self) -> (Vec<u8>, u64) {
        let shared = self.shared();
        (shared.bytes.clone(), shared.version)
    }

    /// Number of changes.
    pub(super) fn version(&self) -> u64 {
        self.shared().version
    }

    /// Replaces the channel to the front end; `None` at the end of a connection.
    pub(super) fn set_channel(&self, channel: Option<OwnedFd>) {
        let old = std::mem::replace(&mut self.shared().channel, channel);
        // Closed without the lock: a close may take long.
        drop(old);
    }

    /// Sets the size of a disk in bytes.
    pub(crate) fn set_size(&self, size: u64) {
        let mut shared = self.shared();
        if let Some(capacity) = shared.bytes.get_mut(0..8) {
            capacity.copy_from_slice(&(size / SECTOR).to_le_bytes());
            shared.version += 1;
        }
    }

    /// Notifies the front end, which then reads the contents again. `false` without a channel.
    ///
    /// # Errors
    /// The front end takes no message now, or its descriptor is no socket.
    pub(crate) fn notify(&self) -> io::Result<bool> {
        let shared = self.shared();
        let Some(channel) = &shared.channel else { return Ok(false) };
        let message: Vec<u8> = CONFIG_CHANGED.into_iter().flat_map(u32::to_ne_bytes).collect();
        // Without blocking: the front end may never read.
        let sent = rustix::net::send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        if sent == message.len() { Ok(true) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_front_end_is_notified_of_a_new_size_without_blocking() {
        let space = ConfigSpace::from(vec![0; 60]);
        assert!(!space.notify().unwrap());
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        space.set_channel(Some(ours.into()));
        space.set_size(3 << 20);
        assert!(space.notify().unwrap());
        let mut message = [0; 12];
        qemu.read_exact(&mut message).unwrap();
        assert_eq!(message[..], [2u32, 1, 0].map(u32::to_ne_bytes).concat());
        let (bytes, version) = space.read();
        assert_eq!((&bytes[..8], version), (&6_144_u64.to_le_bytes()[..], 1));
        let full = (0..1_000_000).find_map(|_| space.notify().err());
        assert_eq!(full.unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(qemu);
        assert!(space.notify().is_err());
    }
}
