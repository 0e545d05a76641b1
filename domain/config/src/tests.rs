use rtvirtio_sched::bound::Refusal;
use rtvirtio_sched::{ConfigError, Line, Reservation, Tspec};
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

fn parse(text: &str) -> Result<File, FileError> {
    File::parse(Path::new("/etc/iod.toml"), text)
}

fn replaced(from: &str, to: &str) -> Result<File, FileError> {
    assert!(TEXT.contains(from));
    parse(&TEXT.replace(from, to))
}

fn refused(from: &str, to: &str) -> FileError {
    replaced(from, to).unwrap_err()
}

#[test]
fn memory_is_pinned_up_to_a_size() {
    let file = replaced("size = \"1GiB\"", "size = \"1GiB\"\npin = \"64GiB\"").unwrap();
    let pinned = file.devices[0].disks.iter().map(|disk| disk.pin);
    assert_eq!(pinned.collect::<Vec<_>>(), [Some(rtvirtio_units::Bytes(64 << 30)), None]);
    assert!(replaced("size = \"1GiB\"", "size = \"1GiB\"\npin = true").is_err());
}

#[test]
fn invalid_files_are_refused_with_their_place() {
    let syntax = |from: &str, to: &str| match refused(from, to) {
        FileError::Parse { message, .. } => message,
        other => panic!("{other}"),
    };
    assert!(syntax("window = 2", "windw = 2").contains("line 4"));
    assert!(syntax("\"15%\"", "\"15\"").contains("line 12"));
    assert!(syntax("name = \"plc\"", "name = \"plc\"\nformat = \"qcow2\"").contains("`qcow2`"));
    let conflict = refused("window = 2", "fifo = 10\npoll = \"50us\"");
    assert!(matches!(&conflict, FileError::Conflict { device } if device == "nvme0"), "{conflict}");
    let twice = |from: &str, to: &str| match refused(from, to) {
        FileError::Duplicate { what, name } => (what, name),
        other => panic!("{other}"),
    };
    assert_eq!(twice("\"logger\"", "\"plc\""), ("disk", "plc".to_owned()));
    assert_eq!(twice("logger.sock", "plc.sock"), ("socket", "/run/plc.sock".to_owned()));
    let numbers = refused("bytes = \"20MB/s\",", "bytes = \"20MB/s\", bytes_burst = \"4KiB\",");
    let FileError::Sched { device, message, source } = &numbers else { panic!("{numbers}") };
    assert!(matches!(source, ConfigError::Burst { burst: 4_096, piece: 65_536, .. }), "{numbers}");
    assert_eq!(device, "nvme0");
    assert!(message.starts_with("disk \"logger\": Write bytes"), "{message}");
}

#[test]
fn rates_act_as_written_or_are_refused() {
    let slow = replaced("requests = \"500/s\"", "requests = \"30/min\"").unwrap();
    let cap = slow.devices[0].sched().vms[1].caps[1];
    let rate = cap.requests.unwrap().rate as f64 / cap.per_request as f64;
    assert_eq!(rate, 0.5);
    for (from, to, why) in [
        ("requests = \"500/s\"", "requests = \"0/s\"", "`requests`: 0/s cannot be counted exactly"),
        ("bytes = \"20MB/s\"", "bytes = \"0.3B/s\"", "`bytes`: 0.3 bytes per second"),
        ("peak = 4", "peak = 4, share = \"0.00000001%\"", "`share`"),
    ] {
        let error = refused(from, to);
        assert!(matches!(error, FileError::Rate { .. }), "{error}");
        assert!(error.to_string().starts_with("disk \"logger\": `write_cap`: "), "{error}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn reservations_beyond_the_device_are_refused() {
    let deadline = |e: FileError| match e {
        FileError::Refused { device, message, source: Refusal::Deadline { deadline, .. } } => {
            assert_eq!(device, "nvme0");
            assert!(message.starts_with("disk \"plc\" "), "{message}");
            deadline
        }
        other => panic!("{other}"),
    };
    let late = refused("deadline = \"2ms\"", "deadline = \"300us\"");
    assert_eq!(deadline(late), Nanos::from_micros(300));
    let share = refused("\"15%\"", "\"115%\"");
    assert!(matches!(share, FileError::Refused { source: Refusal::Rate { .. }, .. }), "{share}");
    // Two pieces are served at once where the window always has two.
    let with = |window: &str| {
        let text = TEXT.replace("window = 2", &format!("window = {window}\nparallel = 2"));
        parse(&text.replace("\"15%\"", "\"115%\""))
    };
    assert!(with("2").is_ok());
    let smaller = with("{ start = 2, least = 1, most = 2 }").unwrap_err();
    assert!(matches!(smaller, FileError::Refused { source: Refusal::Rate { .. }, .. }), "{smaller}");
    // A larger urgent piece blocks others longer, and is at least the device's quantum.
    let urgent = |quantum: &str| {
        let more = format!(
            "guest_priority = {{ ceiling = \"real-time\" }}\nurgent_quantum = \"{quantum}\"\n\
             urgent = {{ share = \"1%\", burst = \"4ms\", deadline = \"90ms\" }}"
        );
        replaced("guest_priority = { ceiling = \"real-time\" }", &more)
    };
    let file = urgent("128KiB").unwrap();
    assert_eq!(file.devices[0].sched().vms[0].urgent_quantum, Some(128 << 10));
    assert_eq!(deadline(urgent("2MiB").unwrap_err()), Nanos::from_millis(2));
    let small = urgent("32KiB").unwrap_err();
    assert!(
        matches!(&small, FileError::Sched { source: ConfigError::Range { what, value: 32_768, .. }, .. } if what.ends_with("urgent quantum")),
        "{small}"
    );
}

#[test]
fn colliding_paths_are_refused() {
    let colliding = |from: &str, to: &str| match refused(from, to) {
        FileError::Collision { first, second, .. } => (first, second),
        other => panic!("{other}"),
    };
    let pair = |first: &str, second: &str| (first.to_owned(), second.to_owned());
    let config = "the configuration file";
    let (socket, path) = ("`socket` of disk \"plc\"", "`path` of disk \"plc\"");
    let other = "`socket` of disk \"logger\"";
    assert_eq!(colliding("/run/plc.sock", "/run/../etc/./iod.toml"), pair(config, socket));
    assert_eq!(
        colliding("[[device]]", "control = \"/run//plc.sock\"\n[[device]]"),
        pair("`control`", socket)
    );
    assert_eq!(colliding("/run/logger.sock", "/dev/loop0"), pair(path, other));
    assert_eq!(
        colliding("path = \"/dev/loop0\"\nsize", "path = \"/etc/iod.toml\"\nsize"),
        pair(config, path)
    );
    assert_eq!(colliding("logger.sock", "x/../plc.sock"), pair(socket, other));
    let file =
        replaced("size = \"1GiB\"", "size = \"1GiB\"\nsocket_group = \"kvm\"\nformat = \"raw\"").unwrap();
    let disk = &file.devices[0].disks[0];
    assert_eq!((disk.socket_group.as_deref(), disk.format), (Some("kvm"), Some(Format::Raw)));
}
