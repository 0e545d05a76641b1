//! Software segmentation of large TCP segments (TSO), into the frames that a network card would
//! make of them.
//!
//! A segment of 64 KiB is one piece for the tap, and blocks a link of 100 Mbit/s for 5 ms. So where
//! frames are ordered or counted, it is segmented here: each frame is then charged, capped and
//! ordered by itself, and no frame on the link is longer than `mtu` allows. Checksums stay with the
//! receiver, as the VM left them.

use rtvirtio_sched::Priority;

use super::frame::{
    GSO_ECN, GSO_TCPV4, GSO_TCPV6, HEADER, IPV4, IPV4_HEADER, IPV6, IPV6_HEADER, NEEDS_CSUM, content, field,
};

/// Length of TCP's header without options, and of the part before its checksum.
const TCP_HEADER: usize = 20;
const TCP_CHECKSUM: usize = 16;
const TCP: u8 = 6;
/// Flags of TCP: of the last frame only, and of the first one only.
const FIN_PSH: u8 = 0x09;
const CWR: u8 = 0x80;
/// Least payload of a frame: Linux sends no shorter ones (`TCP_MIN_SND_MSS`), and a length of 1
/// would make 65 000 frames of a segment.
const LEAST_SIZE: usize = 48;

/// Layout of a segment, and the size of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    is_ipv6: bool,
    /// Offsets in the frame: of IP, of TCP, of the payload.
    ip: usize,
    tcp: usize,
    payload: usize,
    /// Payload of each frame but the last.
    size: usize,
}

impl Cut {
    /// Parses a segment with virtio-net's header before it; `None` where the header does not
    /// describe a TCP segment.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (header, frame) = bytes.split_at_checked(HEADER)?;
        let kind = header[1] & !GSO_ECN;
        let (size, tcp) = (field(header, 4), field(header, 6));
        let word = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
        let (protocol, ip) = content(frame)?;
        let first = *frame.get(ip)?;
        let is_described = match kind {
            // Not a fragment, and TCP is where the header says.
            GSO_TCPV4 => {
                let (length, fragment) = (usize::from(first & 15) * 4, word(ip + 6)? & 0x3fff);
                let is_tcp = *frame.get(ip + 9)? == TCP && fragment == 0;
                protocol == IPV4 && first >> 4 == 4 && length >= IPV4_HEADER && is_tcp && tcp == ip + length
            }
            // Extension headers may be between.
            GSO_TCPV6 => protocol == IPV6 && first >> 4 == 6 && tcp >= ip + IPV6_HEADER,
            _ => false,
        };
        let length = usize::from(*frame.get(tcp + 12)? >> 4) * 4;
        let payload = tcp + length;
        let is_whole = length >= TCP_HEADER && payload < frame.len() && size >= LEAST_SIZE;
        let is_summed = header[0] & NEEDS_CSUM != 0 && field(header, 8) == TCP_CHECKSUM;
        let cut = Self { is_ipv6: kind == GSO_TCPV6, ip, tcp, payload, size };
        (is_described && is_whole && is_summed).then_some(cut)
    }

    /// Length of the longest frame, without FCS.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.payload + self.size
    }

    /// Writes the frame whose payload begins `at` bytes into that of the segment, with virtio-net's
    /// header before it; returns the length of both and of the payload. `None` behind the end, or
    /// where `to` is too short.
    fn frame(&self, segment: &[u8], at: usize, to: &mut [u8]) -> Option<(usize, usize)> {
        let (frame, begin) = (segment.get(HEADER..)?, self.payload + at);
        let len = frame.len().checked_sub(begin).filter(|left| *left > 0)?.min(self.size);
        let is_last = begin + len == frame.len();
        let to = to.get_mut(..HEADER + self.payload + len)?;
        let whole = to.len();
        let (header, to) = to.split_at_mut(HEADER);
        to[..self.payload].copy_from_slice(&frame[..self.payload]);
        to[self.payload..].copy_from_slice(&frame[begin..begin + len]);
        header.fill(0);
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&(self.tcp as u16).to_le_bytes());
        header[8..10].copy_from_slice(&(TCP_CHECKSUM as u16).to_le_bytes());
        let segment_len = (self.payload - self.tcp + len) as u32;
        let (ip, tcp) = to[self.ip..].split_at_mut(self.tcp - self.ip);
        let addresses = if self.is_ipv6 {
            let length = (ip.len() - IPV6_HEADER) as u32 + segment_len;
            ip[4..6].copy_from_slice(&(length as u16).to_be_bytes());
            sum(&ip[8..IPV6_HEADER])
        } else {
            let length = ip.len() as u32 + segment_len;
            ip[2..4].copy_from_slice(&(length as u16).to_be_bytes());
            let number = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add((at / self.size) as u16);
            ip[4..6].copy_from_slice(&number.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = !fold(sum(ip));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
            sum(&ip[12..IPV4_HEADER])
        };
        let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]).wrapping_add(at as u32);
        tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
        tcp[13] &= if is_last { 0xff } else { !FIN_PSH };
        tcp[13] &= if at == 0 { 0xff } else { !CWR };
        // The pseudo header (RFC 9293, section 3.1); the receiver adds the rest.
        let pseudo = fold(addresses + u64::from(TCP) + u64::from(segment_len));
        tcp[TCP_CHECKSUM..TCP_CHECKSUM + 2].copy_from_slice(&pseudo.to_be_bytes());
        Some((whole, len))
    }
}

/// The sum of RFC 1071 over whole words, not folded.
fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks_exact(2).map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]]))).sum()
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A segment that is being segmented.
#[derive(Debug)]
pub struct Cutter {
    data: Vec<u8>,
    /// The segment in `data`, its length, its priority, and the segmented bytes of its payload.
    current: Option<(Cut, usize, Priority, usize)>,
}

impl Cutter {
    /// A buffer for a segment of `largest` bytes, its header included.
    #[must_use]
    pub fn new(largest: usize) -> Self {
        Self { data: vec![0; largest], current: None }
    }

    /// Whether frames are left.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.current.is_some()
    }

    /// Buffer for the next segment.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.data
    }

    /// Starts to segment the first `len` bytes of the buffer.
    pub fn begin(&mut self, cut: Cut, len: usize, priority: Priority) {
        self.current = Some((cut, len.min(self.data.len()), priority, 0));
    }

    /// Writes the next frame into a buffer; returns its length, header included, and its priority.
    pub fn next_into(&mut self, to: &mut [u8]) -> Option<(usize, Priority)> {
        let (cut, len, priority, at) = self.current?;
        let segment = &self.data[..len];
        let Some((written, payload)) = cut.frame(segment, at, to) else {
            self.current = None;
            return None;
        };
        let at = at + payload;
        let is_left = HEADER + cut.payload + at < len;
        self.current = is_left.then_some((cut, len, priority, at));
        Some((written, priority))
    }

    /// Drops the remaining frames.
    pub fn clear(&mut self) {
        self.current = None;
    }
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
