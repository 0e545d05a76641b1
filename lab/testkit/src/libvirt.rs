//! A libvirt daemon of its own, with its directories, sockets and VMs.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::sweep::{domain_groups, groups_of_machines, remove_empty_group, remove_group};
use crate::{HANG, Need};

/// Directories of libvirt on the host, and their names below the test's.
const DIRS: [(&str, &str); 5] = [
    ("/etc/libvirt", "etc"),
    ("/run/libvirt", "run"),
    ("/var/lib/libvirt", "lib"),
    ("/var/log/libvirt", "log"),
    ("/var/cache/libvirt", "cache"),
];
/// Works without systemd, AppArmor and a user of libvirt's, and changes no file's owner.
const QEMU_CONF: &str = "namespaces = []\nsecurity_driver = \"none\"\nuser = \"root\"\ngroup = \"root\"\n\
                         dynamic_ownership = 0\nstdio_handler = \"file\"\n";

/// A shell function that the clusters of the lab use too.
const LIBVIRT_USER: &str = include_str!("../../testbed/src/cluster/libvirt_user.sh");

/// Runs `libvirtd` in the foreground, in mount and network namespaces of its own, with the host's
/// processes and cgroups. Dropping it ends the VMs, the daemon and their cgroups.
///
/// The VMs' names must come from [`crate::unique`], so that leftovers of a killed test are known by
/// their names.
#[derive(Debug)]
pub struct Libvirt {
    dir: PathBuf,
    child: Option<Child>,
    /// Parents of VMs' cgroups that existed before.
    before: Vec<PathBuf>,
    /// libvirt's directories that the host did not have: a package without the service has none.
    made: Vec<&'static str>,
    /// Whether it is as of another host.
    is_other: bool,
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Libvirt {
    /// Requirements. The host's `/etc/libvirt` comes with virsh.
    pub const NEEDS: [Need; 4] = [Need::Root, Need::QEMU, Need::Program("libvirtd"), Need::Program("virsh")];

    /// Starts a daemon with its files below `dir`, and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; ask [`crate::has`] for [`Libvirt::NEEDS`] before.
    #[must_use]
    pub fn start(dir: &Path) -> Self {
        // One at a time: the last one removes the parents of its VMs' cgroups.
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        crate::sweep();
        Self::new(dir, false, Some(alone))
    }

    /// Starts a second daemon, as of another host: with a name and UUID of its own. It is dropped
    /// before the first one.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn other(&self, dir: &Path) -> Self {
        Self::new(dir, true, None)
    }

    fn new(dir: &Path, is_other: bool, alone: Option<MutexGuard<'static, ()>>) -> Self {
        let dir = dir.join("libvirt");
        for (_, name) in DIRS {
            fs::create_dir_all(dir.join(name)).expect("a directory for libvirt");
        }
        fs::write(dir.join("etc/qemu.conf"), QEMU_CONF).expect("qemu.conf");
        let mut conf = format!(
            "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nunix_sock_dir = \"{}\"\nlog_outputs = \"2:stderr\"\n",
            dir.join("run").display()
        );
        if is_other {
            let id = fs::read_to_string("/proc/sys/kernel/random/uuid").expect("a UUID");
            conf += &format!("host_uuid = \"{}\"\n", id.trim());
        }
        fs::write(dir.join("etc/libvirtd.conf"), conf).expect("libvirtd.conf");
        let made =
            DIRS[2..].iter().map(|(host, _)| *host).filter(|host| fs::create_dir(host).is_ok()).collect();
        let before = groups_of_machines();
        let mut daemon = Self { dir, child: None, before, made, is_other, _alone: alone };
        daemon.run();
        daemon
    }

    fn run(&mut self) {
        // A `/run` of its own, because the host may have no `/run/libvirt`.
        let mut script = "set -e\nmount -t tmpfs tmpfs /run\nmkdir /run/libvirt\n".to_owned();
        for (host, name) in DIRS {
            script += &format!("mount --bind '{}' {host}\n", self.dir.join(name).display());
        }
        script += LIBVIRT_USER;
        script += &format!("libvirt_user '{}'\n", self.dir.display());
        if self.is_other {
            script += "echo rtvirtio-other > /proc/sys/kernel/hostname\n";
        }
        script += "exec libvirtd";
        let log = fs::File::create(self.dir.join("libvirtd.log")).expect("a log");
        let child = Command::new("unshare")
            .args(["--mount", "--net", "--uts", "--propagation", "private", "sh", "-c", &script])
            // A sweep finds the daemon by this variable.
            .env("RTVIRTIO_RUN_DIR", &self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.expect("unshare"));
        let start = Instant::now();
        loop {
            let out = self.virsh(["list"]);
            if out.status.success() {
                return;
            }
            let ended = self.child.as_mut().map(Child::try_wait);
            assert!(matches!(ended, Some(Ok(None))), "libvirtd ended: {}", self.log());
            assert!(start.elapsed() < HANG, "libvirtd does not answer: {}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }

    /// Log of the daemon since its last start.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("libvirtd.log")).unwrap_or_default()
    }

    /// Connection URI of the daemon.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.dir.join("run/libvirt-sock").display())
    }

    /// Runs `virsh`, whatever the exit code.
    pub fn virsh<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Output {
        let mut virsh = Command::new("virsh");
        virsh.args(["--quiet", "--connect", &self.uri()]).args(args);
        virsh.env("LC_ALL", "C").stdin(Stdio::null()).output().expect("virsh")
    }

    /// Runs `virsh` and expects exit code 0; returns standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let out = self.virsh(args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(out.status.success(), "virsh {args:?}: {}\n{}", text(&out.stderr), self.log());
        text(&out.stdout)
    }

    /// Defines and starts a VM.
    pub fn start_domain(&self, name: &str, xml: &str) {
        let file = self.dir.join(format!("{name}.xml"));
        fs::write(&file, xml).expect("the domain's XML");
        self.ok(&["define", &file.display().to_string()]);
        self.ok(&["start", name]);
    }

    /// Ends the daemon, as an update of its package does, and starts it again. Its VMs run on.
    pub fn restart(&mut self) {
        self.stop();
        self.run();
    }

    fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let Some(pid) = rustix::process::Pid::from_raw(child.id().try_into().unwrap_or(0)) else { return };
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let start = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if start.elapsed() > HANG {
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Cgroups of this test's VMs.
    #[must_use]
    pub fn cgroups(&self) -> Vec<PathBuf> {
        domain_groups().into_iter().filter(|g| crate::sweep::is_ours(g)).collect()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let names = self.virsh(["list", "--name"]);
        for name in String::from_utf8_lossy(&names.stdout).lines().map(str::trim).filter(|n| !n.is_empty()) {
            let _ = self.virsh(["destroy", name]);
        }
        self.stop();
        // The first daemon, which may have VMs still, ends later, and removes all.
        if !self.is_other {
            self.cgroups().iter().for_each(|group| remove_group(group));
        }
        for host in &self.made {
            // These were mounted over in a namespace that has ended.
            let _ = fs::remove_dir(host);
        }
        for parent in groups_of_machines().iter().filter(|parent| !self.before.contains(parent)) {
            remove_empty_group(parent);
        }
    }
}
