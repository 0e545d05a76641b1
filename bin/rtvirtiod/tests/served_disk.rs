//! A disk that the I/O domain serves, in the service's verdicts: a real domain on a loop device,
//! and a client of its own protocol in place of a QEMU.

mod common;

use std::fs;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use common::disk::Disk;
use common::{Rig, answer};
use rtvirtio_domain_client::{BlkRequest, Client, Options};
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::{program, text, wait_for};
use serde_json::Value;

/// The I/O domain's process, ended when this is dropped.
struct Iod(Child);

impl Drop for Iod {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads one after the other until this is dropped.
struct Reads {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reads {
    fn start(client: Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let run = move || {
            // All of it, or the connection would end here.
            let mut client = client;
            let mut sector = 0;
            while !stopped.load(Ordering::Relaxed) {
                let queue = &mut client.queues[0];
                sector = (sector + 8) % 4096;
                queue.push(&BlkRequest { kind: 0, priority: 0, sector, len: 4096 }).unwrap();
                queue.notify().unwrap();
                let begin = Instant::now();
                while queue.pop_used().is_none() {
                    assert!(begin.elapsed() < HANG, "no answer");
                    std::thread::sleep(std::time::Duration::from_micros(200));
                }
            }
        };
        Self { stop, thread: Some(std::thread::spawn(run)) }
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn observation(rig: &Rig) -> Value {
    let stream = UnixStream::connect(rig.socket()).unwrap();
    serde_json::from_str(&answer(stream, "GET", "/v1/observation", "localhost").1).unwrap()
}

#[test]
fn a_disk_of_the_io_domain_is_judged_with_its_caps_and_with_what_late_requests_waited_for() {
    let test = "a_disk_of_the_io_domain_is_judged_with_its_caps_and_with_what_late_requests_waited_for";
    let mut rig = Rig::new();
    let Some(disk) = Disk::new(test, &rig) else { return };
    let (dir, device) = (rig.site.dir.path().to_owned(), format!("/dev/{}", disk.device.name));
    fs::create_dir_all(rig.site.run_dir()).unwrap();
    // Where the service looks for an I/O domain.
    let control = rig.site.run_dir().join("iod.sock");
    let config = dir.join("iod.toml");
    let socket = dir.join("plc.sock");
    fs::write(
        &config,
        format!(
            "control = \"{}\"\n[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"plc\"\nsocket = \"{}\"\npath = \"{device}\"\n\
             read_cap = {{ requests = \"400/s\" }}\n",
            control.display(),
            socket.display()
        ),
    )
    .unwrap();
    let mut iod = Command::new(program("rtvirtio-iod"));
    let log = fs::File::create(dir.join("iod.log")).unwrap();
    let iod = Iod(iod.arg("--config").arg(&config).stdout(Stdio::null()).stderr(log).spawn().unwrap());
    wait_for("the domain", || UnixStream::connect(&control).is_ok() && socket.exists());
    let reads = Reads::start(Client::connect(&socket, Options::default()).unwrap());

    // This process is what a QEMU would be. Nothing meets 1 us; anything meets a minute.
    fs::write(rig.config(), "observe = \"300ms\"\n").unwrap();
    fs::write(
        rig.contracts().join("plc.toml"),
        format!(
            "[device]\npath = \"{device}\"\n[[vm]]\nname = \"plc\"\npid = {}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
             targets = [{{ percentile = \"p50\", latency = \"1us\" }}, {{ percentile = \"p99\", latency = \"60s\" }}]\n",
            std::process::id()
        ),
    )
    .unwrap();
    rig.start(&[]);
    let begin = Instant::now();
    let seen = loop {
        let seen = observation(&rig);
        let vm = &seen["vms"]["plc"];
        let [missed, met] = [0, 1].map(|i| vm["targets"][i]["verdict"].clone());
        // Stalls are watched from the second look on and reported from the third on.
        if missed == "missed" && met == "met" && !vm["targets"][0]["late_unseen"].is_null() {
            break seen;
        }
        let iod = fs::read_to_string(dir.join("iod.log")).unwrap_or_default();
        assert!(begin.elapsed() < HANG, "{seen:#}\n{}\n{iod}", rig.log());
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    let vm = &seen["vms"]["plc"];
    let served = &vm["disks"][0];
    assert_eq!(
        (&served["source"], &served["id"]),
        (&"io_domain".into(), &"I/O domain d/plc".into()),
        "{vm:#}"
    );
    assert!(served["histogram"]["reads"].as_array().unwrap().iter().any(|n| n.as_u64() > Some(0)));
    let late = vm["targets"][0]["exceedances"].as_u64().unwrap();
    assert_eq!(late, vm["targets"][0]["n"], "each is above 1 us");
    // A missed target has causes, or says that none is seen and what is not known.
    let unread = vm["targets"][0]["causes_unread"].as_array().unwrap();
    assert!(vm["targets"][0]["causes"].is_array() && unread.contains(&"its limits".into()), "{vm:#}");
    assert!(vm["targets"][1]["causes"].is_null(), "{vm:#}");
    let (_, top) = rig.site.json(&["top"]);
    let line = &top["lines"][0];
    assert_eq!((&line["vm"], &line["verdict"]), (&"plc".into(), &"missed".into()), "{top:#}");
    assert!(line["causes"].is_array() && line["late"] == 1.0, "{top:#}");
    // Without a monitor QEMU's disks are not seen, and that is said.
    assert!(vm["disks_unseen"].as_str().unwrap().contains("monitor"), "{vm:#}");
    wait_for("hits of the cap", || {
        let seen = observation(&rig);
        let limiters = seen["vms"]["plc"]["limiters"].as_array().cloned().unwrap_or_default();
        let cap = limiters.iter().find(|one| one["kind"] == "io_domain_cap");
        cap.is_some_and(|cap| cap["hits_per_s"].as_f64() > Some(0.0) && cap["unseen"].is_null())
    });
    // Where stalls can be told, every late request of a watched interval is laid to something.
    let seen = observation(&rig);
    match seen["host"]["stalls"].as_object() {
        Some(_) => {
            let late = &seen["vms"]["plc"]["targets"][0]["late"];
            let of = |key: &str| late[key].as_u64().unwrap_or(0);
            assert!(of("told") > 0 && of("host") + of("disk") + of("other") == of("told"), "{seen:#}");
        }
        None => assert!(seen["host"]["stalls_unseen"].is_string(), "{seen:#}"),
    }
    // At rest nothing is watched: a host without work is not woken.
    drop(reads);
    wait_for("the probes' rest", || observation(&rig)["host"]["stalls"].is_null());
    let metrics =
        text(answer(UnixStream::connect(rig.socket()).unwrap(), "GET", "/metrics", "localhost").1.as_bytes());
    for name in ["rtvirtio_limiter_hits_per_second{", "rtvirtio_target_verdict{", "rtvirtio_target_cause{"] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    rig.kill();
    drop(iod);
    drop(disk);
}
