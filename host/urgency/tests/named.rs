//! Files that a QEMU or a user names to a process of root's: none of them is opened by its name.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{MetadataExt as _, chown, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rtvirtio_testkit::{HANG, Machine, Need, has};
use rtvirtio_urgency::Config;
use rtvirtio_urgency_host::{Page, ServedVm, Server, UrgencyError, find_page};
use rtvirtio_vmm::Qmp;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

const VICTIM: [u8; 8192] = [b'A'; 8192];
const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}"#;

/// Monitor with forged answers: one ivshmem device with these properties, whose character device
/// has this address.
fn lies(properties: &[(&str, &str)], size: u64, address: &Value) -> Qmp {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let properties: Vec<(String, String)> =
        properties.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let address = address.clone();
    std::thread::spawn(move || {
        let mut out = theirs.try_clone().unwrap();
        writeln!(out, "{GREETING}\r").unwrap();
        for line in BufReader::new(theirs).lines() {
            let Ok(request) = line.map(|line| serde_json::from_str::<Value>(&line).unwrap()) else { return };
            let id = &request["id"];
            let wanted = request["arguments"]["property"].as_str().unwrap_or_default();
            let property = properties.iter().find(|(name, _)| name == wanted);
            let answer = match (request["execute"].as_str().unwrap(), property, wanted) {
                ("qmp_capabilities", ..) => json!({ "return": {}, "id": id }),
                ("query-pci", ..) => {
                    let ids = json!({ "vendor": 0x1af4, "device": 0x1110 });
                    json!({ "return": [{ "devices": [{ "id": ids, "qdev_id": "u" }] }], "id": id })
                }
                (_, _, "size") => json!({ "return": size, "id": id }),
                (_, _, "addr") => json!({ "return": address, "id": id }),
                (_, Some((_, value)), _) => json!({ "return": value, "id": id }),
                _ => json!({ "error": { "class": "GenericError", "desc": "no such property" }, "id": id }),
            };
            writeln!(out, "{answer}\r").unwrap();
        }
    });
    Qmp::from_stream(ours, "a monitor that lies", HANG).unwrap()
}

fn names(machine: &Machine, path: &Path, size: u64) -> Result<Page, UrgencyError> {
    let properties = [("memdev", "/objects/m"), ("mem-path", path.to_str().unwrap())];
    find_page("evil", machine.pid(), &mut lies(&properties, size, &Value::Null))
}

fn names_socket(machine: &Machine, socket: &Path) -> Result<Page, UrgencyError> {
    let address = json!({ "type": "unix", "path": socket });
    find_page("evil", machine.pid(), &mut lies(&[("chardev", "u")], 4096, &address))
}

fn serve(machine: &Machine, page: Page) -> Result<ServedVm, UrgencyError> {
    let none = || -> Result<Qmp, UrgencyError> {
        Err(UrgencyError::NoMonitor { vm: "plc".to_owned(), why: "a test".to_owned() })
    };
    ServedVm::new("plc", machine.pid(), Config::new(90, 0, 97), page, Box::new(none))
}

fn machine(dir: &Path, name: &str, path: &Path, more: &str) -> Machine {
    fs::create_dir(dir.join(name)).unwrap();
    let memory = format!("memory-backend-file,id=m,size=4K,share=on,mem-path={}{more}", path.display());
    let options = ["-object", &memory, "-device", "ivshmem-plain,id=u,memdev=m"];
    Machine::start(&dir.join(name), name, &options)
}

fn is_unchanged(victim: &Path) -> bool {
    fs::read(victim).unwrap() == VICTIM
}

#[test]
fn a_page_is_what_qemu_has_mapped_and_not_what_it_names() {
    if !has("a_page_is_what_qemu_has_mapped_and_not_what_it_names", &[Need::Root, Need::QEMU]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("victim"), VICTIM).unwrap();
    symlink(at("victim"), at("link")).unwrap();
    mknodat(CWD, at("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let evil = machine(dir.path(), "evil", &at("rtvirtio-evil"), "");
    let good = machine(dir.path(), "good", &at("rtvirtio-good"), "");
    let own = fs::metadata(at("rtvirtio-evil")).unwrap().ino();

    // A file of root's, by its name, a link, another name for it; a FIFO; and the other VM's page.
    for name in ["victim", "link", "fifo", "rtvirtio-good", "none"] {
        let refused = names(&evil, &at(name), 8192);
        assert!(matches!(refused, Err(UrgencyError::NoMemory { .. })), "{name}: {refused:?}");
        // At most it gets its own page.
        let found = names(&evil, &at(name), 4096).unwrap();
        assert_eq!(found.file.metadata().unwrap().ino(), own, "{name}");
        let vm = serve(&evil, found).unwrap();
        // The other VM's page stays available.
        let mut monitor = Qmp::connect(good.qmp(), HANG).unwrap();
        let page = find_page("good", good.pid(), &mut monitor).unwrap();
        assert_eq!(page.file.metadata().unwrap().ino(), fs::metadata(at("rtvirtio-good")).unwrap().ino());
        serve(&good, page).unwrap();
        drop(vm);
    }
    assert!(is_unchanged(&at("victim")));

    // So it does when a user can read the page, and so lock it.
    let page = fs::File::open(at("rtvirtio-good")).unwrap();
    assert!(rtvirtio_kernel::flock::lock(&page).unwrap());
    let mut monitor = Qmp::connect(good.qmp(), HANG).unwrap();
    assert!(serve(&good, find_page("good", good.pid(), &mut monitor).unwrap()).is_ok());
}

#[test]
fn another_file_in_the_pages_place_is_left_alone() {
    if !has("another_file_in_the_pages_place_is_left_alone", &[Need::Root, Need::QEMU]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir_in("/dev/shm").unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("victim"), VICTIM).unwrap();
    let plc = machine(dir.path(), "plc", &at("rtvirtio-plc"), "");
    let inode = fs::metadata(at("rtvirtio-plc")).unwrap().ino();
    fs::remove_file(at("rtvirtio-plc")).unwrap();
    symlink(at("victim"), at("rtvirtio-plc")).unwrap();
    let page = find_page("plc", plc.pid(), &mut Qmp::connect(plc.qmp(), HANG).unwrap()).unwrap();
    assert_eq!(page.file.metadata().unwrap().ino(), inode);
    serve(&plc, page).unwrap();
    assert!(is_unchanged(&at("victim")));

    // Memory that QEMU maps privately is no page.
    let other = machine(dir.path(), "other", &at("rtvirtio-other"), "");
    let private = format!("memory-backend-file,id=m,size=8K,share=off,mem-path={}", at("victim").display());
    fs::create_dir(at("private")).unwrap();
    let private = Machine::start(&at("private"), "private", &["-object", &private]);
    for machine in [&other, &private] {
        let refused = names(machine, &at("victim"), 8192);
        assert!(matches!(refused, Err(UrgencyError::NoMemory { .. })), "{refused:?}");
    }
    assert!(is_unchanged(&at("victim")));
}

#[test]
fn a_server_uses_no_file_that_another_user_can_put_there() {
    if !has("a_server_uses_no_file_that_another_user_can_put_there", &[Need::Root, Need::QEMU]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir_in("/tmp").unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("victim"), VICTIM).unwrap();
    let socket = at("plc");
    for extension in [".page", ".lock"] {
        symlink(at("victim"), at(&format!("plc{extension}"))).unwrap();
        assert!(Server::bind(&socket).is_err(), "{extension}");
        fs::remove_file(at(&format!("plc{extension}"))).unwrap();
        // A second name of a file of root's.
        fs::hard_link(at("victim"), at(&format!("plc{extension}"))).unwrap();
        assert!(Server::bind(&socket).is_err(), "{extension}");
        fs::remove_file(at(&format!("plc{extension}"))).unwrap();
    }
    assert!(is_unchanged(&at("victim")));
    // The server's files are checked in the same way, and reading them never waits.
    let evil = machine(dir.path(), "evil", &at("rtvirtio-evil"), "");
    mknodat(CWD, at("plc.json"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    assert!(names_socket(&evil, &socket).is_err());
    fs::remove_file(at("plc.json")).unwrap();
    fs::write(at("plc.json"), r#"{"doorbell":1}"#).unwrap();
    chown(at("plc.json"), Some(65534), None).unwrap();
    assert!(names_socket(&evil, &socket).is_err());

    fs::create_dir(at("theirs")).unwrap();
    chown(at("theirs"), Some(65534), None).unwrap();
    symlink(at("victim"), at("theirs/plc.page")).unwrap();
    let theirs = at("theirs/plc");
    assert!(matches!(Server::bind(&theirs), Err(UrgencyError::Place { .. })));
    assert!(matches!(names_socket(&evil, &theirs), Err(UrgencyError::Place { .. })));
    assert!(is_unchanged(&at("victim")));
}
