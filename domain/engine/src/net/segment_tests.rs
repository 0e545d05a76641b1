use proptest::prelude::*;

use super::super::frame::{ETHERNET, complete_checksum};
use super::*;

/// A TCP segment: an Ethernet header with `tags`, IP, TCP with 12 bytes of options.
fn segment(is_ipv6: bool, tags: usize, payload: usize, size: u16, flags: u8) -> Vec<u8> {
    let mut frame = vec![2; 12];
    for _ in 0..tags {
        frame.extend([0x81, 0, 0x80, 5]);
    }
    let tcp_len = TCP_HEADER + 12 + payload;
    let ip = frame.len() + 2;
    if is_ipv6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        frame.extend((tcp_len as u16).to_be_bytes());
        frame.extend([TCP, 64]);
        frame.extend(0..32u8);
    } else {
        frame.extend([8, 0, 0x45, 0]);
        frame.extend(((20 + tcp_len) as u16).to_be_bytes());
        frame.extend([0xff, 0xff, 0x40, 0, 64, TCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    }
    let tcp = frame.len();
    frame.extend([0x12, 0x34, 0, 80, 0xff, 0xff, 0xff, 0, 0, 0, 0, 9, 0x80, flags, 1, 0, 0, 0, 0, 0]);
    frame.extend([1; 12]);
    frame.extend((0..payload).map(|i| (i * 7) as u8));
    let kind = if is_ipv6 { GSO_TCPV6 } else { GSO_TCPV4 };
    let mut bytes = vec![NEEDS_CSUM, kind];
    for v in [frame.len() as u16 - payload as u16, size, tcp as u16, 16, 0] {
        bytes.extend(v.to_le_bytes());
    }
    assert!(ip < tcp);
    [bytes, frame].concat()
}

/// Segments all of it; each frame with virtio-net's header.
fn cut_all(bytes: &[u8], largest: usize) -> Vec<Vec<u8>> {
    let cut = Cut::parse(bytes).expect("a segment");
    let mut cutter = Cutter::new(bytes.len());
    cutter.buffer().copy_from_slice(bytes);
    cutter.begin(cut, bytes.len(), Priority::URGENT);
    let mut frames = Vec::new();
    while cutter.is_busy() {
        let mut buffer = vec![0xee; largest];
        let (len, priority) = cutter.next_into(&mut buffer).expect("a frame");
        assert_eq!(priority, Priority::URGENT);
        buffer.truncate(len);
        frames.push(buffer);
    }
    assert_eq!(cutter.next_into(&mut [0; 2_000]), None);
    frames
}

/// Completes the checksum as a receiver does; the sum over pseudo header and TCP is all ones.
fn check_sums(frame: &[u8], ip: usize, is_ipv6: bool) {
    let mut frame = frame.to_vec();
    complete_checksum(&mut frame);
    let ip = &frame[HEADER + ip..];
    let (tcp, addresses, length) = if is_ipv6 {
        (40, &ip[8..40], usize::from(u16::from_be_bytes([ip[4], ip[5]])) + 40)
    } else {
        assert_eq!(fold(sum(&ip[..20])), 0xffff, "IP's checksum");
        (20, &ip[12..20], usize::from(u16::from_be_bytes([ip[2], ip[3]])))
    };
    assert_eq!(length, ip.len(), "IP's length");
    let mut padded = ip[tcp..].to_vec();
    padded.resize(padded.len().next_multiple_of(2), 0);
    let all = sum(&padded) + sum(addresses) + 6 + (ip.len() - tcp) as u64;
    assert_eq!(fold(all), 0xffff, "TCP's checksum");
}

#[test]
fn a_segment_becomes_the_frames_of_a_network_card() {
    for (is_ipv6, tags) in [(false, 0), (true, 0), (false, 1), (true, 2)] {
        let bytes = segment(is_ipv6, tags, 3_001, 1_000, 0x80 | 0x10 | FIN_PSH);
        let ip = ETHERNET + 4 * tags;
        let tcp = ip + if is_ipv6 { 40 } else { 20 };
        let frames = cut_all(&bytes, 1_600);
        assert_eq!(frames.len(), 4);
        let mut payload: Vec<u8> = Vec::new();
        for (i, frame) in frames.iter().enumerate() {
            assert_eq!(frame[..2], [NEEDS_CSUM, 0], "one frame");
            check_sums(frame, ip, is_ipv6);
            let frame = &frame[HEADER..];
            assert_eq!(frame[..ip], bytes[HEADER..HEADER + ip]);
            let sequence = u32::from_be_bytes(frame[tcp + 4..tcp + 8].try_into().unwrap());
            assert_eq!(sequence, 0xffff_ff00u32.wrapping_add(i as u32 * 1_000));
            let flags = [0x90, 0x10, 0x10, 0x10 | FIN_PSH][i];
            assert_eq!(frame[tcp + 13], flags, "CWR first, FIN and PSH last");
            if !is_ipv6 {
                let number = u16::from_be_bytes([frame[ip + 4], frame[ip + 5]]);
                assert_eq!(number, 0xffffu16.wrapping_add(i as u16));
            }
            payload.extend(&frame[tcp + 32..]);
        }
        assert_eq!(payload, bytes[HEADER + tcp + 32..]);
    }
}

#[test]
fn what_is_no_segment_is_refused() {
    let good = || segment(false, 0, 3_000, 1_000, 0x10);
    assert!(Cut::parse(&good()).is_some());
    let with = |at: usize, to: &[u8]| {
        let mut bytes = good();
        bytes[at..at + to.len()].copy_from_slice(to);
        Cut::parse(&bytes)
    };
    assert_eq!(with(0, &[0]), None, "no checksum");
    assert_eq!(with(1, &[0]), None, "no segment");
    assert_eq!(with(1, &[3]), None, "UDP");
    assert_eq!(with(1, &[GSO_TCPV6]), None, "another version");
    assert_eq!(with(4, &[47, 0]), None, "frames of next to nothing");
    assert_eq!(with(4, &[0, 0]), None);
    assert_eq!(with(6, &[35, 0]), None, "TCP is not there");
    assert_eq!(with(6, &[0xff, 0xff]), None);
    assert_eq!(with(8, &[6, 0]), None, "not TCP's checksum");
    assert_eq!(with(HEADER + ETHERNET, &[0x44]), None, "a short IP header");
    assert_eq!(with(HEADER + ETHERNET + 6, &[0x20]), None, "a fragment");
    assert_eq!(with(HEADER + ETHERNET + 9, &[17]), None, "UDP in IP");
    assert_eq!(with(HEADER + 34 + 12, &[0x40]), None, "a short TCP header");
    assert_eq!(Cut::parse(&good()[..HEADER + 66]), None, "no payload");
    assert_eq!(Cut::parse(&[]), None);
    // The length that the VM gives for its headers is a hint, and not used.
    assert!(with(2, &[0xff, 0xff]).is_some());
}

#[test]
fn a_buffer_that_is_too_short_ends_the_segment() {
    let bytes = segment(false, 0, 3_000, 1_000, 0x10);
    let mut cutter = Cutter::new(bytes.len());
    cutter.buffer().copy_from_slice(&bytes);
    cutter.begin(Cut::parse(&bytes).unwrap(), bytes.len(), Priority::NORMAL);
    assert_eq!(cutter.next_into(&mut [0; 500]), None);
    assert!(!cutter.is_busy());
    cutter.begin(Cut::parse(&bytes).unwrap(), usize::MAX, Priority::NORMAL);
    cutter.clear();
    assert!(!cutter.is_busy());
}

proptest! {
    /// All payload, once, in frames of at most the size that is asked for.
    #[test]
    fn nothing_is_lost(is_ipv6: bool, tags in 0usize..3, payload in 1usize..9_000, size in 48u16..2_000) {
        let bytes = segment(is_ipv6, tags, payload, size, 0x18);
        let frames = cut_all(&bytes, 2_200);
        let headers = bytes.len() - payload;
        prop_assert_eq!(frames.len(), payload.div_ceil(size.into()));
        let together: Vec<u8> = frames.iter().flat_map(|frame| frame[headers..].to_vec()).collect();
        prop_assert_eq!(&together, &bytes[headers..]);
        let longest = Cut::parse(&bytes).unwrap().longest() + HEADER;
        prop_assert!(frames.iter().all(|frame| frame.len() <= longest));
        for frame in &frames {
            check_sums(frame, ETHERNET + 4 * tags, is_ipv6);
        }
    }

    /// No bytes of a guest make it panic, or loop without end.
    #[test]
    fn any_bytes_are_cut(
        mut bytes in prop::collection::vec(any::<u8>(), 0..300),
        patch in prop::collection::vec((0usize..300, any::<u8>()), 0..6),
        from_good: bool,
    ) {
        if from_good {
            bytes = segment(false, 0, 200, 60, 0x18);
        }
        for (at, value) in patch {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        if let Some(cut) = Cut::parse(&bytes) {
            let mut cutter = Cutter::new(bytes.len());
            cutter.buffer().copy_from_slice(&bytes);
            cutter.begin(cut, bytes.len(), Priority::NORMAL);
            let mut frames = 0;
            while cutter.next_into(&mut [0; 70_000]).is_some() {
                frames += 1;
            }
            prop_assert!(!cutter.is_busy() && frames <= bytes.len() / LEAST_SIZE + 1);
        }
    }
}
