//! Several devices and several disks: the part of the file for each device.

use rtvirtio_spec::{Device, HostSpec, Part, Reach, VmDisk, parse};

const DEVICES: &str = "[[device]]\nname = \"fast\"\npath = \"/dev/nvme0n1\"\n\n[[device]]\nname = \"big\"\npath = \"/dev/sda\"\n";

fn path(path: &str) -> VmDisk {
    VmDisk::Path(path.into())
}

fn task(name: &str, disk: &str) -> String {
    format!("[[vm.task]]\nname = \"{name}\"\nop = \"read\"\nblock = \"4KiB\"\n{disk}\n")
}

fn host(text: &str) -> HostSpec {
    HostSpec::parse("plant.toml", text).unwrap_or_else(|errors| panic!("{errors}"))
}

fn refused(text: &str) -> String {
    HostSpec::parse("plant.toml", text).unwrap_err().to_string()
}

/// A database with its log on one device and its data on two disks of another, then a VM with one
/// disk.
fn example() -> String {
    let database = "[[vm]]\nname = \"database\"\npid = 1\ndisks = [\n\
        { name = \"log\", device = \"fast\", path = \"/dev/vdb\" },\n\
        { name = \"data\", device = \"big\", path = \"/dev/vdc\" },\n\
        { name = \"index\", device = \"big\", path = \"/dev/vdd\" },\n]\n";
    let backup = "[[vm]]\nname = \"backup\"\npid = 2\ndevice = \"big\"\ndisk = \"/dev/vdb\"\n";
    [
        DEVICES,
        database,
        &task("commit", "disk = \"log\""),
        &task("scan", "disk = \"data\""),
        &task("lookup", "disk = \"index\""),
        backup,
        &task("copy", ""),
    ]
    .concat()
}

fn tasks(part: &Part, vm: usize) -> Vec<&str> {
    part.spec.vms[vm].tasks.iter().map(|t| t.name.as_str()).collect()
}

#[test]
fn each_device_gets_the_vms_that_use_it_with_those_tasks_only() {
    let host = host(&example());
    let [fast, big] = host.parts() else { panic!("{:?}", host.parts()) };
    assert_eq!((fast.name.as_deref(), big.name.as_deref()), (Some("fast"), Some("big")));
    assert_eq!(fast.spec.device, Device::Path("/dev/nvme0n1".into()));
    let names = |part: &Part| part.spec.vms.iter().map(|vm| vm.name.clone()).collect::<Vec<_>>();
    assert_eq!(
        (names(fast), names(big)),
        (vec!["database".into()], vec!["database".into(), "backup".into()])
    );
    assert_eq!(tasks(fast, 0), ["commit"]);
    assert_eq!((tasks(big, 0), tasks(big, 1)), (vec!["scan", "lookup"], vec!["copy"]));
    assert_eq!(fast.disks_of(0), [&path("/dev/vdb")]);
    assert_eq!(big.disks_of(0), [&path("/dev/vdc"), &path("/dev/vdd")]);
    assert_eq!(
        big.disks,
        [vec![Some(path("/dev/vdc")), Some(path("/dev/vdd"))], vec![Some(path("/dev/vdb"))]]
    );
}

#[test]
fn the_host_has_each_vm_once_with_all_its_tasks() {
    let host = host(&example());
    let all: Vec<_> = host.tasks().map(|(vm, task)| format!("{}/{}", vm.name, task.name)).collect();
    assert_eq!(all, ["database/commit", "database/scan", "database/lookup", "backup/copy"]);
    let on: Vec<_> = host.disks(0).iter().map(|d| (d.part, d.name.as_deref())).collect();
    assert_eq!(on, [(0, Some("log")), (1, Some("data")), (1, Some("index"))]);
    assert_eq!(host.disks(1)[0].disk, Some(path("/dev/vdb")));
    assert_eq!(host.disks(2), []);
}

#[test]
fn a_caller_of_one_device_refuses_more_and_says_where() {
    let errors = host(&example()).single().unwrap_err();
    assert_eq!(errors.errors()[0].line, Some(5));
    assert_eq!(errors.errors()[0].message, "this command takes one device, and this spec has 2");
    assert_eq!(parse("plant.toml", &example()).unwrap_err(), errors);
}

#[test]
fn a_file_of_one_device_is_the_same_in_both_forms() {
    let rest = format!("[[vm]]\nname = \"a\"\npid = 1\ndisk = \"/dev/./vdb\"\n{}", task("t", ""));
    let old = format!("[device]\npath = \"/dev/sda\"\n{rest}");
    let list = format!("[[device]]\npath = \"/dev/sda\"\n{rest}");
    assert_eq!(host(&old).single().unwrap(), host(&list).single().unwrap());
    assert_eq!(HostSpec::from(host(&old).single().unwrap().clone()), host(&old));
    // The normalised path, as in the VM itself.
    assert_eq!(host(&old).disks(0)[0].disk, Some(path("/dev/vdb")));
}

#[test]
fn one_device_may_carry_several_disks_of_a_vm() {
    let vm = "[[vm]]\nname = \"a\"\npid = 1\n\
        disks = [{ name = \"log\", path = \"/dev/vdb\" }, { name = \"data\", path = \"/dev/vdc\" }]\n";
    let text = |device: &str| {
        let tasks = [task("t", "disk = \"data\""), task("u", "disk = \"log\"")].concat();
        format!("{device}{vm}{tasks}")
    };
    let host = host(&text("[device]\npath = \"/dev/sda\"\n"));
    let part = &host.parts()[0];
    assert_eq!(part.disks_of(0), [&path("/dev/vdc"), &path("/dev/vdb")]);
    let Reach::Existing { disk, .. } = &part.spec.vms[0].reach else { panic!() };
    assert_eq!(*disk, Some(path("/dev/vdc")));
    // With several devices, disks without `device` are ambiguous.
    let text = refused(&text(DEVICES));
    assert_eq!(text.matches("does not say on which device it is").count(), 2, "{text}");
}

#[test]
fn the_vms_device_is_that_of_disks_without_one() {
    let vm = "[[vm]]\nname = \"a\"\npid = 1\ndevice = \"fast\"\n\
        disks = [{ name = \"log\" }, { name = \"data\", device = \"big\" }]\n";
    let host = host(&format!("{DEVICES}{vm}{}{}", task("t", "disk = \"data\""), task("u", "disk = \"log\"")));
    assert_eq!(host.disks(0).iter().map(|d| d.part).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(host.parts()[0].disks, [[None]]);
}

#[test]
fn the_only_named_disk_need_not_be_named_by_tasks() {
    let vm = "[[vm]]\nname = \"a\"\npid = 1\ndisks = [{ name = \"data\", path = \"/dev/vdb\" }]\n";
    let host = host(&format!("[device]\npath = \"/dev/sda\"\n{vm}{}", task("t", "")));
    assert_eq!(host.disks(0)[0].name.as_deref(), Some("data"));
}

#[test]
fn disks_of_a_domain_are_named_by_libvirts_targets() {
    let vm = "[[vm]]\nname = \"a\"\ndomain = \"a\"\n\
        disks = [{ name = \"log\", target = \"vdb\" }, { name = \"data\", target = \"sda\" }]\n";
    let text = |vm: &str| {
        let tasks = [task("t", "disk = \"data\""), task("u", "disk = \"log\"")].concat();
        format!("[device]\npath = \"/dev/sda\"\n{vm}{tasks}")
    };
    assert_eq!(host(&text(vm)).disks(0)[0].disk, Some(VmDisk::Target("sda".to_owned())));
    let paths = refused(&text(&vm.replace("target", "path")));
    assert_eq!(paths.matches("a disk of a libvirt domain is named by `target`").count(), 2, "{paths}");
    let targets = refused(&text(&vm.replace("domain = \"a\"", "pid = 1")));
    assert_eq!(targets.matches("`target` is libvirt's name of a disk").count(), 2, "{targets}");
    let twice = refused(&text(&vm.replace("sda", "vdb")));
    assert!(twice.contains("already has a disk with target \"vdb\""), "{twice}");
}
