use std::process::{Child, Command};

use rtvirtio_cpu::Load;
use rtvirtio_kernel::sched;
use rtvirtio_testkit::{Need, has};

use super::*;

/// Ended with this.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Else a contract that the kernel holds by deadlines gives way to itself.
#[test]
fn what_a_vms_threads_have_reserved_is_no_load_of_others() {
    if !has("what_a_vms_threads_have_reserved_is_no_load_of_others", &[Need::Root, Need::Program("chrt")]) {
        return;
    }
    let mut command = Command::new("chrt");
    command.args(["--deadline", "--sched-runtime", "5000000", "--sched-deadline", "50000000"]);
    command.args(["--sched-period", "50000000", "0", "sleep", "600"]);
    let sleeper = Sleeper(command.spawn().unwrap());
    let pid = sleeper.0.id();
    rtvirtio_testkit::site::wait_for("a reservation", || {
        sched::get(pid).is_ok_and(|attr| attr.reservation.is_some())
    });

    let of_sleeper = |probe: &Probe| {
        let loads = probe.found.iter().flat_map(|found| found.grant.taken.clone());
        loads.filter(|load| load.pid == Some(pid)).collect::<Vec<Load>>()
    };
    let mut probe = probe(&Root::default()).unwrap();
    let loads = of_sleeper(&probe);
    let expected = 0.1 / f64::from(probe.cpus);
    assert!(!loads.is_empty() && loads.iter().all(|l| (l.share.0 - expected).abs() < 1e-9), "{loads:?}");
    assert_eq!(loads[0].name, "deadline threads of sleep");
    let others = Ours { contracts: Vec::new(), processes: Vec::new() };
    forget_own(&mut probe, std::iter::empty(), &others).unwrap();
    assert_eq!(of_sleeper(&probe).len(), loads.len());
    let ours = Ours { contracts: Vec::new(), processes: vec![ProcessId::of(pid).unwrap().unwrap()] };
    forget_own(&mut probe, std::iter::empty(), &ours).unwrap();
    assert_eq!(of_sleeper(&probe), []);
}
