//! The twin on the real kernel: measured service times follow the declared model.

use std::path::Path;
use std::process::Command;

use rtvirtio_testkit::site::{Site, can_run, wait_for};
use serde_json::Value;

/// fio at one depth and size; returns (requests per second, shortest latency in ns, median in ns).
fn fio(device: &str, rw: &str, size: u64, depth: u32, seconds: u32) -> (f64, f64, f64) {
    let out = Command::new("fio")
        .args(["--name=t", "--direct=1", "--time_based", "--norandommap", "--lat_percentiles=1"])
        .args(["--ioengine=libaio", "--output-format=json", "--percentile_list=50"])
        .args([format!("--filename={device}"), format!("--rw={rw}"), format!("--bs={size}")])
        .args([format!("--iodepth={depth}"), format!("--runtime={seconds}")])
        .output()
        .unwrap();
    let json: Value = serde_json::from_slice(&out.stdout).unwrap();
    let side = &json["jobs"][0][if rw.contains("read") { "read" } else { "write" }];
    let number = |v: &Value| v.as_f64().unwrap();
    (
        number(&side["iops"]),
        number(&side["lat_ns"]["min"]),
        number(&side["lat_ns"]["percentile"]["50.000000"]),
    )
}

/// Declared service time of the microSD twin, in ns: lab/testbed/profiles/microsd.toml.
fn microsd(read: bool, bytes: u64) -> f64 {
    if read { 600e3 + 56.5 * bytes as f64 } else { 2e6 + 150.0 * bytes as f64 }
}

#[test]
fn measured_service_times_follow_the_model() {
    if !can_run("measured_service_times_follow_the_model") {
        return;
    }
    let site = Site::new();
    let spec = site.write("s.toml", "[device]\ntwin = \"microsd\"\nsize = \"64MiB\"\n[[vm]]\nname = \"a\"\nlab = \"process\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n");
    site.ok(&["lab", "up", &spec]);
    let (_, state) = site.json(&["lab", "status"]);
    let device = state["device"].as_str().unwrap();
    let queue = Path::new("/sys/block").join(device.trim_start_matches("/dev/")).join("queue");
    std::fs::write(queue.join("scheduler"), "none").unwrap();
    // No request is faster than the model, on any machine. How much FUSE, the loop device and
    // wake-ups add is a measurement: `rtvirtio-lab profile twin:microsd`.
    for (rw, read) in [("randread", true), ("randwrite", false)] {
        for bytes in [4096, 32_768, 131_072] {
            let model = microsd(read, bytes);
            let (_, shortest, median) = fio(device, rw, bytes, 1, 2);
            assert!(shortest >= model, "{rw} {bytes}: {shortest} ns is shorter than the model's {model}");
            println!("{rw} {bytes}: the shortest {:.0} us above the model", (shortest - model) / 1e3);
            assert!(median >= model, "{rw} {bytes}: median {median}");
        }
    }
    // One channel: depth brings no more than one request per service time.
    let (iops, _, _) = fio(device, "randread", 4096, 16, 2);
    let most = 1e9 / microsd(true, 4096);
    assert!(iops <= most * 1.02, "{iops} of at most {most}");
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn a_dead_twin_is_cleaned_up() {
    if !can_run("a_dead_twin_is_cleaned_up") {
        return;
    }
    let site = Site::new();
    site.ok(&["lab", "up", "examples/fig7-process.toml"]);
    let (_, state) = site.json(&["lab", "status"]);
    let pid: i32 = state["twin"]["process"]["pid"].as_i64().unwrap().try_into().unwrap();
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    wait_for("the twin's end", || {
        !Path::new(&format!("/proc/{pid}/fd")).exists()
            || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z"))
    });
    // Tasks on a dead device end with an error, not with a result.
    let out = site.output(&["lab", "run", "--for", "1s"]);
    assert_eq!(out.status.code(), Some(1), "{}", rtvirtio_testkit::site::text(&out.stderr));
    site.ok(&["lab", "down"]);
    site.assert_clean();
}
