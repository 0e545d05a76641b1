//! Uplink of a port: a tap, or a packet socket on an interface of the network's own.
//!
//! Each port has a queue of its own in the kernel, and a filter on its address before it: frames
//! for other ports cost this port nothing, and the kernel drops frames that nobody reads.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rtvirtio_domain_config::{Mac, Network, Port, UplinkKind};

/// Length of virtio-net's header before each frame of a tap (virtio 1.2, section 5.1.6).
pub const HEADER: usize = 12;

/// Requests and flags of a tap, from `linux/if_tun.h`.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNATTACHFILTER: libc::c_ulong = 0x4010_54d5;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const IFF_TAP: i16 = 0x0002;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;
/// The reader of a tap computes checksums.
pub const TUN_F_CSUM: u32 = 1;
/// The reader of a tap takes large segments of TCP over IPv4, and over IPv6.
pub const TUN_F_TSO: [u32; 2] = [2, 4];

/// Longest wait for the taps of a dead I/O domain.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(3);

/// The ioctl requests that an uplink uses after its start; the sandbox allows no others.
pub const IOCTLS: [u64; 2] = [TUNSETOFFLOAD, TUNATTACHFILTER];

/// Options of packet sockets, from `linux/if_packet.h`.
const PACKET_VNET_HDR: libc::c_int = 15;
/// Adds a control message with the kernel's data of a frame, such as its VLAN tag, to each one that
/// is received.
pub const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_QDISC_BYPASS: libc::c_int = 20;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

/// Reason why an uplink cannot be opened; `name` is that of the tap or interface.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UplinkError {
    /// There is no such tap.
    #[error(
        "there is no tap {name}; make it and put it on your bridge: ip tuntap add dev {name} mode tap && ip link set {name} master BRIDGE up"
    )]
    NoTap { name: String },
    /// There is no such interface.
    #[error("there is no interface {name}; `ip link` lists those of this host")]
    NoInterface { name: String },
    /// The tap is attached to another process.
    #[error("{name}: another process is attached to it, such as a QEMU; give each VM a tap of its own")]
    InUse { name: String },
    /// The port's keys have changed between two readings of the file.
    #[error("{name}: the file has other keys for it by now; reload again")]
    Replaced { name: String },
    /// A system call failed.
    #[error("{name}: {what}: {source}{}", if source.kind() == io::ErrorKind::PermissionDenied { "; this takes root or CAP_NET_ADMIN and CAP_NET_RAW" } else { "" })]
    Io {
        name: String,
        /// Operation that failed, in words.
        what: &'static str,
        source: io::Error,
    },
}

/// The kind of descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A tap with virtio-net's header.
    Tap,
    /// A packet socket with a header of its own.
    Packet,
    /// A datagram socket of a test.
    Datagram,
}

/// An open uplink of one port.
#[derive(Debug)]
pub struct Uplink {
    kind: Kind,
    fd: OwnedFd,
    /// The port's address and its multicast addresses.
    addresses: Vec<Mac>,
    /// Other group frames pass the filter; `None` before the first filter.
    groups: Option<bool>,
}

impl Uplink {
    pub fn open(network: &Network, port: &Port) -> Result<Self, UplinkError> {
        let name = Self::interface(network, port).to_owned();
        let (kind, fd) = match network.uplink {
            UplinkKind::Tap => (Kind::Tap, open_tap(&name)?),
            UplinkKind::Packet => (Kind::Packet, open_packet(&name)?),
        };
        let addresses = [&[port.mac][..], &port.multicast].concat();
        let mut uplink = Self { kind, fd, addresses, groups: None };
        let failed = |what| {
            let name = name.clone();
            move |source| UplinkError::Io { name, what, source }
        };
        uplink.accept_groups(true).map_err(failed("cannot filter frames"))?;
        uplink.set_offloads(0).map_err(failed("cannot set offloads"))?;
        if kind == Kind::Packet {
            // Frames that were queued before the filter.
            let mut drained = [0u8; 64];
            while rustix::io::read(&uplink.fd, &mut drained).is_ok() {}
        }
        Ok(uplink)
    }

    /// The uplink of a port that another process has opened with [`Uplink::open`]: its filter is in
    /// force.
    #[must_use]
    pub fn adopt(network: &Network, port: &Port, fd: OwnedFd) -> Self {
        let kind = match network.uplink {
            UplinkKind::Tap => Kind::Tap,
            UplinkKind::Packet => Kind::Packet,
        };
        Self { kind, fd, addresses: [&[port.mac][..], &port.multicast].concat(), groups: Some(true) }
    }

    /// The name of a port's interface: its tap, or that of its network.
    #[must_use]
    pub fn interface<'a>(network: &'a Network, port: &'a Port) -> &'a str {
        let name = match network.uplink {
            UplinkKind::Tap => &port.tap,
            UplinkKind::Packet => &network.interface,
        };
        name.as_deref().unwrap_or_default()
    }

    /// A non-blocking datagram socket, each datagram a frame with virtio-net's header before it:
    /// for tests, which have no interface. Nothing is filtered before it is read.
    #[must_use]
    pub fn from_datagrams(fd: OwnedFd) -> Self {
        Self { kind: Kind::Datagram, fd, addresses: Vec::new(), groups: None }
    }

    /// Lets frames to unlisted groups pass the filter or not: a storm of them is stopped in the
    /// kernel.
    pub fn accept_groups(&mut self, groups: bool) -> io::Result<()> {
        if self.groups == Some(groups) {
            return Ok(());
        }
        let mut program = filter(&self.addresses, groups);
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        let done = match self.kind {
            // SAFETY: the kernel copies the program, which outlives the call.
            Kind::Tap => unsafe { libc::ioctl(self.fd.as_raw_fd(), TUNATTACHFILTER, &program) },
            Kind::Datagram => 0,
            Kind::Packet => set_option(&self.fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program),
        };
        check(done)?;
        self.groups = Some(groups);
        Ok(())
    }

    /// Sets the offloads (`TUN_F_*`) that the reader of a tap takes over.
    pub fn set_offloads(&self, offloads: u32) -> io::Result<()> {
        if self.kind != Kind::Tap {
            return Ok(());
        }
        // SAFETY: the argument is a number.
        check(unsafe { libc::ioctl(self.fd.as_raw_fd(), TUNSETOFFLOAD, libc::c_ulong::from(offloads)) })
    }

    /// The kind of its descriptor.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn check(done: libc::c_int) -> io::Result<()> {
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_option<T>(fd: &OwnedFd, level: libc::c_int, name: libc::c_int, value: &T) -> libc::c_int {
    // SAFETY: the kernel reads as many bytes as `value` has, which outlives the call.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    }
}

fn open_tap(name: &str) -> Result<OwnedFd, UplinkError> {
    let failed = |what| move |source| UplinkError::Io { name: name.to_owned(), what, source };
    // Without this, the kernel makes a new one, on no bridge, that is gone with this process.
    if index_of(name).is_none() {
        return Err(UplinkError::NoTap { name: name.to_owned() });
    }
    // kernel file
    let file = File::options().read(true).write(true).open("/dev/net/tun").map_err(failed("/dev/net/tun"))?;
    // SAFETY: zeroes are a valid value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    let begin = Instant::now();
    loop {
        // SAFETY: the request outlives the call.
        let done = check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &mut request) });
        match done {
            // A killed I/O domain has its taps until the kernel has completed its polls.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && begin.elapsed() < ATTACH_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                return Err(UplinkError::InUse { name: name.to_owned() });
            }
            other => break other.map_err(failed("cannot attach"))?,
        }
    }
    let header: libc::c_int = HEADER as libc::c_int;
    // SAFETY: the number outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETVNETHDRSZ, &header) }).map_err(failed("header"))?;
    set_nonblocking(&file).map_err(failed("cannot set flags"))?;
    Ok(file.into())
}

/// The index of an interface in this network namespace.
fn index_of(name: &str) -> Option<u32> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: the name ends with a zero, and outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index > 0).then_some(index)
}

fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    Ok(rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

fn open_packet(name: &str) -> Result<OwnedFd, UplinkError> {
    let failed = |what| move |source| UplinkError::Io { name: name.to_owned(), what, source };
    let Some(index) = index_of(name) else {
        return Err(UplinkError::NoInterface { name: name.to_owned() });
    };
    // Without a protocol: nothing is received until it is bound, after all options.
    // SAFETY: plain arguments.
    let raw = unsafe {
        libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    };
    check(raw).map_err(failed("cannot open a packet socket"))?;
    // SAFETY: a new descriptor that nothing else owns.
    let fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(raw) };
    let one: libc::c_int = 1;
    for (option, what) in [
        (PACKET_VNET_HDR, "cannot pass offloads on"),
        (PACKET_AUXDATA, "cannot receive tags of VLANs"),
        (PACKET_QDISC_BYPASS, "cannot pass the queueing discipline"),
        (PACKET_IGNORE_OUTGOING, "cannot ignore outgoing frames"),
    ] {
        check(set_option(&fd, libc::SOL_PACKET, option, &one)).map_err(failed(what))?;
    }
    // SAFETY: zeroes are a valid value of this plain structure.
    let mut membership: libc::packet_mreq = unsafe { std::mem::zeroed() };
    membership.mr_ifindex = index as libc::c_int;
    membership.mr_type = libc::PACKET_MR_PROMISC as u16;
    check(set_option(&fd, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &membership))
        .map_err(failed("cannot receive for other addresses"))?;
    // SAFETY: zeroes are a valid value of this plain structure.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index as libc::c_int;
    // SAFETY: the kernel reads the address, which outlives the call.
    let done = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    check(done).map_err(failed("cannot bind"))?;
    Ok(fd)
}

/// A classic BPF program that accepts frames to these addresses, and to all groups if `groups`.
fn filter(addresses: &[Mac], groups: bool) -> Vec<libc::sock_filter> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let unless = |code: u32, k: u32, skip: u8| libc::sock_filter { code: code as u16, jt: 0, jf: skip, k };
    let load = |size: u32, at: u32| statement(libc::BPF_LD | size | libc::BPF_ABS, at);
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let has_bit = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
    let (accept, drop) =
        (statement(libc::BPF_RET | libc::BPF_K, u32::MAX), statement(libc::BPF_RET | libc::BPF_K, 0));
    let mut program = Vec::new();
    for Mac([a, b, c, d, e, f]) in addresses {
        program.extend([
            load(libc::BPF_W, 0),
            unless(equals, u32::from_be_bytes([*a, *b, *c, *d]), 3),
            load(libc::BPF_H, 4),
            unless(equals, u32::from(u16::from_be_bytes([*e, *f])), 1),
            accept,
        ]);
    }
    if groups {
        program.extend([load(libc::BPF_B, 0), unless(has_bit, 1, 1), accept]);
    }
    program.push(drop);
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel does; only the instructions that are used.
    fn accepts(program: &[libc::sock_filter], frame: &[u8]) -> bool {
        let (mut at, mut value) = (0, 0u32);
        loop {
            let i = program[at];
            at += 1;
            match u32::from(i.code) {
                0x20 => value = u32::from_be_bytes(frame[i.k as usize..][..4].try_into().unwrap()),
                0x28 => value = u32::from(u16::from_be_bytes(frame[i.k as usize..][..2].try_into().unwrap())),
                0x30 => value = u32::from(frame[i.k as usize]),
                0x15 => at += usize::from(if value == i.k { i.jt } else { i.jf }),
                0x45 => at += usize::from(if value & i.k != 0 { i.jt } else { i.jf }),
                0x06 => return i.k != 0,
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn the_filter_accepts_its_address_and_groups() {
        let own_addresses = ["52:54:00:12:34:56", "01:0c:cd:04:00:01"].map(|a| a.parse().unwrap());
        let to = |text: &str| text.parse::<Mac>().unwrap().0;
        let (all, own) = (filter(&own_addresses, true), filter(&own_addresses, false));
        assert!(accepts(&all, &to("52:54:00:12:34:56")) && accepts(&own, &to("52:54:00:12:34:56")));
        assert!(!accepts(&all, &to("52:54:00:12:34:57")) && !accepts(&own, &to("52:54:00:13:34:56")));
        assert!(accepts(&all, &to("ff:ff:ff:ff:ff:ff")) && !accepts(&own, &to("ff:ff:ff:ff:ff:ff")));
        assert!(accepts(&all, &to("01:0c:cd:04:00:01")) && accepts(&own, &to("01:0c:cd:04:00:01")));
        assert!(accepts(&all, &to("01:0c:cd:04:00:02")) && !accepts(&own, &to("01:0c:cd:04:00:02")));
    }
}
