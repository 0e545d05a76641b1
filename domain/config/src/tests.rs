use rtvirtio_sched::{Line, Reservation, Tspec};
use rtvirtio_units::Nanos;

use super::*;

const TEXT: &str = r#"
[[device]]
name = "nvme0"
window = 2
cost = { read = { base = "60us", per_mib = "1ms" }, write = { base = "25us", per_mib = "400us" } }

[[device.disk]]
name = "plc"
socket = "/run/plc.sock"
path = "/dev/loop0"
size = "1GiB"
reserve = { share = "15%", burst = "1ms", deadline = "2ms" }
guest_priority = { ceiling = "real-time" }

[[device.disk]]
name = "logger"
socket = "/run/logger.sock"
path = "/dev/loop0"
offset = "1GiB"
write_cap = { bytes = "20MB/s", requests = "500/s", peak = 4 }
"#;

#[test]
fn a_file_becomes_a_scheduler() {
    let file = File::parse(Path::new("iod.toml"), TEXT).unwrap();
    let sched = file.devices[0].sched();
    assert_eq!(sched.cost.read, Line { base_ns: 60_000, per_mib_ns: 1_000_000 });
    assert_eq!(
        sched.vms[0].normal,
        Some(Reservation { rate: 150_000_000, burst: 1_000_000, deadline: Nanos::from_millis(2) })
    );
    assert!(sched.vms[0].priority.read);
    assert!(!sched.vms[1].priority.read);
    let cap = sched.vms[1].caps[1];
    assert_eq!(cap.bytes, Some(Tspec { rate: 20_000_000, burst: 65_536, peak: Some(80_000_000) }));
    assert_eq!(cap.requests, Some(Tspec { rate: 500, burst: 1, peak: Some(2_000) }));
}

#[test]
fn invalid_files_are_refused_with_their_place() {
    let of = |from: &str, to: &str| {
        File::parse(Path::new("iod.toml"), &TEXT.replace(from, to)).unwrap_err().to_string()
    };
    assert!(of("window = 2", "windw = 2").contains("line 4"), "{}", of("window = 2", "windw = 2"));
    assert!(of("\"15%\"", "\"15\"").contains("line 12"));
    assert!(of("window = 2", "fifo = 10\npoll = \"50us\"").contains("50 ms in every second"));
    let late = of("deadline = \"2ms\"", "deadline = \"300us\"");
    assert!(late.contains("disk \"plc\"") && late.contains("cannot be promised 300us"), "{late}");
    assert!(of("\"15%\"", "\"115%\"").contains("are reserved"));
    // A larger urgent piece blocks others longer, and is at least the device's quantum.
    let urgent = |quantum: &str| {
        let more = format!(
            "guest_priority = {{ ceiling = \"real-time\" }}\nurgent_quantum = \"{quantum}\"\n\
             urgent = {{ share = \"1%\", burst = \"4ms\", deadline = \"90ms\" }}"
        );
        TEXT.replace("guest_priority = { ceiling = \"real-time\" }", &more)
    };
    let parse = |text: &str| File::parse(Path::new("iod.toml"), text).map_err(|e| e.to_string());
    let file = parse(&urgent("128KiB")).unwrap();
    assert_eq!(file.devices[0].sched().vms[0].urgent_quantum, Some(128 << 10));
    assert!(parse(&urgent("2MiB")).unwrap_err().contains("cannot be promised 2ms"));
    assert!(parse(&urgent("32KiB")).unwrap_err().contains("urgent quantum"));
    assert!(of("\"logger\"", "\"plc\"").contains("disk \"plc\" is there twice"));
    assert!(of("logger.sock", "plc.sock").contains("twice"));
    let burst = of("bytes = \"20MB/s\",", "bytes = \"20MB/s\", bytes_burst = \"4KiB\",");
    assert!(burst.contains("device \"nvme0\": disk \"logger\": Write bytes: a burst of 4096"), "{burst}");
    assert!(late.contains("device \"nvme0\": disk \"plc\" cannot be promised"), "{late}");
    assert!(of("name = \"plc\"", "name = \"plc\"\nformat = \"qcow2\"").contains("`qcow2`"));
}

#[test]
fn colliding_paths_are_refused() {
    let of = |from: &str, to: &str| {
        assert!(TEXT.contains(from));
        File::parse(Path::new("/etc/iod.toml"), &TEXT.replace(from, to)).map_err(|e| e.to_string())
    };
    let refused = |from: &str, to: &str| of(from, to).unwrap_err();
    let said = refused("/run/plc.sock", "/run/../etc/./iod.toml");
    assert!(said.contains("the configuration file and `socket` of disk \"plc\" are the same path"), "{said}");
    let said = refused("[[device]]", "control = \"/run//plc.sock\"\n[[device]]");
    assert!(said.contains("`control` and `socket` of disk \"plc\""), "{said}");
    let said = refused("/run/logger.sock", "/dev/loop0");
    assert!(said.contains("`path` of disk \"plc\" and `socket` of disk \"logger\""), "{said}");
    let said = refused("path = \"/dev/loop0\"\nsize", "path = \"/etc/iod.toml\"\nsize");
    assert!(said.contains("the configuration file and `path` of disk \"plc\""), "{said}");
    let said = refused("logger.sock", "x/../plc.sock");
    assert!(said.contains("`socket` of disk \"plc\" and `socket` of disk \"logger\""), "{said}");
    let file = of("size = \"1GiB\"", "size = \"1GiB\"\nsocket_group = \"kvm\"\nformat = \"raw\"").unwrap();
    let disk = &file.devices[0].disks[0];
    assert_eq!((disk.socket_group.as_deref(), disk.format), (Some("kvm"), Some(Format::Raw)));
}
