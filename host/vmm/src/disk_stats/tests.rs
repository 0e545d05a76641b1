use super::*;

fn histogram(bins: &[u64]) -> Histogram {
    Histogram { boundaries: vec![10, 100, 1000], bins: bins.to_vec() }
}

#[test]
fn a_quantile_is_the_upper_limit_of_its_bin() {
    let h = histogram(&[90, 9, 1, 0]);
    assert_eq!(h.count(), 100);
    assert_eq!(h.quantile(0.5), Some(10));
    assert_eq!(h.quantile(0.9), Some(10));
    assert_eq!(h.quantile(0.91), Some(100));
    assert_eq!(h.quantile(0.9999), Some(1000));
    assert_eq!(histogram(&[1, 0, 0, 1]).quantile(0.9999), None, "above the last limit nothing is known");
    assert_eq!(histogram(&[0, 0, 0, 0]).quantile(0.5), None, "no request, no quantile");
}

#[test]
fn a_difference_needs_the_same_histogram() {
    let then = histogram(&[1, 1, 0, 0]);
    assert_eq!(histogram(&[3, 1, 0, 2]).since(&then), Some(histogram(&[2, 0, 0, 2])));
    assert_eq!(histogram(&[0, 1, 0, 0]).since(&then), None, "it was set anew");
    let other = Histogram { boundaries: vec![10, 100, 999], bins: vec![3, 1, 0, 2] };
    assert_eq!(other.since(&then), None);
}

#[test]
fn disks_are_joined_by_device_or_by_name() {
    let backends: Vec<Backend> = serde_json::from_str(
        r#"[{"device":"","qdev":"/machine/peripheral/d0/virtio-backend","inserted":{"file":"json:{}","drv":"raw","ro":false,
             "image":{"filename":"/dev/vg0/plc"}}},
            {"device":"ide1-cd0","qdev":"","inserted":{"file":"/srv/a.iso","drv":"raw","ro":true}},
            {"device":"floppy0"}]"#,
    )
    .unwrap();
    let entry = |device: &str, qdev: &str, ops: u64| {
        json!({"device": device, "qdev": qdev, "stats": {
            "rd_operations": ops, "rd_bytes": 4096 * ops, "rd_total_time_ns": 5, "wr_operations": 0, "wr_bytes": 0,
            "wr_total_time_ns": 0, "flush_operations": 2, "flush_total_time_ns": 9,
            "rd_latency_histogram": {"boundaries": [10], "bins": [1, 2]}}})
    };
    let entries = serde_json::from_value(json!([
        entry("", "/machine/peripheral/d0/virtio-backend", 3),
        entry("ide1-cd0", "", 1),
        entry("floppy0", "", 0),
        entry("", "", 7)
    ]))
    .unwrap();
    let disks = join(&backends, entries);
    let named: Vec<_> = disks.iter().map(|d| (d.id.as_str(), d.file.as_deref(), d.read_only)).collect();
    assert_eq!(
        named,
        [
            ("/machine/peripheral/d0/virtio-backend", Some("/dev/vg0/plc"), false),
            ("ide1-cd0", Some("/srv/a.iso"), true),
            ("floppy0", None, false)
        ],
        "what no command can name is left out"
    );
    assert_eq!((disks[0].read.ops, disks[0].read.bytes, disks[0].flush.ops), (3, 12288, 2));
    assert_eq!(disks[0].read.histogram.as_ref().unwrap().count(), 3);
    assert_eq!(disks[0].counters(Direction::Write), &Counters::default());
}

#[test]
fn a_block_node_written_out_has_a_plain_path() {
    let raw = r#"json:{"offset":0,"driver":"raw","size":1,"file":{"driver":"host_device","filename":"/dev/loop0"}}"#;
    assert_eq!(plain(raw), "/dev/loop0");
    assert_eq!(plain("/srv/json:{a"), "/srv/json:{a");
    assert_eq!(plain("json:{"), "json:{", "what is not understood stays as it is");
    assert_eq!(plain(r#"json:{"driver":"null-co"}"#), r#"json:{"driver":"null-co"}"#);
}
