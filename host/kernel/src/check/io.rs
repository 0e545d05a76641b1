//! Privilege, kernel, elevators and control groups.

use std::path::Path;

use super::Finding;
use crate::{BlockDevice, Cgroups, Hierarchy, HostError, Root, text, unless_gone};

/// Requests of an elevator below which it has hardly a choice.
const FEW: u32 = 8;

pub(super) fn check(root: &Root, found: &mut Vec<Finding>) {
    privilege(root, found);
    let release = kernel(root, found);
    bfq(root, &release, found);
    elevators(root, found);
    cgroups(root, found);
    io_uring(root, found);
}

/// The switch for io_uring, which hardened systems turn off; Linux before 6.6 has none.
fn io_uring(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "io_uring";
    const WHY: &str = "rtvirtio-iod serves its disks and networks by io_uring, and does not start without";
    const PATH: &str = "/proc/sys/kernel/io_uring_disabled";
    const REMEDY: &str = "for the I/O domain: sysctl kernel.io_uring_disabled=0";
    let switch = root.read_optional(PATH);
    found.push(match switch.as_ref().map(Option::as_deref) {
        Ok(None) => Finding::ok(ID, "this kernel has no switch for it", WHY),
        Ok(Some("0")) => Finding::ok(ID, "on for all", WHY),
        Ok(Some("1")) => {
            Finding::warn(ID, "only with CAP_SYS_ADMIN or in kernel.io_uring_group", WHY, REMEDY)
        }
        Ok(Some("2")) => Finding::warn(ID, "off for all: kernel.io_uring_disabled is 2", WHY, REMEDY),
        Ok(Some(text)) => {
            let form = HostError::Form { path: PATH.into(), text: text.to_owned(), expected: "0, 1 or 2" };
            Finding::unknown(ID, &form, WHY)
        }
        Err(e) => Finding::unknown(ID, e, WHY),
    });
}

fn privilege(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str = "writing I/O settings and cgroups needs root";
    if !root.is_real() {
        return;
    }
    let uid = rustix::process::geteuid().as_raw();
    found.push(if uid == 0 {
        Finding::ok("root", "running as root", WHY)
    } else {
        Finding::fail(
            "root",
            format!("running as user {uid}"),
            WHY,
            "run with sudo; `plan` and `predict` need no root",
        )
    });
}

fn kernel(root: &Root, found: &mut Vec<Finding>) -> String {
    const WHY: &str = "BFQ has existed since 4.12; weights per device on cgroup v1 since 5.4";
    match root.read("/proc/sys/kernel/osrelease") {
        Ok(text) => {
            let release = text.trim().to_owned();
            let mut parts =
                release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
            let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
            found.push(if version < (4, 12) {
                Finding::fail("kernel", format!("Linux {release}"), WHY, "use Linux 5.4 or later")
            } else if version < (5, 4) {
                Finding::warn("kernel", format!("Linux {release}"), WHY, "use Linux 5.4 or later")
            } else {
                Finding::ok("kernel", format!("Linux {release}"), WHY)
            });
            release
        }
        Err(e) => {
            found.push(Finding::unknown("kernel", &e, WHY));
            String::new()
        }
    }
}

fn bfq(root: &Root, release: &str, found: &mut Vec<Finding>) {
    const WHY: &str = "weights and slices are BFQ's; without it only limits remain";
    let mut unread = None;
    let mut is = |found: Result<bool, HostError>| {
        found.unwrap_or_else(|e| {
            unread = Some(e);
            false
        })
    };
    let offers = |disk: &BlockDevice| {
        let elevators = unless_gone(disk.elevators(root))?;
        Ok(elevators.is_some_and(|e| e.available.iter().any(|name| name == "bfq")))
    };
    let offered = match BlockDevice::all(root) {
        Ok(all) => all.iter().any(|disk| is(offers(disk))),
        Err(e) => is(Err(e)),
    };
    let modules = Path::new("/lib/modules").join(release);
    let named_in =
        |file: &str| Ok(root.read_optional(modules.join(file))?.is_some_and(|t| t.contains("/bfq.ko")));
    let built_in = offered || is(root.exists("/sys/module/bfq")) || is(named_in("modules.builtin"));
    let module = is(named_in("modules.dep"));
    found.push(if built_in {
        Finding::ok("bfq", "BFQ is in the kernel", WHY)
    } else if let Some(e) = unread {
        Finding::unknown("bfq", &e, WHY)
    } else if module {
        Finding::warn(
            "bfq",
            "BFQ is a module that is not loaded",
            WHY,
            "modprobe bfq (and `echo bfq >/etc/modules-load.d/bfq.conf`)",
        )
    } else {
        Finding::fail(
            "bfq",
            "this kernel has no BFQ",
            WHY,
            "use a kernel with CONFIG_IOSCHED_BFQ and CONFIG_BFQ_GROUP_IOSCHED",
        )
    });
}

fn elevators(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str = "the elevator decides in what order the VMs' requests reach the disk";
    let disks = match BlockDevice::all(root) {
        Ok(disks) => disks,
        Err(e) => return found.push(Finding::unknown("elevator", &e, WHY)),
    };
    for disk in disks {
        let id = format!("elevator.{}", disk.name);
        match disk.elevators(root) {
            Ok(e) if e.available.len() == 1 => found.push(Finding::ok(
                &id,
                format!("{}: no choice of I/O scheduler; requests are ordered on the disks below", disk.name),
                WHY,
            )),
            Ok(e) => {
                let what = format!("{}: {} (offers {})", disk.name, e.current, e.available.join(", "));
                found.push(queued(root, &disk, &e.current, &id, what, WHY));
            }
            Err(e) => found.push(Finding::unknown(&id, &e, WHY)),
        }
    }
}

/// Requests that an elevator can choose from: twice the slots of the disk (`block/blk-mq-sched.c`),
/// so 2 for an SD card, among which I/O priorities and weights are without effect (measured on
/// Linux 6.1: real-time against best-effort readers 84:90 requests with 2, 171:0 with 64).
fn queued(root: &Root, disk: &BlockDevice, elevator: &str, id: &str, what: String, why: &str) -> Finding {
    let path = disk.queue("nr_requests");
    match root.read_optional(&path) {
        Err(e) => Finding::unknown(id, &e, why),
        Ok(Some(number)) if elevator != "none" && number.parse().is_ok_and(|n: u32| n < FEW) => {
            let few = format!("{what}; it holds {number} requests, too few for I/O priorities and weights");
            let remedy = format!("after each change of the elevator: echo 64 > {}", path.display());
            Finding::warn(id, few, why, &remedy)
        }
        Ok(_) => Finding::ok(id, what, why),
    }
}

fn cgroups(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str = "weights and limits per VM are set on the VM's cgroup";
    let cgroups = match Cgroups::detect(root) {
        Ok(c) => c,
        Err(e) => {
            return found.push(Finding::fail(
                "cgroup.io",
                e.to_string(),
                WHY,
                "mount cgroup v2 with the io controller",
            ));
        }
    };
    let at = cgroups.mount.display();
    match cgroups.hierarchy {
        Hierarchy::V1 => {
            found.push(Finding::ok("cgroup.io", format!("cgroup v1, blkio at {at}"), WHY));
        }
        Hierarchy::V2 => {
            found.push(match root.read(cgroups.mount.join("cgroup.subtree_control")) {
                Ok(text) => {
                    let state = if text::has_word(&text, "io") {
                        "enabled"
                    } else {
                        "not yet enabled; apply enables it, revert puts it back"
                    };
                    Finding::ok("cgroup.io", format!("cgroup v2 at {at}, io controller {state}"), WHY)
                }
                Err(e) => Finding::unknown("cgroup.io", &e, WHY),
            });
            rivals(root, &cgroups, found);
        }
    }
}

/// io.cost, which is a rival of BFQ only.
fn io_cost(root: &Root, cgroups: &Cgroups) -> Finding {
    const ID: &str = "io.cost";
    const WHY: &str =
        "io.cost delays requests by a cost model of its own; with BFQ both act and neither holds";
    let on = match root.read_optional(cgroups.mount.join("io.cost.qos")) {
        Err(e) => return Finding::unknown(ID, &e, WHY),
        Ok(None) => {
            return Finding::ok(
                ID,
                "there is no io.cost: the kernel was built without CONFIG_BLK_CGROUP_IOCOST, or this is a container",
                WHY,
            );
        }
        Ok(Some(qos)) => {
            let on = qos.lines().filter(|l| text::has_word(l, "enable=1"));
            on.filter_map(|l| l.split_whitespace().next()).map(str::to_owned).collect::<Vec<_>>()
        }
    };
    if on.is_empty() {
        return Finding::ok(ID, "io.cost is off", WHY);
    }
    let disks = match BlockDevice::all(root) {
        Ok(disks) => disks,
        Err(e) => return Finding::unknown(ID, &e, WHY),
    };
    let mut with_bfq = Vec::new();
    for dev in &on {
        let Some(disk) = disks.iter().find(|disk| disk.dev == *dev) else { continue };
        match disk.elevators(root) {
            Ok(elevators) if elevators.current == "bfq" => with_bfq.push(dev.as_str()),
            Ok(_) => {}
            Err(e) => return Finding::unknown(ID, &e, WHY),
        }
    }
    if with_bfq.is_empty() {
        return Finding::ok(ID, format!("io.cost divides device {}", on.join(", ")), WHY);
    }
    let qos = cgroups.mount.join("io.cost.qos");
    let remedies = with_bfq.iter().map(|dev| format!("echo '{dev} enable=0' >{}", qos.display()));
    let what = format!("io.cost is on for device {}, whose elevator is BFQ", with_bfq.join(", "));
    Finding::warn(ID, what, WHY, remedies.collect::<Vec<_>>().join("; "))
}

/// Other controllers that act on the same requests.
fn rivals(root: &Root, cgroups: &Cgroups, found: &mut Vec<Finding>) {
    found.push(io_cost(root, cgroups));
    const LATENCY: &str = "io.latency throttles all other groups when one misses its target";
    let used = cgroups.all_dirs(root).and_then(|dirs| {
        for dir in dirs {
            if root.read_optional(dir.join("io.latency"))?.is_some_and(|t| !t.is_empty()) {
                return Ok(Some(dir));
            }
        }
        Ok(None)
    });
    found.push(match used {
        Err(e) => Finding::unknown("io.latency", &e, LATENCY),
        Ok(None) => Finding::ok("io.latency", "io.latency is not used", LATENCY),
        Ok(Some(dir)) => Finding::warn(
            "io.latency",
            format!("io.latency is set in {}", dir.display()),
            LATENCY,
            "that of a plan goes with `rtvirtio revert`; remove another with `echo 'MAJ:MIN target=0' >io.latency` in \
             that directory",
        ),
    });
}
