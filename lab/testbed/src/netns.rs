//! Network namespaces, a bridge in one, and raw frames.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

/// Socket option of `linux/if_packet.h`.
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// A network namespace; it ends when this is dropped and no process or thread is left in it.
#[derive(Debug)]
pub struct Namespace {
    file: File,
}

impl Namespace {
    /// Makes a namespace, with its loopback interface up; needs root.
    pub fn new() -> io::Result<Self> {
        let made = std::thread::spawn(|| {
            // SAFETY: only the network namespace of this thread changes, which ends here.
            check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
            run("ip", "link set lo up")?;
            File::open("/proc/thread-self/ns/net")
        });
        let file = made.join().map_err(|_| io::Error::other("a thread ended"))??;
        Ok(Self { file })
    }

    /// Moves the calling thread into the namespace, with the threads and processes that it starts.
    pub fn enter(&self) -> io::Result<()> {
        // SAFETY: only the network namespace of this thread changes.
        check(unsafe { libc::setns(self.file.as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
    }
}

fn check(done: libc::c_int) -> io::Result<libc::c_int> {
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// Runs a program with arguments that are separated by spaces.
pub fn run(program: &str, arguments: &str) -> io::Result<String> {
    let out = Command::new(program).args(arguments.split_whitespace()).output();
    let out = out.map_err(|e| io::Error::new(e.kind(), format!("{program}: {e}")))?;
    if !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr).trim().to_owned();
        return Err(io::Error::other(format!("{program} {arguments}: {text}")));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Makes a bridge `br0` in the calling thread's namespace, a tap on it for each name, and a veth
/// pair of `up0`, on the bridge, and `up1`. Nothing is sent by itself: IPv6 is off.
pub fn bridge<S: AsRef<str>>(taps: &[S]) -> io::Result<()> {
    // These files are those of the calling thread's namespace. A kernel without IPv6 lacks the
    // first one. Without `arp_ignore`, the bridge answers ARP for the address of `up1` with its
    // own, and frames to the far end do not pass the uplink.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    std::fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "1")?;
    // With br_netfilter the kernel passes bridged frames through the host's firewall, as routed
    // packets: three times the cost of each, and frames that are no complete packets are dropped. A
    // kernel without it has no such files.
    for of in ["iptables", "ip6tables", "arptables"] {
        let _ = std::fs::write(format!("/proc/sys/net/bridge/bridge-nf-call-{of}"), "0");
    }
    let ip = |arguments: &str| run("ip", arguments);
    ip("link add br0 type bridge mcast_snooping 0 stp_state 0")?;
    ip("link add up0 type veth peer name up1")?;
    ip("link set br0 addrgenmode none up")?;
    for end in ["up0", "up1"] {
        ip(&format!("link set {end} addrgenmode none up"))?;
    }
    ip("link set up0 master br0")?;
    for tap in taps.iter().map(S::as_ref) {
        ip(&format!("tuntap add dev {tap} mode tap"))?;
        ip(&format!("link set {tap} addrgenmode none master br0 up"))?;
    }
    Ok(())
}

/// A packet socket for whole frames on an interface.
#[derive(Debug)]
pub struct RawSocket {
    fd: OwnedFd,
}

impl RawSocket {
    /// Opens a socket on an interface of the calling thread's namespace.
    pub fn open(interface: &str) -> io::Result<Self> {
        Self::with_protocol(interface, libc::ETH_P_ALL as u16)
    }

    /// Opens a socket for frames of one EtherType: others are not queued for it.
    pub fn of_type(interface: &str, ethertype: u16) -> io::Result<Self> {
        Self::with_protocol(interface, ethertype)
    }

    /// Opens a socket for sending only: nothing is queued for it.
    pub fn sender(interface: &str) -> io::Result<Self> {
        Self::with_protocol(interface, 0)
    }

    fn with_protocol(interface: &str, protocol: u16) -> io::Result<Self> {
        let name = std::ffi::CString::new(interface).map_err(io::Error::other)?;
        // SAFETY: the name outlives the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no {interface}")));
        }
        // SAFETY: plain arguments.
        let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        // SAFETY: a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(check(raw)?) };
        let one: libc::c_int = 1;
        // SAFETY: the kernel reads a number, which outlives the call.
        check(unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_IGNORE_OUTGOING,
                std::ptr::from_ref(&one).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        })?;
        // SAFETY: zeroes are a valid value of this plain structure.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol.to_be();
        address.sll_ifindex = index as libc::c_int;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads the address, which outlives the call.
        check(unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), size) })?;
        Ok(Self { fd })
    }

    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        Ok(rustix::io::write(&self.fd, frame).map(drop)?)
    }

    /// Receives a frame into a buffer; returns its length, `None` after the timeout.
    pub fn receive_into(&self, buffer: &mut [u8], patience: Duration) -> io::Result<Option<usize>> {
        let begin = Instant::now();
        loop {
            let Some(left) = patience.checked_sub(begin.elapsed()) else { return Ok(None) };
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one structure, which outlives the call.
            if unsafe { libc::poll(&mut poll, 1, left.as_millis().max(1) as libc::c_int) } > 0 {
                return Ok(Some(rustix::io::read(&self.fd, buffer)?));
            }
        }
    }

    /// Receives the next frame; `None` after the timeout.
    pub fn receive(&self, patience: Duration) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = vec![0u8; 65_600];
        let len = self.receive_into(&mut buffer, patience)?;
        Ok(len.map(|len| {
            buffer.truncate(len);
            buffer
        }))
    }
}
