//! Echo service for datagrams (RFC 862): the guest's end of a flow that the host runs.

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// Interval at which the service checks whether its time is over.
const LOOK: Duration = Duration::from_millis(100);

/// Port, time and mark of the service.
#[derive(Clone, Copy, Debug)]
pub struct EchoOptions {
    /// UDP port; 0 for one that is free.
    pub port: u16,
    /// Duration of the service; `None` for no end.
    pub length: Option<Duration>,
    /// Differentiated services code point of the answers, 0 to 63.
    pub dscp: Option<u8>,
}

/// Socket of the echo service.
#[derive(Debug)]
pub struct Echo {
    socket: UdpSocket,
    length: Option<Duration>,
}

impl Echo {
    /// Listens on all addresses; on those of IPv4 only where the kernel has no IPv6.
    ///
    /// # Errors
    /// A port that is taken, or that takes root.
    pub fn bind(options: EchoOptions) -> io::Result<Self> {
        let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, options.port));
        let socket = match UdpSocket::bind(both) {
            Err(e) if matches!(e.kind(), ErrorKind::AddrNotAvailable | ErrorKind::Unsupported) => {
                UdpSocket::bind((Ipv4Addr::UNSPECIFIED, options.port))?
            }
            Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
                UdpSocket::bind((Ipv4Addr::UNSPECIFIED, options.port))?
            }
            bound => bound?,
        };
        if let Some(dscp) = options.dscp {
            // Of IPv4, also through a socket of IPv6.
            sockopt::set_ip_tos(&socket, dscp << 2)?;
            if socket.local_addr()?.is_ipv6() {
                sockopt::set_ipv6_tclass(&socket, (dscp << 2).into())?;
            }
        }
        socket.set_read_timeout(Some(LOOK))?;
        Ok(Self { socket, length: options.length })
    }

    /// UDP port in use.
    pub fn port(&self) -> io::Result<u16> {
        Ok(self.socket.local_addr()?.port())
    }

    /// Answers until the time is over; returns the number of answers.
    ///
    /// # Errors
    /// As recvfrom(2) reports, when nothing can be received any more.
    pub fn serve(&self) -> io::Result<u64> {
        let (begin, own) = (Instant::now(), self.port()?);
        let (mut buffer, mut answers) = (vec![0; 65_536], 0);
        while self.length.is_none_or(|length| begin.elapsed() < length) {
            match self.socket.recv_from(&mut buffer) {
                Ok((_, from)) if is_service(from.port(), own) => {}
                Ok((len, from)) => {
                    // A sender that is gone, or a full queue: the datagram is lost, as any may be.
                    answers += u64::from(self.socket.send_to(&buffer[..len], from).is_ok());
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock
                            | ErrorKind::TimedOut
                            | ErrorKind::Interrupted
                            | ErrorKind::ConnectionRefused
                    ) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(answers)
    }
}

/// Whether a port is that of a service, which may answer too: a datagram with a forged sender would
/// bounce between the two of them forever.
fn is_service(port: u16, own: u16) -> bool {
    /// The kernel assigns none of these to clients.
    const LAST_SYSTEM_PORT: u16 = 1023;
    port == own || port <= LAST_SYSTEM_PORT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_echo_is_not_answered() {
        assert!(is_service(7, 7007) && is_service(7007, 7007) && is_service(19, 7) && is_service(0, 7));
        assert!(!is_service(40_000, 7) && !is_service(7008, 7007));
    }

    #[test]
    fn datagrams_come_back_as_they_were() {
        let length = Some(Duration::from_millis(200));
        let echo = Echo::bind(EchoOptions { port: 0, length, dscp: Some(46) }).unwrap();
        let port = echo.port().unwrap();
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.set_read_timeout(Some(rtvirtio_testkit::HANG)).unwrap();
        let sent: Vec<u8> = (0..1_400u32).map(|i| i as u8).collect();
        // It waits in the socket.
        client.send_to(&sent, (Ipv4Addr::LOCALHOST, port)).unwrap();
        let twice = Echo::bind(EchoOptions { port, length, dscp: None });
        assert_eq!(twice.unwrap_err().kind(), ErrorKind::AddrInUse);
        // It ends by itself.
        assert_eq!(echo.serve().unwrap(), 1);
        let mut buffer = [0; 2_048];
        let (len, from) = client.recv_from(&mut buffer).unwrap();
        assert_eq!((&buffer[..len], from.port()), (sent.as_slice(), port));
    }
}
