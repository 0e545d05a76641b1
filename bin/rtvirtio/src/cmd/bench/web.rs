//! Clients of a guest's web server.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_bench::reservation::FILE_BYTES;
use rtvirtio_lab::qemu::{GUEST_PORT, QemuGuest};

use super::guest;
use crate::ui::Ui;

/// A server that sends nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a client looks whether it shall stop.
const LOOK: Duration = Duration::from_millis(500);
/// Before a client whose request failed asks again.
const RETRY: Duration = Duration::from_millis(100);
/// The file that the guest serves.
const FILE: &str = "/srv/file";
/// Processes of the guest that compute without end.
const SPINNING: &str = "/run/spinning";
/// The only request, without keeping the connection, as the paper's `ab` did.
const REQUEST: &[u8] = b"GET /file HTTP/1.0\r\n\r\n";

/// A port of the loopback interface that nobody uses. Somebody else may take it before QEMU does, which QEMU then says.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Starts a web server in a guest whose network is QEMU's own (its addresses are QEMU's fixed ones).
pub fn serve(vm: &mut QemuGuest) -> anyhow::Result<()> {
    let script = format!(
        "ip link set lo up && ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up && mkdir -p /srv && \
         dd if=/dev/zero of={FILE} bs={FILE_BYTES} count=1 2>/dev/null && httpd -p {GUEST_PORT} -h /srv"
    );
    guest::say(vm, &["sh", "-c", &script])?;
    Ok(())
}

/// Lets every vCPU of a guest compute without end, beside what it serves.
pub fn spin(vm: &mut QemuGuest, vcpus: u16) -> anyhow::Result<()> {
    let script = format!(
        "for i in $(seq {vcpus}); do setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 & echo $!; done >{SPINNING}"
    );
    guest::say(vm, &["sh", "-c", &script])?;
    Ok(())
}

/// Ends that.
pub fn stop_spinning(vm: &mut QemuGuest) -> anyhow::Result<()> {
    guest::say(vm, &["sh", "-c", &format!("kill -9 $(cat {SPINNING})")])?;
    Ok(())
}

/// One request from connecting to the last byte, whose bytes are counted as they come. `false` when told to stop.
fn get(port: u16, bytes: &AtomicU64, stop: &AtomicBool) -> io::Result<bool> {
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), PATIENCE)?;
    stream.set_read_timeout(Some(LOOK))?;
    stream.write_all(REQUEST)?;
    let (mut head, mut body) = (Vec::new(), None::<usize>);
    let mut buffer = vec![0; 64 << 10];
    let mut last = Instant::now();
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let n = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                if last.elapsed() > PATIENCE {
                    return Err(e);
                }
                continue;
            }
            Err(e) => return Err(e),
        };
        last = Instant::now();
        bytes.fetch_add(n as u64, Ordering::Relaxed);
        match &mut body {
            Some(have) => *have += n,
            None => {
                head.extend_from_slice(&buffer[..n]);
                let end = head.windows(4).position(|w| w == b"\r\n\r\n");
                body = end.map(|end| head.len() - end - 4);
            }
        }
    }
    let status = head.split(|b| *b == b'\r').next().unwrap_or_default();
    match body {
        Some(FILE_BYTES) if status.ends_with(b" 200 OK") => Ok(true),
        _ => Err(bad(format!(
            "the guest's web server answered `{}` and {} bytes",
            String::from_utf8_lossy(status),
            body.unwrap_or(0)
        ))),
    }
}

/// Clients that ask again at once, until they are dropped.
pub struct Load {
    stop: Arc<AtomicBool>,
    bytes: Arc<AtomicU64>,
    clients: Vec<JoinHandle<io::Result<()>>>,
}

impl Load {
    /// Starts them.
    pub fn start(port: u16, connections: usize) -> Self {
        let (stop, bytes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = |_| {
            let (stop, bytes) = (stop.clone(), bytes.clone());
            std::thread::spawn(move || {
                loop {
                    match get(port, &bytes, &stop) {
                        Ok(true) => {}
                        Ok(false) => return Ok(()),
                        // A wrong answer is a fault of the set-up. A server that is too busy to answer is what load makes: ask again.
                        Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(e),
                        Err(_) => std::thread::sleep(RETRY),
                    }
                }
            })
        };
        let clients = (0..connections).map(client).collect();
        Self { stop, bytes, clients }
    }

    /// Bytes that all received so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Ends them; an error of any of them is told.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients.drain(..) {
            match client.join() {
                Ok(result) => result.context("a client of the guest's web server")?,
                Err(_) => bail!("a client of the guest's web server panicked"),
            }
        }
        Ok(())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Sends `n` requests, one each `period`, also when earlier ones are not answered yet. Each response in ms, from the moment at which its request was due,
/// and how many requests were refused, broken off, or not answered within [`PATIENCE`].
pub fn periodic(port: u16, n: usize, period: Duration, ui: &Ui) -> anyhow::Result<(Vec<f64>, usize)> {
    let begin = Instant::now() + period;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut sent = Vec::with_capacity(n);
        for i in 0..n {
            let due = begin + period.mul_f64(i as f64);
            // Whoever comes late is answered late: nothing is skipped.
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if let Err(e) = ui.check_cancelled() {
                stop.store(true, Ordering::Relaxed);
                return Err(e);
            }
            let stop = &stop;
            sent.push(scope.spawn(move || {
                get(port, &AtomicU64::new(0), stop)?;
                Ok::<_, io::Error>((Instant::now() - due).as_secs_f64() * 1e3)
            }));
        }
        let (mut ms, mut failed) = (Vec::with_capacity(n), 0);
        for one in sent {
            match one.join() {
                // Microseconds are more than a clock of another thread is worth.
                Ok(Ok(answer)) => ms.push((answer * 1e3).round() / 1e3),
                Ok(Err(_)) => failed += 1,
                Err(_) => bail!("a client of the guest's web server panicked"),
            }
        }
        Ok((ms, failed))
    })
}
