use std::path::Path;

use proptest::prelude::*;
use rtvirtio_domain_config::File;

use super::*;

fn port(keys: &str) -> PortRules {
    let text = format!(
        "[[network]]\nname = \"n\"\n[[network.port]]\nname = \"a\"\nsocket = \"/s\"\ntap = \"t\"\nmac = \"52:54:00:00:00:01\"\n{keys}"
    );
    PortRules::new(&File::parse(Path::new("x"), &text).unwrap().networks[0].ports[0])
}

fn frame(destination: &str, source: &str, rest: &[u8]) -> Vec<u8> {
    let mac = |text: &str| text.parse::<Mac>().unwrap().0;
    [&mac(destination)[..], &mac(source)[..], rest].concat()
}

const OWN: &str = "52:54:00:00:00:01";
const OTHER: &str = "52:54:00:00:00:02";
const SAMPLED_VALUES: &str = "01:0c:cd:04:00:01";

#[test]
fn fields_are_found_behind_tags() {
    let plain = Frame::parse(&frame(OTHER, OWN, &[0x08, 0, 0x45, 0xb8])).unwrap();
    assert_eq!((plain.vlan, plain.dscp), (None, Some(46)));
    let tagged = Frame::parse(&frame(OTHER, OWN, &[0x81, 0, 0x80, 5, 0x88, 0xba, 1])).unwrap();
    assert_eq!((tagged.vlan, tagged.dscp), (Some((5, 4)), None));
    let twice = [0x88, 0xa8, 0x20, 7, 0x81, 0, 0xe0, 9, 0x86, 0xdd, 0x6b, 0x80];
    let twice = Frame::parse(&frame(OTHER, OWN, &twice)).unwrap();
    assert_eq!((twice.vlan, twice.dscp), (Some((7, 1)), Some(46)));
    assert_eq!(Frame::parse(&frame(OTHER, OWN, &[8])), None);
    // A tag without the type behind it.
    assert_eq!(Frame::parse(&frame(OTHER, OWN, &[0x81, 0, 0])), None);
}

/// Linux and switches remove a tag with identifier 0, and use the next one.
#[test]
fn the_vlan_is_that_of_the_first_tag_with_an_identifier() {
    let of = |rest: &[u8]| Frame::parse(&frame(OTHER, OWN, rest)).unwrap();
    let behind_priority = of(&[0x81, 0, 0xa0, 0, 0x81, 0, 0x20, 6, 8, 0, 0x45, 0]);
    assert_eq!(behind_priority.vlan, Some((6, 5)));
    assert_eq!(of(&[0x81, 0, 0xa0, 0, 8, 0, 0x45, 0]).vlan, Some((0, 5)));
    let third = of(&[0x81, 0, 0, 0, 0x81, 0, 0, 0, 0x81, 0, 0, 6, 8, 0]);
    let rules = port("vlans = [0, 5]");
    assert!(!rules.may_send(&behind_priority) && !rules.may_send(&third), "VLAN 6 is another's");
    assert!(!rules.may_send(&of(&[0x88, 0xa8, 0, 0, 0x88, 0xa8, 0, 0, 0x81, 0, 0, 6, 8, 0])));
    assert!(rules.may_send(&of(&[0x81, 0, 0xa0, 0, 8, 0, 0x45, 0])), "a priority alone");
}

/// A switch that accepts an old type as a tag finds a VLAN behind it that was not checked.
#[test]
fn a_tag_of_an_old_type_is_of_no_vlan_that_a_port_has() {
    let of = |rest: &[u8]| Frame::parse(&frame(OTHER, OWN, rest)).unwrap();
    let rules = port("vlans = [0, 200]");
    for kind in [0x91, 0x92, 0x93] {
        let old = of(&[kind, 0, 0, 200, 8, 0, 0x45, 0]);
        assert!(!rules.may_send(&old) && rules.delivery(&old) == Delivery::Drop, "{kind:#x}00");
        assert!(!rules.may_send(&of(&[0x81, 0, 0xa0, 0, kind, 0, 0, 200, 8, 0])), "behind a priority");
        assert!(rules.may_send(&of(&[0x81, 0, 0, 200, kind, 0, 0, 6, 8, 0])), "within its own VLAN");
        assert!(port("").may_send(&old), "any VLAN");
    }
    assert!(
        !rules.may_send(&of(&[0x88, 0xa8, 0, 6, 8, 0])) && rules.may_send(&of(&[0x88, 0xa8, 0, 200, 8, 0]))
    );
}

#[test]
fn the_links_own_protocols_are_not_for_guests() {
    let of = |to: &str, rest: &[u8]| Frame::parse(&frame(to, OWN, rest)).unwrap();
    let (rules, allowed) = (port(""), port("link_local = true"));
    let pause = [0x88, 8, 0, 1, 0xff, 0xff];
    for frame in [
        of("01:80:c2:00:00:00", &[0, 38, 0x42, 0x42, 3]),
        of("01:80:c2:00:00:02", &[0x88, 9, 1]),
        of("01:80:c2:00:00:0e", &[0x88, 0xcc]),
        of("01:80:c2:00:00:0f", &[0x81, 0, 0, 5, 8, 0]),
        of("01:80:c2:00:00:01", &pause),
        // Also to the switch's own address.
        of(OTHER, &pause),
    ] {
        assert!(rules.may_send(&frame) && !rules.may_send_to_link(&frame), "{frame:?}");
        assert!(allowed.may_send_to_link(&frame), "{frame:?}");
    }
    for to in ["01:80:c2:00:00:10", "01:80:c2:00:01:00", SAMPLED_VALUES, "ff:ff:ff:ff:ff:ff", OTHER] {
        assert!(rules.may_send_to_link(&of(to, &[8, 0, 0x45, 0])), "{to}");
    }
}

#[test]
fn a_port_sends_as_itself_and_gets_what_is_for_it() {
    let rules = port(&format!("multicast = [\"{SAMPLED_VALUES}\"]\nvlans = [5]"));
    let of = |destination, source, tag: u8| {
        Frame::parse(&frame(destination, source, &[0x81, 0, 0x80, tag, 8, 0, 0x45, 0])).unwrap()
    };
    assert!(rules.may_send(&of(OTHER, OWN, 5)));
    assert!(!rules.may_send(&of(OTHER, OTHER, 5)), "another source");
    assert!(!rules.may_send(&of(OTHER, OWN, 6)), "another VLAN");
    assert_eq!(rules.delivery(&of(OWN, OTHER, 5)), Delivery::Accept);
    assert_eq!(rules.delivery(&of(SAMPLED_VALUES, OTHER, 5)), Delivery::Accept);
    assert_eq!(rules.delivery(&of("01:0c:cd:04:00:02", OTHER, 5)), Delivery::Limited);
    assert_eq!(rules.delivery(&of("ff:ff:ff:ff:ff:ff", OTHER, 5)), Delivery::Limited);
    assert_eq!(rules.delivery(&of(OTHER, OWN, 5)), Delivery::Drop);
    assert_eq!(rules.delivery(&of(OWN, OTHER, 6)), Delivery::Drop);
    assert!(port("").may_send(&of(OTHER, OWN, 6)), "any VLAN");
}

#[test]
fn urgent_frames_are_known_by_their_code_points() {
    let rules = port("urgent_pcp = [4]\nurgent_dscp = [46]");
    let of = |rest: &[u8]| rules.priority(&Frame::parse(&frame(OTHER, OWN, rest)).unwrap());
    assert_eq!(of(&[0x81, 0, 0x80, 0, 0x88, 0xba]), Priority::URGENT);
    assert_eq!(of(&[0x81, 0, 0x60, 0, 0x88, 0xba]), Priority::NORMAL);
    assert_eq!(of(&[8, 0, 0x45, 0xb8]), Priority::URGENT);
    assert_eq!(of(&[8, 0, 0x45, 0]), Priority::NORMAL);
}

fn header(flags: u8, kind: u8, headers: u16, segment: u16, start: u16, offset: u16) -> Vec<u8> {
    let mut bytes = vec![flags, kind];
    for v in [headers, segment, start, offset, 0] {
        bytes.extend(v.to_le_bytes());
    }
    bytes
}

#[test]
fn headers_describe_their_frame() {
    let all = feature::offered(true);
    let with = |header: Vec<u8>| [header, vec![0; 60]].concat();
    assert!(is_valid_header(&with(header(0, 0, 0, 0, 0, 0)), 0));
    assert!(is_valid_header(&with(header(1, 0, 0, 0, 34, 16)), all));
    assert!(!is_valid_header(&with(header(1, 0, 0, 0, 34, 16)), 0), "not negotiated");
    assert!(!is_valid_header(&with(header(1, 0, 0, 0, 34, 25)), all), "beyond the frame");
    assert!(!is_valid_header(&with(header(1, 0, 0, 0, 65_535, 65_535)), all));
    assert!(!is_valid_header(&with(header(4, 0, 0, 0, 0, 0)), all), "unknown flag");
    assert!(is_valid_header(&with(header(1, 1, 54, 1_448, 34, 16)), all));
    assert!(!is_valid_header(&with(header(0, 1, 54, 1_448, 34, 16)), all), "segments need checksums");
    assert!(!is_valid_header(&with(header(1, 1, 54, 0, 34, 16)), all), "no length of a segment");
    assert!(!is_valid_header(&with(header(1, 3, 54, 1_448, 34, 16)), all), "UDP is not offered");
    assert!(!is_valid_header(&with(header(1, 1, 54, 1_448, 34, 16)), feature::offered(false)));
    assert_eq!(segmentation(&header(1, 1, 0, 0, 0, 0)), Some(false));
    assert_eq!(segmentation(&header(1, 0x84, 0, 0, 0, 0)), Some(true));
    assert_eq!(segmentation(&header(1, 0, 0, 0, 0, 0)), None);
    assert!(!is_valid_header(&[0; 11], all));
}

/// A checksum is written after the frame was checked, and its sender chooses which sum that is.
#[test]
fn no_checksum_changes_what_was_checked() {
    let all = feature::offered(true);
    let of = |start: u16, offset: u16, rest: &[u8]| {
        let frame = [frame(OTHER, OWN, rest), vec![0; 60]].concat();
        is_valid_header(&[header(1, 0, 0, 0, start, offset), frame].concat(), all)
    };
    let (ipv4, ipv6) = (&[8, 0, 0x45, 0][..], &[0x86, 0xdd, 0x60, 0][..]);
    assert!(!of(0, 6, ipv4), "the source");
    assert!(!of(0, 16, ipv4) && !of(14, 0, ipv4) && !of(33, 6, ipv4), "the code point");
    assert!(of(34, 6, ipv4) && of(34, 16, ipv4) && of(38, 16, ipv4));
    assert!(!of(53, 6, ipv6) && of(54, 16, ipv6));
    let tagged = &[0x81, 0, 0x80, 5, 8, 0, 0x45, 0][..];
    assert!(!of(14, 0, tagged) && !of(34, 6, tagged) && of(38, 6, tagged), "the VLAN");
    assert!(!of(13, 0, &[0x88, 0xba]) && of(14, 0, &[0x88, 0xba]));
}

/// The sum over the whole range, its own field included, is all ones.
#[test]
fn a_checksum_is_completed() {
    for len in [40usize, 41] {
        let mut bytes = [header(1, 0, 0, 0, 14, 6), (0..len as u8).collect()].concat();
        // The pseudo header's sum is there already.
        bytes[HEADER + 20..HEADER + 22].copy_from_slice(&0x1234u16.to_be_bytes());
        let pseudo = 0x1234u64;
        complete_checksum(&mut bytes);
        assert_eq!(bytes[0], 0);
        let mut sum = pseudo;
        for pair in bytes[HEADER + 14..].chunks(2) {
            sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        assert_eq!(sum, 0xffff);
    }
}

proptest! {
    /// No bytes of a guest make these panic.
    #[test]
    fn any_bytes_are_parsed(mut bytes in prop::collection::vec(any::<u8>(), 0..100), features in any::<u64>()) {
        let _ = Frame::parse(&bytes);
        let _ = is_valid_header(&bytes, features);
        complete_checksum(&mut bytes);
    }
}
