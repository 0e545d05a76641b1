//! A network namespace for a test, and raw frames in it.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

/// Moves the calling thread, and all processes that it starts from now on, into a network namespace
/// of its own. The namespace is gone with the last of them.
///
/// # Panics
/// Without root, or when its loopback cannot be set up.
pub fn enter() {
    // SAFETY: only the network namespace of this thread changes.
    let done = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(done, 0, "a network namespace: {}", io::Error::last_os_error());
    ip("link set lo up");
}

/// Runs `ip` with arguments that are separated by spaces.
///
/// # Panics
/// When it fails.
pub fn ip(arguments: &str) {
    run("ip", arguments);
}

/// Runs a program with arguments that are separated by spaces.
///
/// # Panics
/// When it fails.
pub fn run(program: &str, arguments: &str) {
    let out = Command::new(program).args(arguments.split_whitespace()).output();
    let out = out.unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(out.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&out.stderr));
}

/// A bridge `br0`, a tap on it for each name, and a link whose ends are `up0`, on the bridge, and
/// `up1`. Nothing but the test sends: IPv6 is off.
///
/// # Panics
/// When one cannot be made.
pub fn bridge(taps: &[&str]) {
    // Addresses of IPv6 would be announced by frames that the test does not expect. The file is
    // that of the calling thread's namespace.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    ip("link add br0 type bridge mcast_snooping 0 stp_state 0");
    ip("link add up0 type veth peer name up1");
    ip("link set br0 addrgenmode none up");
    for end in ["up0", "up1"] {
        ip(&format!("link set {end} addrgenmode none up"));
    }
    ip("link set up0 master br0");
    for tap in taps {
        ip(&format!("tuntap add dev {tap} mode tap"));
        ip(&format!("link set {tap} addrgenmode none master br0 up"));
    }
}

/// Sends and receives whole frames on an interface.
#[derive(Debug)]
pub struct RawSocket {
    fd: OwnedFd,
}

impl RawSocket {
    /// Opens one on an interface of the calling thread's namespace.
    ///
    /// # Panics
    /// When there is none, or without root.
    #[must_use]
    pub fn open(interface: &str) -> Self {
        let check = |done: libc::c_int| {
            assert!(done >= 0, "{interface}: {}", io::Error::last_os_error());
            done
        };
        let name = std::ffi::CString::new(interface).expect("no zero in a name");
        // SAFETY: the name outlives the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        assert!(index > 0, "there is no {interface}");
        let protocol = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: plain arguments.
        let raw =
            unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol.into()) };
        // SAFETY: a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(check(raw)) };
        // SAFETY: zeroes are a valid value of this plain structure.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol;
        address.sll_ifindex = index as libc::c_int;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads the address, which outlives the call.
        check(unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&address).cast(), size) });
        Self { fd }
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        Ok(rustix::io::write(&self.fd, frame).map(drop)?)
    }

    /// The next frame that this socket's host did not send itself; `None` when none comes in time.
    ///
    /// # Panics
    /// When the interface is gone.
    #[must_use]
    pub fn receive(&self, patience: Duration) -> Option<Vec<u8>> {
        let begin = std::time::Instant::now();
        loop {
            let left = patience.checked_sub(begin.elapsed())?;
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one structure, which outlives the call.
            let ready = unsafe { libc::poll(&mut poll, 1, left.as_millis().max(1) as libc::c_int) };
            if ready <= 0 {
                continue;
            }
            let mut buffer = vec![0u8; 65_600];
            // SAFETY: zeroes are a valid value of this plain structure.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            // SAFETY: the buffers outlive the call, and have these sizes.
            let len = unsafe {
                libc::recvfrom(
                    self.fd.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                    std::ptr::from_mut(&mut from).cast(),
                    &mut size,
                )
            };
            assert!(len >= 0, "{}", io::Error::last_os_error());
            if from.sll_pkttype != libc::PACKET_OUTGOING {
                buffer.truncate(len as usize);
                return Some(buffer);
            }
        }
    }
}
