//! One node: its namespaces, cgroups and processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::ClusterError;

/// Controllers of cgroup v1 below which a node has groups, and the mount of the v2 hierarchy.
const CONTROLLERS: [&str; 9] =
    ["cpu", "cpuacct", "cpuset", "blkio", "memory", "freezer", "devices", "pids", "unified"];
/// Period of the node's real-time budget.
const PERIOD_US: u64 = 1_000_000;
/// Longest time for namespaces and groups to appear or to disappear.
const SETTLES: Duration = Duration::from_secs(60);

/// Shell functions that [`INIT`] uses.
const FUNCTIONS: &str = concat!(include_str!("mount_point.sh"), include_str!("libvirt_user.sh"));
/// Script of process 1 in the node's namespaces. `$1` is the node's number, `$2` its name, `$3` its
/// directory, `$4` the further agents, `$5` the directory with libvirt's files, or nothing, `$6`
/// that with a fence agent, or nothing.
const INIT: &str = r#"set -e
mount --make-rprivate /
mount -t proc proc /proc
# Where Pacemaker panics it asks the kernel to reboot, which is the host's.
if [ -e /proc/sysrq-trigger ]; then mount --bind /dev/null /proc/sysrq-trigger; fi
hostname "$2"
for c in cpu cpuacct cpuset blkio memory freezer devices pids; do
  if mountpoint -q /sys/fs/cgroup/$c; then
    umount /sys/fs/cgroup/$c
    mount -t cgroup -o $c cgroup /sys/fs/cgroup/$c
  fi
done
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# Before all mounts below it, which it would hide.
mount_point "$3/points" /var/lib/corosync
for p in pacemaker:/var/lib/pacemaker corosync:/var/lib/corosync etc:/etc/corosync log:/var/log; do
  mkdir -p "$3/${p%%:*}"
  mount --bind "$3/${p%%:*}" "${p#*:}"
done
mkdir -p /run/lock /run/crm /run/resource-agents /run/lasting "$3/lasting"
mount --bind "$3/lasting" /run/lasting
mkdir -p /var/lib/pacemaker/cib /var/lib/pacemaker/pengine /var/lib/pacemaker/cores /var/lib/pacemaker/blackbox
mkdir -p /var/log/pacemaker /var/log/cluster
# All nodes start now: the first election need not wait the default's 20 s for others.
cib=/var/lib/pacemaker/cib/cib.xml
if [ ! -e $cib ]; then
  options='<cluster_property_set id="cib-bootstrap-options"><nvpair id="cib-bootstrap-options-dc-deadtime" name="dc-deadtime" value="5s"/></cluster_property_set>'
  cibadmin --empty | sed "s|<crm_config/>|<crm_config>$options</crm_config>|" >$cib
  chmod 600 $cib
fi
chown -R hacluster:haclient /var/lib/pacemaker /var/log/pacemaker /run/crm
mount -t overlay -o "lowerdir=$4:/usr/lib/ocf/resource.d" overlay /usr/lib/ocf/resource.d
if [ -n "$6" ]; then mount -t overlay -o "lowerdir=$6:/usr/sbin" overlay /usr/sbin; fi
if [ -n "$5" ]; then
  # The hierarchy without controllers too: libvirt makes groups there.
  if mountpoint -q /sys/fs/cgroup/unified; then
    umount /sys/fs/cgroup/unified
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
  fi
  mkdir -p "$3/libvirt/etc/qemu" "$3/libvirt/lib" "$3/libvirt/log" "$5/cache"
  cp "$5"/*.conf "$3/libvirt/etc"
  mount --bind "$3/libvirt/etc" /etc/libvirt
  mount --bind "$3/libvirt/lib" /var/lib/libvirt
  mount --bind "$5/cache" /var/cache/libvirt
  mkdir -p /run/libvirt /var/log/libvirt
  libvirt_user "$3/libvirt"
  libvirtd -d
fi
ip link set lo up
until ip link set eth0 up 2>/dev/null; do sleep 0.1; done
ip addr add "10.77.0.$1/24" dev eth0
corosync
# Process 1 reaps what daemons leave: a zombie would look like a VM that does not stop.
pacemakerd &
wait $!
"#;

/// Enters the node's groups, which become the roots of the new cgroup namespace, and starts the
/// node's process 1. `$1` is the groups' name; the rest is for [`INIT`].
const ENTER: &str = r#"group=$1
shift
for c in cpu cpuacct cpuset blkio memory freezer devices pids unified; do
  if [ -d "/sys/fs/cgroup/$c/$group" ]; then echo $$ >"/sys/fs/cgroup/$c/$group/cgroup.procs"; fi
done
exec setpriv --pdeathsig KILL unshare --mount --net --uts --ipc --pid --cgroup --fork --kill-child=KILL sh -c "$@"
"#;

/// Directories with files for a node; those without a use are `None`.
#[derive(Clone, Copy)]
pub(super) struct Files<'a> {
    pub(super) agents: &'a Path,
    pub(super) libvirt: Option<&'a Path>,
    pub(super) fence: Option<&'a Path>,
}

pub(super) struct Node {
    name: String,
    dir: PathBuf,
    pid: u32,
    outlet: Outlet,
}

/// Power outlet of a node, for the power switch.
#[derive(Clone)]
pub(super) struct Outlet {
    group: String,
    child: Arc<Mutex<Child>>,
}

impl Outlet {
    /// Kills every process of the node; returns whether none is left.
    pub(super) fn off(&self) -> bool {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        // With `unshare` its child ends, and with process 1 all others of its namespace.
        let _ = child.kill();
        let _ = child.wait();
        let begin = Instant::now();
        while self.processes() > 0 && begin.elapsed() < SETTLES {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.remove_groups_below();
        self.processes() == 0
    }

    /// Removes the groups below the node's own, as a power cut does; the node restarts in its own.
    fn remove_groups_below(&self) {
        let own = CONTROLLERS.map(|controller| self.group(controller));
        own.iter().for_each(|own| remove_all(groups_below(own).into_iter().filter(|g| g != own).collect()));
    }

    /// Number of processes in the node's groups, and in groups below.
    fn processes(&self) -> usize {
        processes_below(&self.group("cpu")).len()
    }

    fn group(&self, controller: &str) -> PathBuf {
        Path::new("/sys/fs/cgroup").join(controller).join(&self.group)
    }
}

impl Node {
    pub(super) fn start(
        number: usize,
        name: &str,
        dir: &Path,
        cluster: &str,
        budget_us: u64,
        files: Files<'_>,
    ) -> Result<Self, ClusterError> {
        let group = format!("rtvirtio-{name}-{cluster}");
        make_groups(&group, budget_us)?;
        let conf = dir.join("corosync.conf");
        let dir = dir.join(name);
        let etc = dir.join("etc");
        fs::create_dir_all(&etc).map_err(|e| ClusterError::io(&etc, e))?;
        fs::copy(&conf, etc.join("corosync.conf")).map_err(|e| ClusterError::io(&conf, e))?;
        let log = dir.join("init.log");
        let out = fs::File::create(&log).map_err(|e| ClusterError::io(&log, e))?;
        let err = out.try_clone().map_err(|e| ClusterError::io(&log, e))?;
        let init = format!("{FUNCTIONS}{INIT}");
        let child = Command::new("sh")
            .args(["-c", ENTER, "enter", &group, &init, "init", &number.to_string(), name])
            .args([&dir, files.agents])
            .args([files.libvirt, files.fence].map(|dir| dir.unwrap_or(Path::new(""))))
            .env("RTVIRTIO_RUN_DIR", &dir)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|e| ClusterError::program("sh", e))?;
        let (pid, child) = (child.id(), Arc::new(Mutex::new(child)));
        Ok(Self { name: name.to_owned(), dir, pid, outlet: Outlet { group, child } })
    }

    /// The host's id of the node's process 1.
    pub(super) fn init(&self) -> Result<u32, ClusterError> {
        let pid = self.pid;
        let begin = Instant::now();
        loop {
            // `unshare` forks process 1; before its exec, the shell has other children.
            let path = PathBuf::from(format!("/proc/{pid}/task/{pid}/children"));
            let children = fs::read_to_string(&path).map_err(|e| ClusterError::io(&path, e))?;
            let is_unshare =
                fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c.trim() == "unshare");
            if let Some(child) =
                children.split_whitespace().next().and_then(|c| c.parse().ok()).filter(|_| is_unshare)
            {
                return Ok(child);
            }
            if begin.elapsed() > SETTLES {
                return Err(ClusterError::Waited {
                    what: format!("process 1 of {}", self.name),
                    log: self.log(),
                });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Runs a program in the node.
    pub(super) fn enter(&self) -> Command {
        let mut nsenter = Command::new("nsenter");
        let init = self.init().unwrap_or_default().to_string();
        nsenter.args(["--target", &init, "--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup"]);
        nsenter
    }

    pub(super) fn runs(&self) -> bool {
        Path::new(&format!("/proc/{}/task/{0}/children", self.pid)).exists()
            && fs::read_to_string(format!("/proc/{}/stat", self.pid)).is_ok_and(|s| !s.contains(") Z "))
    }

    pub(super) fn kill(&self) {
        self.outlet.off();
    }

    pub(super) fn outlet(&self) -> Outlet {
        self.outlet.clone()
    }

    pub(super) fn group(&self, controller: &str) -> PathBuf {
        self.outlet.group(controller)
    }

    pub(super) fn remove_groups(&self) {
        CONTROLLERS.iter().for_each(|controller| remove_all(groups_below(&self.group(controller))));
    }

    pub(super) fn lasting(&self) -> PathBuf {
        self.dir.join("lasting")
    }

    /// Last lines of its logs, and the last ones that report trouble or what an agent wrote.
    pub(super) fn log(&self) -> String {
        let is_trouble = |line: &&str| {
            ["warning:", "error:", "Timed Out", "Result of", "-contract_"]
                .iter()
                .any(|mark| line.contains(mark))
                && !line.contains("(cib_")
        };
        let last = |file: &Path| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let trouble: Vec<&str> = text.lines().rev().filter(is_trouble).take(25).collect();
            let lines: Vec<&str> = text.lines().rev().take(10).chain(trouble).collect();
            lines.into_iter().rev().map(|l| format!("{}: {l}\n", self.name)).collect::<String>()
        };
        last(&self.dir.join("init.log")) + &last(&self.dir.join("log/pacemaker/pacemaker.log"))
    }
}

fn make_groups(group: &str, budget_us: u64) -> Result<(), ClusterError> {
    let write = |path: PathBuf, text: &str| fs::write(&path, text).map_err(|e| ClusterError::io(&path, e));
    for controller in CONTROLLERS {
        let root = Path::new("/sys/fs/cgroup").join(controller);
        if !root.is_dir() {
            continue;
        }
        let own = root.join(group);
        if !own.is_dir() {
            fs::create_dir(&own).map_err(|e| ClusterError::io(&own, e))?;
        }
        if controller == "cpu" && own.join("cpu.rt_runtime_us").exists() {
            write(own.join("cpu.rt_period_us"), &PERIOD_US.to_string())?;
            // No budget is free while other tests hold the host's.
            let begin = Instant::now();
            while let Err(e) = write(own.join("cpu.rt_runtime_us"), &budget_us.to_string()) {
                if begin.elapsed() > SETTLES {
                    return Err(e);
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        if controller == "cpuset" {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let path = root.join(file);
                let all = fs::read_to_string(&path).map_err(|e| ClusterError::io(&path, e))?;
                write(own.join(file), all.trim())?;
            }
        }
    }
    Ok(())
}

fn remove_all(mut groups: Vec<PathBuf>) {
    // The deepest first.
    groups.sort_by_key(|g| std::cmp::Reverse(g.components().count()));
    groups.iter().for_each(|g| {
        let _ = fs::remove_dir(g);
    });
}

/// All groups from this one down.
fn groups_below(group: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut rest = vec![group.to_owned()];
    while let Some(dir) = rest.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        rest.extend(entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()));
        all.push(dir);
    }
    all
}

/// The host's ids of the processes in a group and in groups below it.
pub(super) fn processes_below(group: &Path) -> Vec<u32> {
    let texts =
        groups_below(group).into_iter().filter_map(|g| fs::read_to_string(g.join("cgroup.procs")).ok());
    texts.flat_map(|text| text.lines().filter_map(|l| l.parse().ok()).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_to_mount_on_is_made_in_the_namespace_alone() {
        let test = "a_directory_to_mount_on_is_made_in_the_namespace_alone";
        if !rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::Root]) {
            return;
        }
        let dir = rtvirtio_testkit::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("lib/there")).unwrap();
        let script = format!(
            "set -e\n{FUNCTIONS}\nmount --make-rprivate /\nmount_point \"$1/points\" \"$1/lib/missing\"\n\
             mount_point \"$1/points\" \"$1/lib/there\"\nmount -t tmpfs none \"$1/lib/missing\"\nls \"$1/lib\""
        );
        let mut unshare = Command::new("unshare");
        let out = unshare.args(["--mount", "sh", "-c", &script, "sh"]).arg(dir.path()).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert_eq!(text(&out.stdout), "missing\nthere\n", "{}", text(&out.stderr));
        assert!(!dir.path().join("lib/missing").exists(), "the machine's file system was changed");
    }
}
