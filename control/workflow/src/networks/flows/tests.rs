use std::net::UdpSocket;
use std::sync::Arc;

use crate::progress::Quiet;

use super::*;

fn host(networks: &str) -> HostSpec {
    let text = format!(
        "[device]\ntwin = \"qlc-nvme\"\n{networks}[[vm]]\nname = \"relay\"\nlab = \"qemu\"\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
         [[vm.nic]]\nnetwork = \"a\"\nmac = \"52:54:00:00:00:0a\"\ntap = \"t\"\n\
         [[vm.flow]]\nname = \"sv\"\ndirection = \"tx\"\nframe = \"140B\"\nrate = \"10/s\"\n"
    );
    HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"))
}

const ONE: &str = "[[network]]\nname = \"a\"\nlink = \"1Gbit/s\"\n";
const TWO: &str = "[[network]]\nname = \"b\"\nlink = \"1Gbit/s\"\n";

fn strings(all: &[&str]) -> Vec<String> {
    all.iter().map(|&s| s.to_owned()).collect()
}

#[test]
fn peers_are_interfaces_with_or_without_a_namespace() {
    let one = host(ONE);
    let of = |text: &str| peers_of(&one, &strings(&[text])).map(|all| all[0].clone().unwrap());
    assert_eq!(of("br0").unwrap(), Peer { namespace: None, interface: "br0".into() });
    assert_eq!(of("a=br0.100").unwrap().interface, "br0.100");
    let file = of("/proc/self/ns/net/up1").unwrap();
    assert_eq!((file.namespace.unwrap(), file.interface.as_str()), ("/proc/self/ns/net".into(), "up1"));
    for (text, said) in [
        ("b=br0", "the spec has no network \"b\"; it has a"),
        ("no-such/up1", "there is no network namespace /run/netns/no-such"),
        ("/up1", "no namespace before the `/`"),
        ("a=", "is no name of an interface"),
        ("an-interface-too-long", "is no name of an interface"),
    ] {
        let error = of(text).unwrap_err();
        assert_eq!(error.kind(), Kind::Argument);
        assert!(error.to_string().contains(said), "{error}");
    }
    let twice = peers_of(&one, &strings(&["br0", "a=br1"])).unwrap_err();
    assert!(twice.to_string().contains("has a peer already"), "{twice}");
    let two = host(&(ONE.to_owned() + TWO));
    let which = peers_of(&two, &strings(&["br0"])).unwrap_err().to_string();
    assert!(which.contains("--network-peer a=... or --network-peer b=br0"), "{which}");
}

#[test]
fn echoes_are_of_vms_and_flows_of_the_spec() {
    let host = host(ONE);
    let given = strings(&["relay=10.0.0.5", "relay/sv=[fd00::5]:7007"]);
    let echoes = echoes_of(&host, &given).unwrap();
    assert_eq!(echoes[&("relay", None)], "10.0.0.5:7".parse().unwrap());
    assert_eq!(echoes[&("relay", Some("sv"))], "[fd00::5]:7007".parse().unwrap());
    for (text, said) in [
        ("10.0.0.5", "write VM=ADDRESS"),
        ("x=10.0.0.5", "no VM \"x\""),
        ("relay/x=10.0.0.5", "has no flow \"x\""),
        ("relay=guest.local", "is no IP address"),
    ] {
        let given = strings(&[text]);
        let error = echoes_of(&host, &given).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// Flows run next to the tasks of the disks, and both are in one run; where those fail, the flows
/// end at once.
#[test]
fn flows_and_tasks_are_one_run() {
    let socket = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let address = format!("relay={}", socket.local_addr().unwrap());
    let ended = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&ended);
    let echo = std::thread::spawn(move || {
        let mut buffer = [0; 2_048];
        while !stop.load(Ordering::Relaxed) {
            if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                socket.send_to(&buffer[..len], from).unwrap();
            }
        }
    });
    let dirs = Dirs { state: "/nowhere".into(), run: "/nowhere".into() };
    let (host, length) = (host(ONE), Duration::from_millis(500));
    let (peers, echoes, quiet) = (strings(&["lo"]), strings(&[&address]), Quiet::default());
    let flows = prepare(&host, (&peers, &echoes), length, &dirs, &quiet).unwrap();
    let tasks = || Run {
        scheme: "as-found".into(),
        kind: VmKind::Qemu,
        seconds: 0.5,
        noise: None,
        disk: None,
        tasks: Vec::new(),
    };
    let run = flows.run_with(length, &quiet, || Ok(tasks())).unwrap();
    let names: Vec<(&str, u64)> = run.tasks.iter().map(|t| (t.task.as_str(), t.n)).collect();
    assert_eq!(names, [("sv", 5)]);
    let failed = flows.run_with(Duration::from_secs(3_600), &quiet, || bail!(Guarded, "the disk is in use"));
    assert_eq!(failed.unwrap_err().kind(), Kind::Guarded);
    quiet.cancel_flag().store(true, Ordering::Relaxed);
    let stopped = flows.run_alone("as-found", Duration::from_secs(3_600), &quiet);
    assert_eq!(stopped.unwrap_err().kind(), Kind::Cancelled);
    ended.store(true, Ordering::Relaxed);
    echo.join().unwrap();
}
