//! A client of sampled values: writes each frame to a disk, and replies after the write.

use std::fs::OpenOptions;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{RecvFlags, recv};

use crate::Done;

/// Concurrent writes: while one is at the disk, the next frames are read.
const WRITERS: usize = 2;
/// Bytes of a write, which is also its alignment.
const BLOCK: usize = 4_096;
/// Bytes for a frame in a block: all waiting frames go with one write.
const SLOT: usize = 128;
/// Bytes of the disk that are written, over and over.
const SPAN: u64 = 32 << 20;

/// A buffer aligned for direct I/O.
#[repr(align(4096))]
pub struct Block([u8; BLOCK]);

impl Block {
    /// Size of the buffer in bytes.
    pub const BYTES: usize = BLOCK;

    /// Allocates a buffer of zeroes.
    pub fn boxed() -> Box<Self> {
        Box::new(Self([0; BLOCK]))
    }

    /// The whole buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Serves until it is killed.
pub fn serve(port: u16, path: &str) -> Done {
    let socket = Arc::new(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?);
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
    let disk = OpenOptions::new().write(true).custom_flags(direct).open(path)?;
    let (disk, next) = (Arc::new(disk), Arc::new(AtomicU64::new(0)));
    let writer = || {
        let (socket, disk, next) = (Arc::clone(&socket), Arc::clone(&disk), Arc::clone(&next));
        std::thread::spawn(move || -> std::io::Result<()> {
            let mut block = Block::boxed();
            let mut lengths = Vec::with_capacity(BLOCK / SLOT);
            loop {
                lengths.clear();
                let mut slots = block.0.chunks_exact_mut(SLOT);
                let Some(first) = slots.next() else { return Ok(()) };
                // All frames are of one publisher.
                let (len, publisher) = socket.recv_from(first)?;
                lengths.push(len);
                for slot in slots {
                    let Ok((len, _)) = recv(&socket, slot, RecvFlags::DONTWAIT) else { break };
                    lengths.push(len);
                }
                let at = next.fetch_add(1, Ordering::Relaxed) * BLOCK as u64 % SPAN;
                disk.write_all_at(&block.0, at)?;
                for (slot, len) in block.0.chunks_exact(SLOT).zip(&lengths) {
                    socket.send_to(&slot[..*len], publisher)?;
                }
            }
        })
    };
    let writers: Vec<_> = (0..WRITERS).map(|_| writer()).collect();
    for writer in writers {
        writer.join().map_err(|_| "a writer panicked")??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A frame that was answered is on the disk.
    #[test]
    fn frames_are_answered_when_they_are_written() {
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let path = dir.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(SPAN).unwrap();
        let port = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let disk = path.clone();
        std::thread::spawn(move || serve(port, disk.to_str().unwrap()).map_err(|e| e.to_string()));
        let publisher = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        publisher.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        publisher.connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let begin = std::time::Instant::now();
        let mut answer = [0; 256];
        let len = loop {
            // Until the server listens.
            let _ = publisher.send(&[7; 98]);
            match publisher.recv(&mut answer) {
                Ok(len) => break len,
                Err(_) => assert!(begin.elapsed() < rtvirtio_testkit::HANG),
            }
        };
        assert_eq!(&answer[..len], [7; 98]);
        let written = std::fs::read(&path).unwrap();
        assert_eq!(written[..98], [7; 98]);
    }
}
