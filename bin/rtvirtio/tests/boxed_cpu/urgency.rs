//! What a guest under KVM says is urgent moves its vCPU's thread, on the host's kernel in the box.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_kernel::sched::{self, Policy};
use rtvirtio_testkit::site::signal;
use rustix::process::Signal;
use serde_json::Value;

use crate::plc::{self, ANSWER, Plc, program};

/// Where the guest's program is on the host in the box, and in the guest.
const SOURCE: &str = "/usr/local/bin/rtvirtio-guest";
const PLACE: &str = "/usr/bin/rtvirtio-guest";

/// `rtvirtio keep`, ended with this.
struct Keep(Child);

impl Keep {
    fn start(spec: &str) -> Self {
        let mut keep = Command::new("rtvirtio");
        keep.args(["keep", spec, "--every", "100ms"]).env("RTVIRTIO_STATE_DIR", plc::state_dir());
        Self(keep.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn stop(mut self) {
        signal(&self.0, Signal::INT);
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for(what: &str, is_true: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < ANSWER, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A timed task raises the vCPU to its contract, work without priority leaves it at the floor, and
/// `keep` ends with the contract as it was. `say` prints each step: a box that prints nothing for
/// 75 s counts as hung.
pub fn moves_its_vcpu(plc: &mut Plc, spec: &str, say: &dyn Fn(&str)) {
    plc.copy_in(Path::new(SOURCE), PLACE);
    say("the reporter is in the guest");
    program(&["apply", spec, "--cpu-only"]);
    let vcpu = plc.vcpu();
    let has = |policy: Policy, priority: u32| {
        let attr = sched::get(vcpu).unwrap();
        (attr.policy, attr.priority) == (policy, priority)
    };
    let contract = sched::get(vcpu).unwrap();
    assert_eq!(contract.policy, Policy::Fifo);
    let keep = Keep::start(spec);
    let shell = |plc: &mut Plc, script: &str| plc.exec(&["sh", "-c", script]);
    let offered = format!("until {PLACE} status >/dev/null 2>&1; do sleep 0.1; done");
    shell(plc, &offered);
    say("the page is offered");
    let work = "(while :; do :; done) >/dev/null 2>&1 & echo $! >/tmp/work";
    shell(plc, &format!("{PLACE} bpf >/tmp/bpf.log 2>&1 & {work}"));
    wait_for("ordinary work is at the floor", || has(Policy::Other, 0));
    say("ordinary work is at the floor");
    let timed = "cyclictest -m -q -p99 -i300 -D3 >/tmp/timed 2>&1 & echo $! >/tmp/timed.pid";
    shell(plc, timed);
    wait_for("a timed task has the contract's priority", || has(Policy::Fifo, contract.priority));
    say("a timed task has the contract's priority");
    shell(plc, "while kill -0 $(cat /tmp/timed.pid) 2>/dev/null; do sleep 0.2; done");
    let said = shell(plc, "cat /tmp/timed");
    assert!(said.contains("Avg:"), "{said}");
    println!("under KVM next to work that takes all: {}", said.trim());
    wait_for("ordinary work is at the floor again", || has(Policy::Other, 0));
    // Interrupts of a device: the disk's, and the agent's own port.
    let raised = || -> u64 {
        let shown: Value = serde_json::from_str(&program(&["threads", spec, "--json"])).unwrap();
        let interrupts = &shown[0]["urgency"]["vcpus"][0]["raises"]["interrupts"];
        interrupts["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum()
    };
    let before = raised();
    shell(plc, "dd if=/dev/vda of=/dev/null bs=4k count=200 iflag=direct 2>/dev/null");
    wait_for("KVM's interrupts raise a vCPU with ordinary work", || raised() > before);
    println!("raised by interrupts of devices: {before}, then {}", raised());
    say("KVM's interrupts raise a vCPU");
    shell(plc, "kill $(cat /tmp/work)");
    keep.stop();
    assert_eq!(sched::get(vcpu).unwrap(), contract);
    shell(plc, "killall rtvirtio-guest");
}
