//! Networks, ports and flows: accepted and refused keys.

use rtvirtio_spec::{Direction, HostSpec, Mark, PathPart, Uplink};
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos};

const HEAD: &str = "[device]\npath = \"/dev/sda\"\n";
const NETWORK: &str = "[[network]]\nlink = \"100Mbit/s\"\n";
const VM: &str =
    "[[vm]]\nname = \"relay\"\npid = 1\n[[vm.task]]\nname = \"log\"\nop = \"write\"\nblock = \"4KiB\"\n";
const NIC: &str = "[[vm.nic]]\nmac = \"52:54:00:00:00:0A\"\ntap = \"tap-relay\"\n";
const FLOW: &str = "[[vm.flow]]\nname = \"sv\"\ndirection = \"tx\"\nframe = \"140B\"\nrate = \"4000/s\"\n";

fn host(parts: &[&str]) -> HostSpec {
    HostSpec::parse("plant.toml", &[&[HEAD], parts].concat().concat()).unwrap_or_else(|e| panic!("{e}"))
}

fn refused(parts: &[&str]) -> String {
    HostSpec::parse("plant.toml", &[&[HEAD], parts].concat().concat()).unwrap_err().to_string()
}

#[test]
fn networks_ports_and_flows_are_read() {
    let flow = format!("{FLOW}burst = 3\npcp = 4\ntarget = {{ latency = \"2ms\" }}\n");
    let host = host(&[NETWORK, VM, NIC, &flow]);
    let network = &host.networks()[0];
    assert_eq!((network.link, network.mtu, &network.uplink), (BytesPerSec(12.5e6), 1_500, &Uplink::Tap));
    assert_eq!(network.name(), "net0");
    let vm = &host.vms()[0];
    assert_eq!((vm.nics[0].mac.to_string().as_str(), vm.nics[0].network), ("52:54:00:00:00:0a", 0));
    let flow = &vm.flows[0];
    assert_eq!((flow.direction, flow.rate, flow.burst), (Direction::Tx, Iops(4_000.0), 3));
    assert_eq!((flow.mark, flow.on_the_wire()), (Some(Mark::Pcp(4)), Bytes(164)));
    assert_eq!(flow.target.unwrap().latency, Nanos::from_millis(2));
    // A short frame is padded.
    let short = self::host(&[NETWORK, VM, NIC, &FLOW.replace("140B", "20B")]);
    assert_eq!(short.vms()[0].flows[0].on_the_wire(), Bytes(84));
    // Networks are part of the JSON that plans are compared by, and absent from it where there are
    // none.
    assert!(serde_json::to_string(&host).unwrap().contains("\"flows\""));
    assert!(!serde_json::to_string(&self::host(&[VM])).unwrap().contains("networks"));
}

#[test]
fn a_port_is_of_the_network_that_it_names() {
    let two = "[[network]]\nname = \"a\"\nlink = \"1Gbit/s\"\nuplink = \"packet\"\ninterface = \"eth1\"\n\
               [[network]]\nname = \"b\"\nlink = \"1Gbit/s\"\n";
    let nics = "[[vm.nic]]\nnetwork = \"b\"\nmac = \"52:54:00:00:00:01\"\ntap = \"t\"\n\
                [[vm.nic]]\nnetwork = \"a\"\nmac = \"52:54:00:00:00:01\"\n";
    let flow = format!("{FLOW}network = \"a\"\n");
    let host = host(&[two, VM, nics, &flow]);
    assert_eq!(host.networks()[0].uplink, Uplink::Packet { interface: "eth1".to_owned() });
    assert_eq!((host.vms()[0].nics[1].network, host.vms()[0].flows[0].nic), (0, 1));
    assert!(refused(&[two, VM, nics, FLOW]).contains("there are several networks, and this names none"));
}

const PATH: &str = "[[vm.path]]\nname = \"all\"\npath = [\"net\", \"cpu\", \"disk\"]\nwork = \"300us\"\ntarget = { latency = \"50ms\" }\n";

/// The VM with a target on its task, its port and a flow with a target.
fn with_targets() -> [String; 4] {
    let target = "target = { latency = \"20ms\" }\n";
    [NETWORK.to_owned(), format!("{VM}rate = \"10/s\"\n{target}"), NIC.to_owned(), format!("{FLOW}{target}")]
}

#[test]
fn paths_name_their_parts() {
    let all = with_targets();
    let parts: Vec<&str> = all.iter().map(String::as_str).chain([PATH]).collect();
    let host = host(&parts);
    let path = &host.paths(0)[0];
    assert_eq!((path.name.as_str(), path.target.latency), ("all", Nanos::from_millis(50)));
    let work = Nanos::from_micros(300);
    assert_eq!(path.parts, [PathPart::Net(0), PathPart::Cpu(work), PathPart::Disk(0)]);
    assert!(host.paths(1).is_empty());
    let again = FLOW.replace("sv", "log2") + "target = { latency = \"9ms\" }\n";
    let named = PATH.replace("\"disk\"]", "\"disk\"]\nflow = \"log2\"");
    let several: Vec<&str> = all.iter().map(String::as_str).chain([again.as_str(), named.as_str()]).collect();
    assert_eq!(self::host(&several).paths(0)[0].parts[0], PathPart::Net(1));
    for (path, message, help) in [
        (
            PATH.replace("path = [\"net\", \"cpu\", \"disk\"]\n", ""),
            "[[vm.path]] has no `path`",
            "path = [\"net\"",
        ),
        (PATH.replace("\"net\", ", "\"nic\", "), "a path has no part \"nic\"", "did you mean \"net\"?"),
        (PATH.replace("\"disk\"", "\"cpu\""), "\"cpu\" is in the path twice", "make two paths"),
        (
            PATH.replace("\"net\", \"cpu\", ", "").replace("work = \"300us\"\n", ""),
            "at least two parts",
            "its own `target`",
        ),
        (PATH.replace("work = \"300us\"\n", ""), "[[vm.path]] has no `work`", "add work = \"300us\""),
        (PATH.replace("\"cpu\", ", ""), "`work` belongs to a path with \"cpu\"", "add \"cpu\" to `path`"),
        (PATH.replace("work =", "flow = \"x\"\nwork ="), "this VM has no flow \"x\"", "write flow = \"sv\""),
        (PATH.replace("300us", "300"), "has no unit", "300ms"),
        (PATH.replace("target =", "deadline ="), "unknown key `deadline`", "target = { latency"),
        (PATH.replace("[\"net\", \"cpu\", \"disk\"]", "\"net\""), "`path` must be a list", "path = [\"net\""),
        (PATH.to_owned() + PATH, "already a path of this VM", "the first is on line"),
    ] {
        let parts: Vec<&str> = all.iter().map(String::as_str).chain([path.as_str()]).collect();
        let found = refused(&parts);
        assert!(found.contains(message) && found.contains(help), "{found}\n-- {message} / {help}");
        assert_eq!(found.matches("error:").count(), 1, "{found}");
    }
    // A part without a target has no bound that could be added.
    let bare = refused(&[NETWORK, VM, NIC, &all[3], PATH]);
    assert!(bare.contains("no task of this VM has a target") && bare.contains("[[vm.task]]"), "{bare}");
    let unclear: Vec<&str> = all.iter().map(String::as_str).chain([again.as_str(), PATH]).collect();
    let unclear = refused(&unclear);
    assert!(unclear.contains("add flow = \"sv\" or \"log2\""), "{unclear}");
}

#[test]
fn mistakes_have_their_remedies() {
    let again = NIC.replace("tap-relay", "t2").replace("0A", "0B");
    let long = FLOW.replace("140B", "1600B");
    let with = |more: &str| format!("{FLOW}{more}\n");
    let rx = with("pcp = 4").replace("\"tx\"", "\"rx\"");
    let (fast, priority) = (with("deadline = \"2ms\""), with("pcp = 9"));
    let (both, named_as_task) = (with("pcp = 4\ndscp = 46"), FLOW.replace("sv", "log"));
    let (bare, unitless) = (FLOW.replace("\"140B\"", "140"), FLOW.replace("140B", "140"));
    let other = VM.replace("relay", "other").replace("pid = 1", "pid = 2");
    for (parts, message, help) in [
        (vec!["[[network]]\n", VM], "[[network]] has no `link`", "add link = \"100Mbit/s\""),
        (vec!["[[network]]\nlink = 100\n", VM], "must be a string with its unit", "link = \"100Mbit/s\""),
        (vec!["[[network]]\nlink = \"100mbps\"\n", VM], "`link`", "did you mean \"100Mbit/s\"?"),
        (
            vec!["[[network]]\nlink = \"1Gbit/s\"\nuplink = \"packet\"\n", VM],
            "has no `interface`",
            "add interface = \"eth1\"",
        ),
        (
            vec!["[[network]]\nlink = \"1Gbit/s\"\ninterface = \"eth1\"\n", VM],
            "belongs to uplink",
            "add uplink = \"packet\"",
        ),
        (
            vec!["[[network]]\nlink = \"1Gbit/s\"\nbridge = \"br0\"\n", VM],
            "unknown key `bridge`",
            "did you mean tap",
        ),
        (vec![VM, NIC], "the spec has no [[network]]", "add [[network]]"),
        (vec![NETWORK, VM, FLOW], "this VM has no port", "add below the VM: [[vm.nic]]"),
        (vec![NETWORK, VM, NIC, &again], "already has a port on this network", "remove this one"),
        (vec![NETWORK, VM, NIC, &other, NIC], "another port has the address", "the first is on line"),
        (
            vec![NETWORK, VM, "[[vm.nic]]\nmac = \"52:54:00:00:00:01\"\n"],
            "this port has no `tap`",
            "add tap =",
        ),
        (
            vec![NETWORK, VM, "[[vm.nic]]\nmac = \"01:00:5e:00:00:01\"\ntap = \"t\"\n"],
            "address of a group",
            "",
        ),
        (vec![NETWORK, VM, "[[vm.nic]]\nmac = \"relay\"\ntap = \"t\"\n"], "no Ethernet address", "such as"),
        (
            vec![NETWORK, VM, "[[vm.nic]]\nmac = \"52:54:00:00:00:01\"\ntap = \"a/b\"\n"],
            "no name of an interface",
            "1 to 15 characters",
        ),
        (vec![NETWORK, VM, NIC, &long], "`frame` is 1600B, out of its range", "1522B"),
        (vec![NETWORK, VM, NIC, &bare], "`frame` must be a string with its unit", "write frame = \"140B\""),
        (vec![NETWORK, VM, NIC, &unitless], "\"140\" has no unit", "write frame = \"140B\""),
        (vec![NETWORK, VM, NIC, &fast], "unknown key `deadline`", "target = { latency"),
        (vec![NETWORK, VM, NIC, &priority], "`pcp` is 9", "0 to 7"),
        (vec![NETWORK, VM, NIC, &both], "both mark the frames", "keep one"),
        (vec![NETWORK, VM, NIC, &rx], "marks order what a VM sends", "remove this line"),
        (vec![NETWORK, VM, NIC, &named_as_task], "already a task or flow", "the first is on line"),
        (vec![NETWORK, VM, NIC, FLOW, FLOW], "already a task or flow", "the first is on line"),
        (vec!["[network]\nlink = \"1Gbit/s\"\n", VM], "`network` must be a list of tables", "[[network]]"),
    ] {
        let found = refused(&parts);
        assert!(found.contains(message) && found.contains(help), "{found}\n-- {message} / {help}");
        // One mistake is one error.
        assert_eq!(found.matches("error:").count(), 1, "{found}");
    }
}
