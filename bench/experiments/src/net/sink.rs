//! Receiver of the neighbour's load.

use std::io::{ErrorKind, Read as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use super::worker::Worker;

/// Longest wait for data.
const WAIT: Duration = Duration::from_millis(50);

/// Accepts connections and datagrams, and discards their data.
#[derive(Debug)]
pub struct Sink {
    _workers: [Worker; 2],
}

impl Sink {
    /// Listens on this address and port.
    pub fn start(host: &str, port: u16) -> anyhow::Result<Self> {
        let tcp = TcpListener::bind((host, port))?;
        tcp.set_nonblocking(true)?;
        let udp = UdpSocket::bind((host, port))?;
        udp.set_read_timeout(Some(WAIT))?;
        let mut buffer = vec![0u8; 65_536];
        let datagrams = Worker::start(move || {
            let _ = udp.recv(&mut buffer);
            0
        });
        let mut open: Option<TcpStream> = None;
        let mut buffer = vec![0u8; 65_536];
        let streams = Worker::start(move || {
            if let Some(mut stream) = open.take() {
                let read = stream.read(&mut buffer);
                let goes_on = read.map_or_else(|e| e.kind() == ErrorKind::WouldBlock, |n| n > 0);
                open = goes_on.then_some(stream);
            } else if let Ok((stream, _)) = tcp.accept() {
                let _ = stream.set_nonblocking(false);
                let _ = stream.set_read_timeout(Some(WAIT));
                open = Some(stream);
            } else {
                std::thread::sleep(Duration::from_millis(10));
            }
            0
        });
        Ok(Self { _workers: [datagrams, streams] })
    }
}
