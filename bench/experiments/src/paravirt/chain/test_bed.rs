//! The disks of both guests, in an I/O domain that signals urgent completions.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rtvirtio_kernel::sched::{self, Policy};
use rtvirtio_kernel::{Root, task};
use rtvirtio_testbed::RamDisk;
use rtvirtio_testbed::qemu::GuestDisk;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Dirs;
use rtvirtio_workflow::domain::client;
use rtvirtio_workflow::domain::urgent::UrgentSignals;

use crate::backend::Backend;
use crate::guest::vm_status;
use crate::iod::FIFO;
use rtvirtio_harness::cores::bind;

/// Names of the disks, A's first.
pub const DISKS: [&str; 2] = ["a", "b"];
/// Requests at the device.
pub const WINDOW: u32 = 4;
const DISK: Bytes = Bytes(64 << 20);

/// Both disks, parts of one in memory. To be dropped after the guests.
pub struct DiskTestBed {
    domain: Backend,
    dirs: Dirs,
    control: PathBuf,
    sockets: [PathBuf; 2],
    _disk: RamDisk,
}

impl DiskTestBed {
    /// Starts the I/O domain.
    pub fn start(dir: &Path) -> anyhow::Result<Self> {
        let dirs = Dirs { state: dir.join("state"), run: dir.to_owned() };
        std::fs::create_dir(&dirs.state).with_context(|| dirs.state.display().to_string())?;
        let disk = RamDisk::new(Bytes(2 * DISK.0))?;
        let sockets = DISKS.map(|name| dir.join(format!("{name}-disk")));
        // Path at which urgency following expects an I/O domain's control socket.
        let control = dirs.run.join("iod.sock");
        let domain = Backend::start_domain(dir, &config(&control, disk.device(), &sockets))?;
        Ok(Self { domain, dirs, control, sockets, _disk: disk })
    }

    /// Disks for the guests, A's first.
    pub fn disks(&self) -> [GuestDisk; 2] {
        self.sockets.clone().map(|socket| GuestDisk::VhostUser { socket, queues: Some(1) })
    }

    /// Control socket of the I/O domain.
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// Binds the I/O domain to these CPUs.
    pub fn bind(&self, cpus: &[u32]) -> anyhow::Result<()> {
        bind(self.domain.pid(), cpus)
    }

    /// Starts to signal urgent completions of this QEMU's disk, as `keep` does.
    pub fn signals(&self, pid: u32) -> anyhow::Result<(UrgentSignals, std::os::fd::OwnedFd)> {
        let (mut signals, eventfd) = UrgentSignals::new(pid, &self.dirs)?;
        signals.renew()?;
        // A guest that is not attached would silently have no signals.
        let is_signalled = vm_status(&self.control)?.urgent_signals.is_some();
        ensure!(is_signalled, "the I/O domain signals no urgent completions of {}", DISKS[0]);
        Ok((signals, eventfd))
    }

    /// Priority of the thread that serves the disks, as the kernel reports it.
    pub fn priority(&self) -> anyhow::Result<String> {
        let root = Root::default();
        for tid in task::tids(&root, self.domain.pid())? {
            let attr = sched::get(tid).with_context(|| format!("the policy of thread {tid}"))?;
            if attr.policy == Policy::Fifo {
                return Ok(attr.to_string());
            }
        }
        bail!("no thread of the I/O domain is real-time: {:?}", client::ask(&self.control)?)
    }
}

/// The urgent requests of A have a share of the device's time; all others share the rest.
fn config(control: &Path, device: &Path, sockets: &[PathBuf; 2]) -> String {
    let mut text = format!(
        "control = {:?}\n[[device]]\nname = \"bench\"\npolicy = \"edf\"\nwindow = {WINDOW}\nfifo = {FIFO}\nstall = \"1ms\"\n\
         cost = {{ read = {{ base = \"10us\", per_mib = \"300us\" }}, write = {{ base = \"10us\", per_mib = \"300us\" }} }}\n",
        control.display().to_string(),
    );
    let urgent = "guest_priority = { ceiling = \"real-time\" }\nurgent = { share = \"20%\", burst = \"500us\", deadline = \"5ms\" }\n";
    for (i, ((name, socket), keys)) in DISKS.iter().zip(sockets).zip([urgent, ""]).enumerate() {
        text.push_str(&format!(
            "[[device.disk]]\nname = {name:?}\nsocket = {:?}\npath = {:?}\noffset = \"{}B\"\nsize = \"{DISK}\"\nformat = \"raw\"\n{keys}",
            socket.display().to_string(),
            device.display().to_string(),
            DISK.0 * i as u64,
        ));
    }
    text
}
