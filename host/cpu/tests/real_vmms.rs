//! Contracts on real processes whose threads have the names of other VMMs' threads.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::{env, fs, process, thread};

use rtvirtio_apply::{Machine as Host, NoGuests, OnConflict, Session, Silent};
use rtvirtio_cpu::{Ask, Backend, Contract, Level, Order, probe, settings};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::Policy;
use rtvirtio_planner::Enforcement;
use rtvirtio_testkit::{Need, has};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, Thread, VmHandle};

/// Environment variable with the threads' names, the main one's first, by commas: for [`a_vmm`].
const NAMES: &str = "RTVIRTIO_TEST_THREAD_NAMES";

/// Not a test by itself: the process that [`Vmm::start`] starts. Ends when its standard input does.
#[test]
fn a_vmm() {
    let Ok(names) = env::var(NAMES) else { return };
    let mut names = names.split(',');
    let main = names.next().unwrap();
    fs::write(format!("/proc/self/task/{}/comm", process::id()), main).unwrap();
    // A thread sets its own name, some time after it was started.
    let names: Vec<&str> = names.collect();
    let named = Arc::new(Barrier::new(names.len() + 1));
    for name in names {
        let named = Arc::clone(&named);
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                named.wait();
                loop {
                    thread::park();
                }
            })
            .unwrap();
    }
    named.wait();
    println!("started");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

struct Vmm {
    child: Child,
    vm: String,
}

impl Vmm {
    fn start(names: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "a_vmm", "--nocapture", "--test-threads=2"])
            .env(NAMES, names)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|l| l.unwrap().contains("started")), "the process ended");
        // Nothing more is read: the process writes a line at its end only.
        Self { child, vm: rtvirtio_testkit::unique("vmm") }
    }

    fn threads(&self) -> Vec<Thread> {
        discover(&Root::default(), &VmHandle::of_pid(self.child.id())).unwrap()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        rtvirtio_testkit::remove_vm_group(&self.vm);
    }
}

#[test]
fn a_contract_holds_the_vcpus_of_other_vmms() {
    let test = "a_contract_holds_the_vcpus_of_other_vmms";
    if !has(test, &[Need::Root, Need::RT_GROUPS]) {
        return;
    }
    let root = Root::default();
    let probe = probe(&root).unwrap();
    let contract = Contract::new(Nanos::from_millis(1), Nanos::from_millis(50)).unwrap();
    for (names, vcpus) in [
        ("cloud-hyperviso,vmm,vcpu0,vcpu1,_disk0_q0", 2),
        ("firecracker,fc_api,fc_vcpu 0", 1),
        ("crosvm,crosvm_vcpu0,crosvm_vcpu1", 2),
    ] {
        let vmm = Vmm::start(names);
        let threads = vmm.threads();
        let ask = Ask {
            vm: &vmm.vm,
            threads: &threads,
            contract,
            order: Order::Rt,
            level: Level::ALONE,
            used: &[],
        };
        let made = settings(&root, &probe, Backend::RtGroup, &ask).unwrap();
        assert_eq!(made.strength, Enforcement::Guarantee, "{names}");
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let session = Session::open(dir.path().join("state")).unwrap();
        let machine = Host::new(&root, &NoGuests);
        session.apply(&made.writes, &machine, &mut Silent).unwrap();
        let held = vmm.threads();
        let of = |is: &dyn Fn(&Role) -> bool, priority: u32| {
            let fits = |t: &&Thread| is(&t.role) && (t.policy, t.priority) == (Some(Policy::Fifo), priority);
            held.iter().filter(fits).count()
        };
        assert_eq!(of(&|r| matches!(r, Role::Vcpu(_)), 97), vcpus, "{held:?}");
        // Threads that serve a vCPU are above it.
        assert_eq!(of(&|r| *r == Role::Emulator, 98), 1 + usize::from(names.contains("vmm,")), "{held:?}");
        assert_eq!(
            of(&|r| matches!(r, Role::IoThread(_)), 98),
            usize::from(names.contains("_disk0")),
            "{held:?}"
        );
        let group = format!("/{}", rtvirtio_cpu::group_name(&vmm.vm));
        assert!(held.iter().all(|t| t.cgroup("cpu").is_some_and(|c| c.to_str() == Some(&group))), "{held:?}");
        assert!(session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap().done);
    }
}
