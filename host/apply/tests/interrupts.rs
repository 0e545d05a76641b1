//! CPUs of interrupts over a directory that stands in for the kernel: set, put back, refused by the
//! kernel, and never written once the number is another interrupt's.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    Applied, KnobState, Machine, NoGuests, OnConflict, Session, Silent, Target, Write, dry_run, status,
};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::irq::Vector;
use rustix::io::Errno;
use support::inject::{FailingHost, Fails, Injector};

const VECTORS: &str = "/sys/devices/pci0000:00/0000:00:04.0/msi_irqs";

struct Host {
    dir: tempfile::TempDir,
    root: Root,
}

impl Host {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path().join("root"));
        let host = Self { dir, root };
        host.put(Path::new("/proc/sys/kernel/random/boot_id"), "one\n");
        for number in [24, 25] {
            host.put(&Path::new(VECTORS).join(number.to_string()), "msix\n");
            host.set(number, "0-7");
        }
        host
    }

    fn put(&self, path: &Path, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn set(&self, number: u32, cpus: &str) {
        self.put(&rtvirtio_kernel::irq::affinity_file(number), &format!("{cpus}\n"));
    }

    fn cpus(&self, number: u32) -> String {
        self.root.read(rtvirtio_kernel::irq::affinity_file(number)).unwrap().trim().to_owned()
    }

    fn writes(&self) -> Vec<Write> {
        let write = |number: u32| {
            let file = Path::new(VECTORS).join(number.to_string());
            let inode = self.root.inode(&file).unwrap();
            let cpus = BTreeSet::new();
            let vector = Vector { number, file, inode, cpus, effective: None, is_fixed: false };
            Write::new(format!("CPUs of interrupt {number}"), Target::interrupt(&vector), "0-3")
        };
        [24, 25].map(write).to_vec()
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn machine(&self) -> Machine<'_> {
        Machine::new(&self.root, &NoGuests)
    }

    fn apply(&self) -> Applied {
        let session = Session::open(self.state()).unwrap();
        session.apply(&self.writes(), &self.machine(), &mut Silent).unwrap()
    }

    fn states(&self) -> Vec<KnobState> {
        let status = status(&self.state(), &self.machine()).unwrap().unwrap();
        status.knobs.into_iter().map(|knob| knob.state).collect()
    }

    fn revert(&self) -> bool {
        let session = Session::open(self.state()).unwrap();
        session.revert(OnConflict::Report, &self.machine(), &mut Silent).unwrap().unwrap().done
    }

    /// The number is given out again, to another device's vector.
    fn reuse(&self, number: u32) {
        let file = Path::new(VECTORS).join(number.to_string());
        // Kept, so that its inode is not used again.
        fs::rename(self.root.at(&file), self.root.at("/gone")).unwrap();
        self.put(&file, "msix\n");
        self.set(number, "4-7");
    }
}

#[test]
fn interrupts_are_moved_and_put_back() {
    let host = Host::new();
    let lines = dry_run(&host.writes(), &host.machine()).unwrap();
    assert_eq!(lines[0].to_string(), "/proc/irq/24/smp_affinity_list: 0-7 -> 0-3");
    assert_eq!(host.cpus(24), "0-7");
    let applied = host.apply();
    assert!(applied.knobs.len() == 2 && applied.left.is_empty(), "{applied:?}");
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-3", "0-3"]);
    assert_eq!(host.states(), [KnobState::InForce, KnobState::InForce]);
    // Another program moves one, as irqbalance does.
    host.set(25, "6");
    assert_eq!(host.states()[1], KnobState::Changed { found: "6".to_owned() });
    assert!(!host.revert(), "it is left to that program");
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-7", "6"]);
    host.set(25, "0-3");
    assert!(host.revert());
    assert_eq!(host.cpus(25), "0-7");
}

#[test]
fn a_number_that_is_another_interrupts_is_never_written() {
    let host = Host::new();
    host.apply();
    host.reuse(24);
    fs::remove_file(host.root.at(Path::new(VECTORS).join("25"))).unwrap();
    assert!(host.states().iter().all(|state| matches!(state, KnobState::Gone { .. })));
    assert!(host.revert());
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["4-7", "0-3"]);

    // Nor after a restart of the host, nor between resolving and applying.
    let host = Host::new();
    host.apply();
    host.put(Path::new("/proc/sys/kernel/random/boot_id"), "two\n");
    assert!(host.revert());
    assert_eq!(host.cpus(24), "0-3");
    let writes = host.writes();
    host.reuse(24);
    let session = Session::open(host.state()).unwrap();
    let applied = session.apply(&writes, &host.machine(), &mut Silent).unwrap();
    assert!(applied.knobs.iter().all(|line| line.path.contains("/25/")), "{applied:?}");
    assert_eq!(host.cpus(24), "4-7");
}

/// Queues whose interrupts the kernel manages: before Linux 6.11 it tells by refusing only.
#[test]
fn an_interrupt_that_the_kernel_manages_hinders_nothing() {
    for errno in [Errno::IO, Errno::PERM] {
        let host = Host::new();
        let injector = Injector::new(Fails::Write("irq/24/smp_affinity_list".into()), errno, false);
        let failing = FailingHost(&host.root, injector);
        let machine = Machine::with_host(&host.root, &failing, &NoGuests);
        let session = Session::open(host.state()).unwrap();
        let applied = session.apply(&host.writes(), &machine, &mut Silent).unwrap();
        assert_eq!((applied.knobs.len(), applied.left.len()), (1, 1), "{applied:?}");
        assert!(applied.left[0].is_fixed && applied.left[0].knob.contains("interrupt 24"), "{applied:?}");
        assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-7", "0-3"]);
        assert_eq!(host.states(), [KnobState::InForce], "the refused one is in no journal");
        drop(session);
        assert!(host.revert());
        assert_eq!(host.cpus(25), "0-7");
    }
    // Any other refusal is an error, and all is put back.
    let host = Host::new();
    let injector = Injector::new(Fails::Write("irq/25/smp_affinity_list".into()), Errno::INVAL, false);
    let failing = FailingHost(&host.root, injector);
    let machine = Machine::with_host(&host.root, &failing, &NoGuests);
    let session = Session::open(host.state()).unwrap();
    session.apply(&host.writes(), &machine, &mut Silent).unwrap_err();
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-7", "0-7"]);
}
