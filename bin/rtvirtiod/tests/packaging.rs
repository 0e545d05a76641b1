//! What is installed beside the program: the unit, and the hooks of libvirt and Proxmox VE.

mod common;

use std::fs;
use std::io::Read as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Rig, output_text};
use rtvirtio_testkit::site::{program, project};
use rtvirtio_testkit::{HANG, Need, has};

#[test]
fn the_units_are_understood_and_little_exposed() {
    let test = "the_units_are_understood_and_little_exposed";
    if !has(test, &[Need::Program("systemd-analyze")]) {
        return;
    }
    let rig = Rig::new();
    for (unit, name) in [
        ("rtvirtiod.service", "rtvirtiod"),
        ("rtvirtio-iod.service", "rtvirtio-iod"),
        ("rtvirtio-iod@.service", "rtvirtio-iod"),
        ("rtvirtio-guest.service", "rtvirtio-guest"),
        ("rtvirtio-pacemaker.service", "rtvirtio-pacemaker"),
    ] {
        let text = fs::read_to_string(project().join("packaging/systemd").join(unit)).unwrap();
        // The programs and their manuals are not installed here.
        let text = text
            .replace(&format!("/usr/bin/{name} "), &format!("{} ", program(name).display()))
            .replace(&format!("/usr/bin/{name}\n"), &format!("{}\n", program(name).display()))
            .replace("/usr/bin/rtvirtio ", &format!("{} ", program("rtvirtio").display()))
            .replace(&format!("man:{name}(8) "), "");
        let file = rig.site.dir.path().join(unit);
        fs::write(&file, text).unwrap();
        let analyze = |args: &[&str]| Command::new("systemd-analyze").args(args).arg(&file).output().unwrap();
        let out = analyze(&["verify", "--man=no"]);
        assert!(out.status.success() && out.stderr.is_empty(), "{unit}: {}", output_text(&out));
        // In tenths: 5.0 of 10.
        let out = analyze(&["security", "--offline=true", "--threshold=50"]);
        assert!(out.status.success(), "{unit}: {}", output_text(&out));
    }
}

/// The unit of a named I/O domain is that of the only one but for its names.
#[test]
fn the_units_of_the_io_domain_are_alike() {
    let read = |unit: &str| fs::read_to_string(project().join("packaging/systemd").join(unit)).unwrap();
    let named = read("rtvirtio-iod@.service");
    let comment = named.lines().find(|line| line.contains("side by side")).unwrap();
    let one = named
        .replace(&format!("{comment}\n"), "")
        .replace(" (%i)", "")
        .replace("iod.d/%i.toml", "iod.toml")
        .replace("/run/rtvirtio/%i.sock", "/run/rtvirtio/iod.sock");
    assert_eq!(one, read("rtvirtio-iod.service"));
}

/// The page inside Cockpit is the service's page with Cockpit's library before its own scripts, and
/// every file that it names is installed with it.
#[test]
fn the_cockpit_page_is_the_services_own() {
    let read = |path: &str| fs::read_to_string(project().join(path)).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&read("packaging/cockpit/manifest.json")).unwrap();
    // Cockpit's manifest: `tools` has an entry for each page, by its file without `.html`.
    assert!(manifest["tools"]["index"]["label"].is_string() && manifest["name"] == "rtvirtio", "{manifest}");
    let own = read("control/daemon/page/index.html");
    let first = "<script src=\"transport.js\"></script>";
    let expected = own.replace(first, &format!("<script src=\"../base1/cockpit.js\"></script>\n{first}"));
    assert_ne!(own, expected);
    let out = Command::new("sh").arg(project().join("packaging/cockpit/index.sh")).output().unwrap();
    assert!(out.status.success(), "{}", output_text(&out));
    assert_eq!(String::from_utf8(out.stdout).unwrap(), expected);
    let build = read("packaging/deb/build.sh");
    assert!(build.contains("packaging/cockpit/index.sh"));
    let named = expected.split("src=\"").skip(1).chain(expected.split("stylesheet\" href=\"").skip(1));
    let files: Vec<&str> = named.filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(files, ["../base1/cockpit.js", "transport.js", "app.js", "app.css"]);
    assert!(
        build.contains("for file in app.css app.js transport.js; do")
            && build.contains("usr/share/cockpit/rtvirtio")
    );
}

/// A hook that is killed where it does not end by itself.
fn command(rig: &Rig, file: &str, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command
        .args([HANG.as_secs().to_string().as_str(), "sh"])
        .arg(project().join("packaging").join(file))
        .args(args)
        .env("RTVIRTIO_RUN_DIR", rig.site.run_dir())
        .env("RTVIRTIO_VETO", rig.site.dir.path().join("veto"))
        .stdin(Stdio::null());
    command
}

#[test]
fn hooks_end_with_0_whatever_happens() {
    if !has("hooks_end_with_0_whatever_happens", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    let hook = |rig: &Rig, file: &str, args: &[&str]| {
        let out = command(rig, file, args).output().unwrap();
        assert!(
            out.status.success() && output_text(&out).is_empty(),
            "{file} {args:?}: {}",
            output_text(&out)
        );
    };
    let all = |rig: &Rig| {
        for event in
            ["prepare", "start", "started", "stopped", "release", "reconnect", "migrate", "restore", ""]
        {
            hook(rig, "libvirt/rtvirtio", &["plc", event, "begin", "-"]);
        }
        for event in ["pre-start", "post-start", "pre-stop", "post-stop"] {
            hook(rig, "proxmox/rtvirtio-hook.sh", &["100", event]);
        }
    };
    // Also where what it inherits is closed.
    let closed = |rig: &Rig| {
        for file in ["libvirt/rtvirtio", "proxmox/rtvirtio-hook.sh"] {
            let script = format!(
                "exec sh '{}' plc \"$0\" begin - <&- >&- 2>&-",
                project().join("packaging").join(file).display()
            );
            for event in ["prepare", "started", "reconnect", "post-start"] {
                let mut hook = Command::new("sh");
                hook.args(["-c", &script, event]).env("RTVIRTIO_RUN_DIR", rig.site.run_dir());
                assert!(hook.status().unwrap().success(), "{file} {event}");
            }
        }
    };
    closed(&rig);
    // Without a service, with one, and with a socket that nothing serves any more.
    all(&rig);
    rig.start(&[]);
    all(&rig);
    closed(&rig);
    rig.kill();
    assert!(rig.socket().exists());
    all(&rig);
    // One that takes a request and never answers, also where starts may be refused.
    fs::write(rig.site.dir.path().join("veto"), "").unwrap();
    fs::remove_file(rig.socket()).unwrap();
    let hangs = UnixListener::bind(rig.socket()).unwrap();
    for event in ["prepare", "reconnect"] {
        hook(&rig, "libvirt/rtvirtio", &["plc", event, "begin", "-"]);
        let (mut asked, _) = hangs.accept().unwrap();
        let mut request = String::new();
        // It has given up: its end is closed.
        asked.read_to_string(&mut request).unwrap();
        assert!(request.contains(if event == "prepare" { "GET /v1/vms/plc " } else { "POST /v1/compare " }));
    }
    // The VM is named by its UUID where its XML has one, and its name may be any.
    let xml = rig.site.dir.path().join("domain.xml");
    let uuid = "a9949d75-95e3-4747-82e3-c9fee1047688";
    let text = format!("<domain type='qemu'>\n  <name>a b</name>\n  <uuid>{uuid}</uuid>\n</domain>\n");
    fs::write(&xml, text).unwrap();
    let mut prepare = command(&rig, "libvirt/rtvirtio", &["a b", "prepare", "begin", "-"]);
    assert!(prepare.stdin(fs::File::open(&xml).unwrap()).status().unwrap().success());
    let (mut asked, _) = hangs.accept().unwrap();
    let mut request = String::new();
    asked.read_to_string(&mut request).unwrap();
    let wanted = [format!("GET /v1/vms/{uuid}?domain=a+b "), format!("GET /v1/vms/{uuid}?domain=a%20b ")];
    assert!(wanted.iter().any(|wanted| request.contains(wanted)), "{request}");
    // What it inherits, by numbers of one digit, is not in the hands of what it runs.
    let script = "exec 4>&1 9>&1; exec \"$@\"";
    let inherited = command(&rig, "libvirt/rtvirtio", &["plc", "reconnect", "begin", "-"]);
    let mut child = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(inherited.get_program())
        .args(inherited.get_args())
        .env("RTVIRTIO_RUN_DIR", rig.site.run_dir())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (asked, _) = hangs.accept().unwrap();
    let pid = peer(&asked);
    let open: Vec<u32> = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|fd| fd.unwrap().file_name().to_string_lossy().parse().ok())
        .filter(|fd| {
            *fd < 10
                && fs::read_link(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|to| to == Path::new("/dev/null"))
        })
        .collect();
    drop(asked);
    assert!(child.wait().unwrap().success());
    assert_eq!(open, [0, 1, 2]);
}

/// The process at the other end.
fn peer(stream: &UnixStream) -> u32 {
    let of = rustix::net::sockopt::socket_peercred(stream).unwrap();
    of.pid.as_raw_nonzero().get().try_into().unwrap()
}

#[test]
fn a_start_is_refused_only_where_that_is_asked_for() {
    if !has("a_start_is_refused_only_where_that_is_asked_for", &[Need::Root, Need::RT_GROUPS]) {
        return;
    }
    let mut rig = Rig::new();
    // Neither runs, and they do not fit next to each other.
    for (name, criticality) in [("plc", "high"), ("hist", "low")] {
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{name}\"\nqmp = \"/nowhere/{name}.qmp\"\n\
             criticality = \"{criticality}\"\ncpu = {{ budget = \"12ms\", period = \"20ms\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        );
        fs::write(rig.contracts().join(format!("{name}.toml")), text).unwrap();
    }
    rig.start(&[]);
    rig.wait_state("hist", "refused");
    let prepare =
        |vm: &str| command(&rig, "libvirt/rtvirtio", &[vm, "prepare", "begin", "-"]).output().unwrap();
    assert!(prepare("hist").status.success());
    fs::write(rig.site.dir.path().join("veto"), "").unwrap();
    for vm in ["plc", "other", "a b", "", "../status"] {
        assert!(prepare(vm).status.success(), "{vm}: {}", output_text(&prepare(vm)));
    }
    let out = prepare("hist");
    assert_eq!(out.status.code(), Some(1));
    assert!(
        output_text(&out).contains("the contract of hist is refused: ")
            && output_text(&out).contains("too much")
    );
    // The others are never refused.
    for event in ["start", "started", "reconnect", "release", "stopped"] {
        let out = command(&rig, "libvirt/rtvirtio", &["hist", event, "begin", "-"]).output().unwrap();
        assert!(out.status.success(), "{event}: {}", output_text(&out));
    }
}

#[test]
fn the_role_of_ansible_is_understood_and_says_what_it_would_do() {
    let test = "the_role_of_ansible_is_understood_and_says_what_it_would_do";
    if !has(test, &[Need::Root, Need::Program("ansible-playbook")]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let contract = file("plc-of-a-test.toml", "# what a contract says is the service's matter\n");
    let inventory = file(
        "hosts",
        "[hypervisors]\nhere ansible_connection=local ansible_python_interpreter=/usr/bin/python3\n",
    );
    let variables = serde_json::json!({
        "rtvirtio_contracts": [contract],
        "rtvirtio_contracts_absent": ["none-of-a-test"],
        "rtvirtio_config": "mode = \"observe\"\n",
    });
    let playbook = |option: &str| {
        Command::new("ansible-playbook")
            .args([option, "--inventory"])
            .arg(&inventory)
            .args(["--extra-vars", &variables.to_string()])
            .arg(project().join("packaging/ansible/site.yml"))
            .env("ANSIBLE_LOCAL_TEMP", dir.path())
            .env("ANSIBLE_REMOTE_TEMP", dir.path())
            .env("ANSIBLE_NOCOLOR", "1")
            .env("LC_ALL", "C.UTF-8")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let out = playbook("--syntax-check");
    assert!(out.status.success(), "{}", output_text(&out));
    let out = playbook("--check");
    let said = output_text(&out);
    assert!(out.status.success() && said.contains("failed=0"), "{said}");
    assert!(said.contains("changed: [here] => (item=") && said.contains("plc-of-a-test.toml"), "{said}");
    assert!(said.contains("ok: [here] => (item=none-of-a-test)"), "{said}");
    assert!(!Path::new("/etc/rtvirtio/contracts.d/plc-of-a-test.toml").exists());
}

/// Lines of a script that runs in a chroot which looks like this machine, and whose changes are in
/// memory only.
const IN_CHROOT: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc none "$1/root/proc"
mount --bind /dev "$1/root/dev"
mount --bind "$2" "$1/root/mnt"
rm -rf "$1/root/var/lib/rtvirtio" "$1/root/etc/rtvirtio"
exec chroot "$1/root" sh -c "$3"
"#;

const INSTALLED: &str = r#"
set -e
cd /mnt
dpkg --install rtvirtio_*.deb
rtvirtio --version; rtvirtiod --version; rtvirtio-iod --version
getent group rtvirtio >/dev/null
for page in rtvirtio.1 rtvirtio-plan.1 rtvirtio-iod.1 rtvirtio-iod.8 rtvirtiod.8; do man --warnings -l /usr/share/man/man${page##*.}/$page.gz >/dev/null; done
bash -c '. /usr/share/bash-completion/completions/rtvirtio && complete -p rtvirtio' >/dev/null
test -x /etc/libvirt/hooks/qemu.d/rtvirtio
dpkg --install rtvirtio-pacemaker_*.deb
test -f /usr/lib/systemd/system/rtvirtio-pacemaker.service
wants=/etc/systemd/system/multi-user.target.wants
mkdir -p $wants
for unit in rtvirtio-pacemaker rtvirtiod rtvirtio-iod@a; do ln -sf /usr/lib/systemd/system/$unit.service $wants/$unit.service; done
dpkg --purge rtvirtio-pacemaker
test ! -L $wants/rtvirtio-pacemaker.service
test -L $wants/rtvirtiod.service
test ! -e /usr/lib/systemd/system/rtvirtio-pacemaker.service
echo '# ours' >>/etc/libvirt/hooks/qemu.d/rtvirtio
# An upgrade keeps what the administrator has changed.
dpkg --force-confold --install rtvirtio_*.deb
grep -q '# ours' /etc/libvirt/hooks/qemu.d/rtvirtio
# What cannot be put back keeps the program.
mkdir -p /var/lib/rtvirtio
echo '{' >/var/lib/rtvirtio/JOURNAL
if dpkg --remove rtvirtio; then echo 'removed over a journal that nobody can read'; exit 1; fi
test -x /usr/bin/rtvirtio
rm /var/lib/rtvirtio/JOURNAL
# So does a systemd that does not say which disks are served.
rm -rf /run/systemd /run/dbus
mkdir -p /run/systemd/system
if SYSTEMD_IGNORE_CHROOT=1 dpkg --remove rtvirtio; then echo 'removed without an answer of systemd'; exit 1; fi
test -x /usr/bin/rtvirtio
# Nor does it leave an upgrade half done.
SYSTEMD_IGNORE_CHROOT=1 dpkg --force-confold --install rtvirtio_*.deb
rm -r /run/systemd
arrives() { echo 'https://github.com/rtvirtio/rtvirtio/contract/1' | sh /etc/libvirt/hooks/qemu.d/rtvirtio plc migrate begin -; }
if arrives; then echo 'let in without an answer of the service'; exit 1; fi
dpkg --remove rtvirtio
test ! -e /usr/bin/rtvirtio
# The hook stays until a purge, and refuses nothing without the program.
arrives
# The journal of a cluster's VM, whose contract is in force.
mkdir -p /var/lib/rtvirtio/contracts/plc
touch /var/lib/rtvirtio/contracts/plc/JOURNAL
sh /var/lib/dpkg/info/rtvirtio.postrm purge
test -e /var/lib/rtvirtio/contracts/plc/JOURNAL
# A search that fails has not shown that there is none.
mkdir /tmp/broken
printf '#!/bin/sh\nexit 1\n' >/tmp/broken/find
chmod 755 /tmp/broken/find
PATH=/tmp/broken:$PATH sh /var/lib/dpkg/info/rtvirtio.postrm purge
test -e /var/lib/rtvirtio/contracts/plc/JOURNAL
rm /var/lib/rtvirtio/contracts/plc/JOURNAL
ln -sf /usr/lib/systemd/system/rtvirtiod.service $wants/rtvirtiod.service
dpkg --purge rtvirtio
test ! -L $wants/rtvirtiod.service
test ! -L $wants/rtvirtio-iod@a.service
test ! -e /etc/libvirt/hooks/qemu.d/rtvirtio
test ! -e /var/lib/rtvirtio
"#;

/// Pages name examples by their places in the sources, which are those below the package's pages.
fn carries_the_examples_that_its_pages_name(package: &Path, tree: &Path) {
    let out = Command::new("dpkg-deb").arg("--extract").args([package, tree]).output().unwrap();
    assert!(out.status.success(), "{}", output_text(&out));
    let carried = tree.join("usr/share/doc/rtvirtio");
    let (mut dirs, mut named) = (vec![carried.join("docs")], 0);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            // An image is no text, and names none.
            let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
            for word in text.split(|c: char| !c.is_ascii_alphanumeric() && !"._/-".contains(c)) {
                let word = word.trim_start_matches("../").trim_start_matches("/usr/share/doc/rtvirtio/");
                if word.starts_with("examples/") {
                    named += 1;
                    let example = carried.join(word.trim_end_matches('.'));
                    assert!(example.exists(), "{} names {word}, which is not packaged", path.display());
                }
            }
        }
    }
    assert!(named > 20, "{named}");
    assert!(carried.join("examples/fleet/fleet.toml").exists());
}

#[test]
fn the_package_installs_upgrades_and_leaves() {
    let test = "the_package_installs_upgrades_and_leaves";
    let programs = ["dpkg-deb", "strip", "objdump", "unshare", "man"].map(Need::Program);
    if !has(test, &[&[Need::Root][..], &programs].concat()) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (packages, root) = (dir.path().join("packages"), dir.path().join("root"));
    fs::create_dir(&root).unwrap();
    let build = || {
        let out = Command::new("sh")
            .arg(project().join("packaging/deb/build.sh"))
            .arg("--programs")
            .arg(program("rtvirtiod").parent().unwrap())
            .arg("--out")
            .arg(&packages)
            .env("COMPRESSION", "none")
            .env("SOURCE_DATE_EPOCH", "1")
            .env("RTVIRTIO_GUEST", program("rtvirtio-guest"))
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", output_text(&out));
        let mut all: Vec<_> = fs::read_dir(&packages).unwrap().map(|e| e.unwrap().path()).collect();
        all.sort();
        all
    };
    let all = build();
    assert_eq!(all.len(), 4, "{all:?}");
    let package = all.iter().find(|p| p.to_string_lossy().contains("/rtvirtio_")).unwrap();
    let out = Command::new("dpkg-deb").arg("--info").arg(package).output().unwrap();
    assert!(output_text(&out).contains("Depends: libc6 (>= "), "{}", output_text(&out));
    carries_the_examples_that_its_pages_name(package, &dir.path().join("tree"));
    let script = INSTALLED.replace("JOURNAL", rtvirtio_apply::JOURNAL_FILE);
    let out = Command::new("unshare")
        .args(["--mount", "sh", "-c", IN_CHROOT, "sh"])
        .args([&root, &packages])
        .arg(script)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", output_text(&out));
}
