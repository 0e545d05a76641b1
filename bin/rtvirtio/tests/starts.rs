//! `starts` on a real device and real cgroups: raised by a guest's word, put back by its end, by
//! the budget, by Ctrl-C, and by `revert` after `kill -9`. The guest's port is a socket of the test
//! here; a real guest's is in `rtvirtio-lab`'s tests.

use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};

mod plane;

use plane::{Plane, differences};
use rtvirtio_kernel::Root;
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::{Site, signal, text, wait_for};
use rustix::process::Signal;
use serde_json::Value;

/// `starts` in the background, its events, and the guest's end of the port.
struct Starts {
    child: Child,
    events: Receiver<Value>,
    guest: UnixStream,
}

impl Starts {
    fn new(site: &Site, spec: &Path, listener: &UnixListener, more: &[&str]) -> Self {
        let port = format!("vm0={}", socket(site).display());
        let args = [&["starts", spec.to_str().unwrap(), "--port", &port, "--json"], more].concat();
        let mut child = site.spawn(&args);
        let (sender, events) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        let (guest, _) = listener.accept().unwrap();
        let starts = Self { child, events, guest };
        starts.expect("connected");
        starts
    }

    fn say(&mut self, line: &str) {
        self.guest.write_all(line.as_bytes()).unwrap();
    }

    fn expect(&self, event: &str) -> Value {
        let next = self.events.recv_timeout(HANG).unwrap();
        assert_eq!((next["event"].as_str(), next["vm"].as_str()), (Some(event), Some("vm0")), "{next}");
        next
    }
}

fn socket(site: &Site) -> PathBuf {
    site.dir.path().join("start")
}

#[test]
fn a_start_is_favoured_and_everything_is_put_back() {
    let test = "a_start_is_favoured_and_everything_is_put_back";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let root = Root::default();
    let spec = site.dir.path().join("plane.toml");
    let listener = UnixListener::bind(socket(&site)).unwrap();
    let (parent, cgroups) = plane.groups();
    let weight = || cgroups.weight_of(&root, &parent.join("vm0"), &plane.device.dev).unwrap();

    // BFQ is what has weights.
    let port = format!("vm0={}", socket(&site).display());
    let refused = text(&site.output(&["starts", spec.to_str().unwrap(), "--port", &port]).stderr);
    assert!(refused.contains("bfq"), "{refused}");
    plane.device.set_elevator(&root, "bfq").unwrap();
    let before = plane.snapshot();
    let idle = || {
        let ms = root.read(plane.device.tunable("slice_idle")).unwrap();
        ms.trim().parse::<u32>().unwrap()
    };
    let own = idle();
    assert!(own < 25, "{own} ms");

    let mut starts = Starts::new(&site, &spec, &listener, &[]);
    assert_eq!(weight(), 100);
    starts.say("start 1 60000\n");
    starts.expect("raised");
    assert_eq!((weight(), idle()), (1000, 25));
    assert!(site.ok(&["status"]).contains("weight of vm0"), "in force, at either weight");
    starts.say("end 1\n");
    assert_eq!(starts.expect("lowered")["starts"], 1);
    assert_eq!((weight(), idle()), (100, own));
    starts.say("start 2 60000\nnonsense\n");
    starts.expect("raised");
    // Ctrl-C.
    signal(&starts.child, Signal::INT);
    assert!(starts.child.wait().unwrap().success());
    assert_eq!(differences(&before, &plane.snapshot()), Vec::<String>::new());

    // Killed while raised.
    let mut starts = Starts::new(&site, &spec, &listener, &["--weight", "700"]);
    starts.say("start 3 60000\n");
    starts.expect("raised");
    starts.child.kill().unwrap();
    starts.child.wait().unwrap();
    assert_eq!((weight(), idle()), (700, 25), "nothing has put it back");
    // Another one goes on: what the killed one left is no weight of the VM's own.
    let mut starts = Starts::new(&site, &spec, &listener, &["--weight", "700", "--longest", "100ms"]);
    starts.say("start 4 60000\n");
    starts.expect("raised");
    starts.expect("lowered");
    assert_eq!((weight(), idle()), (100, own), "a start is over after the longest time");
    starts.say("start 5 60000\n");
    starts.expect("raised");
    starts.child.kill().unwrap();
    starts.child.wait().unwrap();
    // Also one that leaves the device's time as it is.
    assert_eq!(idle(), 25);
    let more = ["--weight", "700", "--slice-idle", "0"];
    let mut starts = Starts::new(&site, &spec, &listener, &more);
    assert_eq!((weight(), idle()), (100, own));
    starts.say("start 6 60000\n");
    starts.expect("raised");
    assert_eq!((weight(), idle()), (700, own));
    starts.child.kill().unwrap();
    starts.child.wait().unwrap();
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert_eq!(differences(&before, &plane.snapshot()), Vec::<String>::new());

    // A guest that says it without end has its budget and no more; a VM that ends is not favoured.
    let more = ["--budget", "200ms", "--within", "1h", "--longest", "1h", "--slice-idle", "0"];
    let mut starts = Starts::new(&site, &spec, &listener, &more);
    starts.say("start 6 3600000\n");
    starts.expect("raised");
    assert_eq!(idle(), own);
    let lowered = starts.expect("lowered");
    assert_eq!((lowered["cut"].as_u64(), weight()), (Some(1), 100));
    starts.say("start 7 3600000\n");
    drop(starts.guest);
    let closed = starts.events.recv_timeout(HANG).unwrap();
    assert_eq!(closed["event"], "closed", "{closed}");
    // Reverted under its hands, it ends by itself.
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(starts.child.wait().unwrap().success());
    assert_eq!(differences(&before, &plane.snapshot()), Vec::<String>::new());
    drop(plane);
    site.assert_clean();
}

#[test]
fn what_a_plan_has_set_stays() {
    let test = "what_a_plan_has_set_stays";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let root = Root::default();
    let spec = site.dir.path().join("plane.toml");
    let listener = UnixListener::bind(socket(&site)).unwrap();
    let (parent, cgroups) = plane.groups();
    let weight = || cgroups.weight_of(&root, &parent.join("vm0"), &plane.device.dev).unwrap();
    let before = plane.snapshot();
    site.ok(&["apply", plane.plan()]);
    assert_eq!(weight(), 700);
    let idle = || root.read(plane.device.tunable("slice_idle")).unwrap();
    let of_plan = idle();
    let with_plan = plane.snapshot();
    let mut starts = Starts::new(&site, &spec, &listener, &[]);
    starts.say("start 1 60000\n");
    starts.expect("raised");
    assert_eq!((weight(), idle()), (1000, of_plan), "the plan has set the device's time");
    signal(&starts.child, Signal::INT);
    assert!(starts.child.wait().unwrap().success());
    assert_eq!(differences(&with_plan, &plane.snapshot()), Vec::<String>::new(), "the plan's weight");
    site.ok(&["revert"]);
    assert_eq!(differences(&before, &plane.snapshot()), Vec::<String>::new());
}
