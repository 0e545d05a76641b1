use std::process::Command;

use rtvirtio_cpu::Load;
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_testkit::{ChildGuard, Need, has};

use super::*;

/// Else a contract that SCHED_DEADLINE holds is refused for its own reservation.
#[test]
fn what_a_vms_threads_have_reserved_is_no_load_of_others() {
    if !has("what_a_vms_threads_have_reserved_is_no_load_of_others", &[Need::Root]) {
        return;
    }
    let sleeper = ChildGuard(Command::new("sleep").arg("600").spawn().unwrap());
    let pid = sleeper.id();
    sched::set(pid, &Attr::deadline(5_000_000, 50_000_000)).unwrap();

    let of_sleeper = |probe: &Probe| {
        let loads = probe.found.iter().flat_map(|found| found.grant.taken.clone());
        loads.filter(|load| load.pid == Some(pid)).collect::<Vec<Load>>()
    };
    let mut probe = probe(&Root::default()).unwrap();
    let loads = of_sleeper(&probe);
    let expected = 0.1 / f64::from(probe.cpus);
    assert!(!loads.is_empty() && loads.iter().all(|l| (l.share.0 - expected).abs() < 1e-9), "{loads:?}");
    assert_eq!(loads[0].name, "deadline threads of sleep");
    forget_own(&mut probe, std::iter::empty(), &Ours::default()).unwrap();
    assert_eq!(of_sleeper(&probe).len(), loads.len());
    let ours = Ours { processes: vec![ProcessId::of(pid).unwrap().unwrap()], ..Ours::default() };
    forget_own(&mut probe, std::iter::empty(), &ours).unwrap();
    assert_eq!(of_sleeper(&probe), []);
}
