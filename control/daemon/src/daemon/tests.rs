use std::path::Path;

use rtvirtio_cpu::Level;
use rtvirtio_kernel::ProcessId;
use rtvirtio_planner::replan::{Request, Sight};
use rtvirtio_spec::HostSpec;

use super::*;
use crate::desired::Contract;
use crate::observed::{Admission, ObservedVm};

/// One VM that runs without its contract, on a host that says whether it rests.
#[derive(Default)]
struct OneVm {
    now: u64,
    desired: Option<Desired>,
    rests: bool,
    fails: bool,
    applied: bool,
    looks: Vec<Look>,
}

impl Host for OneVm {
    fn now(&self) -> Millis {
        Millis(self.now)
    }

    fn desired(&mut self) -> Option<Desired> {
        self.desired.take()
    }

    fn rests(&mut self) -> bool {
        self.rests
    }

    fn observe(&mut self, _: &Desired, look: Look) -> Observed {
        self.looks.push(look);
        let presence = match self.applied {
            // Nothing more is to be done for a VM that is off.
            true => Presence::Off("it has ended".to_owned()),
            false => Presence::Running(vec![ProcessId { pid: 7, start_time: 1 }]),
        };
        Observed {
            vms: BTreeMap::from([("plc".to_owned(), ObservedVm { presence, ..ObservedVm::off("") })]),
            admission: Admission {
                admitted: BTreeMap::from([("plc".to_owned(), Level::ALONE)]),
                ..Admission::default()
            },
            ..Observed::default()
        }
    }

    fn sight(&mut self, _: &Desired) -> Option<Sight> {
        None
    }

    fn make_plan(&mut self, _: &Request, _: &Desired) {}

    fn perform(&mut self, _: &Step, _: &Desired) -> Outcome {
        if self.fails {
            return Outcome::Busy;
        }
        self.applied = true;
        Outcome::Done { changes: Vec::new(), notes: Vec::new() }
    }
}

fn contracts() -> Desired {
    let text = "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n\
                cpu = { budget = \"5ms\", period = \"20ms\" }\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";
    let spec = HostSpec::parse("x.toml", text).unwrap();
    Desired { contracts: Contract::of_spec(&spec, Path::new("/etc/x.toml")), ..Desired::default() }
}

/// Looks of the next pass, a scan later.
fn looks(daemon: &mut Daemon<OneVm>) -> Vec<Look> {
    daemon.host().now += 200;
    daemon.host().looks.clear();
    let _ = daemon.pass();
    daemon.host_ref().looks.clone()
}

#[test]
fn a_host_at_rest_is_left_alone_until_something_asks_for_a_look() {
    let host = OneVm { desired: Some(contracts()), rests: true, fails: true, ..OneVm::default() };
    let mut daemon = Daemon::new(host, Config::default(), Memory::default());
    assert_eq!(looks(&mut daemon), [Look::Compare], "the first look");
    assert_eq!(looks(&mut daemon), [Look::Scan], "a step is to be done");
    daemon.host().fails = false;
    assert_eq!(looks(&mut daemon), [Look::Scan, Look::Scan], "it is done, and looked at");
    assert_eq!((looks(&mut daemon), daemon.rested(), daemon.is_new()), (vec![], true, false));
    daemon.look_next();
    assert_eq!((looks(&mut daemon), daemon.rested()), (vec![Look::Scan], false), "it was asked for");
    assert_eq!(looks(&mut daemon), []);
    daemon.host().rests = false;
    assert_eq!(looks(&mut daemon), [Look::Scan], "something may have changed");
    daemon.host().rests = true;
    assert_eq!(looks(&mut daemon), []);
    daemon.host().desired = Some(contracts());
    assert_eq!(looks(&mut daemon), [Look::Scan], "contracts have changed");
    daemon.compare_next();
    assert_eq!(looks(&mut daemon), [Look::Compare]);
    daemon.host().now += 5_000;
    assert_eq!(looks(&mut daemon), [Look::Compare], "a comparison is due");
    assert_eq!(looks(&mut daemon), []);
}
