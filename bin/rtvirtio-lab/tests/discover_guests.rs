//! VMs that are found without a spec, and what they do, next to what fio in the guests reports.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;

use rtvirtio_testkit::site::{Site, can_run, signal};
use rtvirtio_vmm::Qmp;
use rustix::process::Signal;
use serde_json::Value;

const SPEC: &str = r#"
[device]
twin = "qlc-nvme"
size = "256MiB"
[[vm]]
name = "a"
lab = "qemu"
[[vm.task]]
name = "light"
op = "read"
block = "4KiB"
rate = "100/s"
[[vm]]
name = "b"
lab = "qemu"
[[vm.task]]
name = "writer"
op = "write"
block = "16KiB"
pattern = "sequential"
rate = "50/s"
"#;

fn vm<'a>(found: &'a Value, monitor: &Path) -> &'a Value {
    let vms = found["vms"].as_array().unwrap();
    vms.iter().find(|vm| vm["qmp"].as_str().map(Path::new) == Some(monitor)).unwrap_or(&Value::Null)
}

#[test]
fn what_is_observed_is_what_fio_in_the_guests_did() {
    if !can_run("what_is_observed_is_what_fio_in_the_guests_did") {
        return;
    }
    let site = Site::new();
    site.ok(&["lab", "up", &site.write("two.toml", SPEC), "--accel", "tcg"]);
    let (_, state) = site.json(&["lab", "status"]);
    let guests = site.run_dir().join("guests");
    let monitor = |name: &str| guests.join(format!("{name}.qmp"));

    // The observation begins before the run and ends after it.
    let first = site.dir.path().join("first.toml");
    let mut child = site.spawn(&["discover", "--observe", "1h", "--json", "-o", first.to_str().unwrap()]);
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("observing") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended before it observed anything");
    }
    let (_, result) = site.json(&["lab", "run", "--for", "4s"]);
    signal(&child, Signal::INT);
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{rest}");
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();

    for (at, name, direction, size) in [(0, "a", "read", 4096), (1, "b", "write", 16384)] {
        let vm = vm(&found, &monitor(name));
        assert_eq!(vm["reach"]["qmp"].as_str().map(Path::new), Some(&*monitor(name)), "{found:#}");
        let disk = &vm["disks"][0];
        assert_eq!(disk["path"], state["device"], "{vm:#}");
        assert_eq!(disk["activity"]["source"], "qemu", "{vm:#}");
        let directions = disk["activity"]["directions"].as_array().unwrap();
        let seen =
            directions.iter().find(|d| d["direction"] == direction).unwrap_or_else(|| panic!("{vm:#}"));
        let fio = &result["runs"][0]["tasks"][at];
        let (n, of_fio) = (seen["n"].as_u64().unwrap(), fio["n"].as_u64().unwrap());
        // fio does not count its warm-up; a guest reads little else.
        assert!(n >= of_fio && n <= 4 * of_fio + 500, "QEMU saw {n} requests, fio counted {of_fio}");
        let mean = seen["mean_size"].as_u64().unwrap();
        assert!(mean.abs_diff(size) < size / 4, "{seen:#}");
        // QEMU sees a part of the time that fio sees.
        let median = seen["tails"][0]["latency_ns"].as_u64().unwrap();
        assert!(median <= 2 * fio["p50_ns"].as_u64().unwrap(), "{seen:#}\n{fio:#}");
        // Its histogram is gone with the observation.
        let mut qmp = Qmp::connect(&monitor(name), rtvirtio_testkit::HANG).unwrap();
        assert!(qmp.disk_stats().unwrap().iter().all(|d| d.read.histogram.is_none()));
    }

    // The first spec names both VMs with what they did.
    let spec = rtvirtio_files::load_spec(&first).unwrap_or_else(|e| panic!("{e}"));
    let of = |name: &str| spec.vms().iter().find(|vm| vm.name == name).unwrap();
    assert!(of("a").tasks.iter().any(|t| t.name == "reads" && t.block.0 == 4096));
    assert!(of("b").tasks.iter().any(|t| t.name == "writes" && t.block.0 == 16384));
    site.ok(&["lab", "down"]);
    site.assert_clean();
}
