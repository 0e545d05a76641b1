//! Page of a real QEMU: found by its monitor, offered, and left when the VM ends.

use std::fs;
use std::os::fd::AsFd as _;

use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{HANG, Machine, Need, has};
use rtvirtio_urgency::Config;
use rtvirtio_urgency::page::{LEAST_SIZE, Memory as _};
use rtvirtio_urgency_host::{FileMemory, Page, ServedVm, Server, UrgencyError, find_page};
use rtvirtio_vmm::Qmp;

fn page(machine: &Machine) -> Result<Page, UrgencyError> {
    find_page("plc", machine.pid(), &mut Qmp::connect(machine.qmp(), HANG).unwrap())
}

fn served(machine: &Machine, page: Page) -> Result<ServedVm, UrgencyError> {
    let qmp = machine.qmp().to_owned();
    let monitor = Box::new(move || Ok(Qmp::connect(&qmp, HANG)?));
    ServedVm::new("plc", machine.pid(), Config::new(90, 0, 97), page, monitor)
}

#[test]
fn the_page_is_found_by_name_and_without() {
    if !has("the_page_is_found_by_name_and_without", &[Need::Root, Need::QEMU]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir_in("/tmp").unwrap();
    let none = Machine::start(dir.path(), "plc", &[]);
    assert!(matches!(page(&none), Err(UrgencyError::NoDevice { .. })));
    drop(none);

    // Another device for another purpose; our page has the name, and is behind a bridge.
    let file = |name: &str| {
        format!("memory-backend-file,id={name},size=4K,share=on,mem-path={}/{name}", dir.path().display())
    };
    let (ours, other) = (file("rtvirtio-plc"), file("looking-glass"));
    let two = [
        "-device",
        "pci-bridge,id=bridge,chassis_nr=1",
        "-object",
        &other,
        "-device",
        "ivshmem-plain,id=other,memdev=looking-glass",
        "-object",
        &ours,
        "-device",
        "ivshmem-plain,id=ours,memdev=rtvirtio-plc,bus=bridge,addr=1",
    ];
    let mut machine = Machine::start(dir.path(), "plc", &two);
    // A device behind a bridge is visible once the firmware has numbered its bus.
    wait_for("the page behind the bridge", || page(&machine).is_ok_and(|p| p.path.ends_with("rtvirtio-plc")));
    let found = page(&machine).unwrap();
    assert!(found.size == LEAST_SIZE && found.doorbell.is_none());
    let vm = served(&machine, found).unwrap();
    assert_eq!(&fs::read(dir.path().join("rtvirtio-plc")).unwrap()[..4], b"RTVU");
    // One process at a time.
    assert!(matches!(served(&machine, page(&machine).unwrap()), Err(UrgencyError::Taken { .. })));
    drop(vm);
    assert!(served(&machine, page(&machine).unwrap()).is_ok());
    machine.kill();

    // Memory without a name, in a device without an id.
    let memory =
        ["-object", "memory-backend-memfd,id=m,size=8K,share=on", "-device", "ivshmem-plain,memdev=m"];
    let machine = Machine::start(dir.path(), "plc", &memory);
    let found = page(&machine).unwrap();
    assert_eq!(found.size, 2 * LEAST_SIZE);
    assert!(served(&machine, found).is_ok());
}

#[test]
fn qemu_gets_a_doorbell_that_is_taken_from_it() {
    if !has("qemu_gets_a_doorbell_that_is_taken_from_it", &[Need::Root, Need::QEMU]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir_in("/tmp").unwrap();
    let socket = dir.path().join("urgency");
    let mut server = Server::bind(&socket).unwrap();
    assert!(Server::bind(&socket).is_err(), "one server at a time");
    assert!(!server.serve_one(&|| true).unwrap(), "cancelled");
    let chardev = format!("socket,id=urgency,path={}", socket.display());
    let options = ["-chardev", &chardev, "-device", "ivshmem-doorbell,chardev=urgency,vectors=1"];
    let machine = std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve_one(&|| false).unwrap());
        let machine = Machine::start(dir.path(), "plc", &options);
        assert!(serving.join().unwrap());
        machine
    });
    let found = page(&machine).unwrap();
    assert!(found.doorbell.is_some() && found.size == LEAST_SIZE);
    drop(server);

    // The server has gone; the doorbell is the one that QEMU writes to.
    let found = page(&machine).unwrap();
    let bell = found.doorbell.as_ref().unwrap();
    let mut count = [0; 8];
    assert!(rustix::io::read(bell.as_fd(), &mut count).is_err(), "nothing has rung");
    rustix::io::write(bell.as_fd(), &3_u64.to_ne_bytes()).unwrap();
    assert_eq!(rustix::io::read(bell.as_fd(), &mut count), Ok(8));
    assert_eq!(u64::from_ne_bytes(count), 3);
    served(&machine, found).unwrap();
    let memory = FileMemory::new(fs::File::open(dir.path().join("urgency.page")).unwrap(), 0);
    let mut words = [0; 20];
    memory.read(0, &mut words).unwrap();
    assert_eq!(
        (&words[..4], &words[16..]),
        (&b"RTVU"[..], &[0; 4][..]),
        "offered, and the host's doorbell is 0"
    );

    // The QEMU of another server has another doorbell.
    let mut server = Server::bind(&socket).unwrap();
    let second = dir.path().join("second");
    fs::create_dir(&second).unwrap();
    let _other = std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve_one(&|| false).unwrap());
        let machine = Machine::start(&second, "other", &options);
        assert!(serving.join().unwrap());
        machine
    });
    assert!(matches!(page(&machine), Err(UrgencyError::NoMemory { .. })));
}
