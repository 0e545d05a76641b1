//! Receiver of the neighbour's load.

use std::time::Duration;

/// Accepts connections and datagrams, and discards their data.
#[derive(Debug)]
pub struct Sink {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Sink {
    /// Listens on this address and port.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn start(host: &str, port: u16) -> anyhow::Result<Self> {
        use std::sync::atomic::Ordering::Relaxed;
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let tcp = std::net::TcpListener::bind((host, port))?;
        tcp.set_nonblocking(true)?;
        let udp = std::net::UdpSocket::bind((host, port))?;
        udp.set_read_timeout(Some(Duration::from_millis(50)))?;
        let (stopped, mut buffer) = (std::sync::Arc::clone(&stop), vec![0u8; 65_536]);
        let datagrams = std::thread::spawn(move || {
            while !stopped.load(Relaxed) {
                let _ = udp.recv(&mut buffer);
            }
        });
        let stopped = std::sync::Arc::clone(&stop);
        let streams = std::thread::spawn(move || {
            while !stopped.load(Relaxed) {
                match tcp.accept() {
                    Ok((mut stream, _)) => {
                        let _ = stream.set_nonblocking(false);
                        let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
                        let mut buffer = vec![0u8; 65_536];
                        while !stopped.load(Relaxed) {
                            match std::io::Read::read(&mut stream, &mut buffer) {
                                Ok(0) => break,
                                Ok(_) => {}
                                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                                Err(_) => break,
                            }
                        }
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(10)),
                }
            }
        });
        Ok(Self { stop, threads: vec![datagrams, streams] })
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}
