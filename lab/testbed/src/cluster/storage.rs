//! An emulated drive for each node, with a load on it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Dirs;

use super::{Cluster, ClusterError};
use crate::twin::TwinHandle;

/// Path of a node's disk, the same on all nodes.
pub const DISK: &str = "/run/lasting/disk";
/// Name of the link to the disk below [`Cluster::lasting`].
const LINK: &str = "disk";
/// State directory of the programs on a node, below [`Cluster::lasting`].
const STATE: &str = "state";
/// Without an elevator the kernel counts a loop device's requests as the drive gets them.
const ELEVATOR: &str = "none";

/// The twin behind [`DISK`] of one node, removed when dropped.
pub struct NodeDisk {
    twin: TwinHandle,
    device: PathBuf,
    load: Option<Child>,
}

impl NodeDisk {
    /// Makes the disk, with its files below `dir`, and saves `profile` as that of the node's disk.
    /// `server` makes of a mount directory the command that ends in [`crate::twin::serve`].
    pub fn make(
        cluster: &Cluster,
        node: usize,
        dir: &Path,
        size: Bytes,
        server: impl FnOnce(&Path) -> Command,
        profile: &str,
    ) -> Result<Self, ClusterError> {
        let dir = dir.join(format!("disk-n{}", node + 1));
        fs::create_dir_all(&dir).map_err(|e| ClusterError::io(&dir, e))?;
        let mount = dir.join("twin");
        // After a crash the twin is found by its mount.
        let (twin, device) =
            TwinHandle::make(&mount, size, server(&mount), &dir.join("twin.log"), &mut |_| Ok(()))?;
        let disk = Self { twin, device: device.path, load: None };
        let root = Root::default();
        let block = BlockDevice::find(&root, &disk.device)?;
        block.set_elevator(&root, ELEVATOR)?;
        let lasting = cluster.lasting(node);
        let link = lasting.join(LINK);
        symlink(&disk.device, &link).map_err(|e| ClusterError::io(&link, e))?;
        let mut profile: serde_json::Value = serde_json::from_str(profile)?;
        profile["device"] = block.name.clone().into();
        // Guest overhead is not measured here.
        profile["guest"] = serde_json::Value::Null;
        let dirs = Dirs { state: lasting.join(STATE), run: lasting.clone() };
        let path = dirs.profile(&block.name);
        let parent = path.parent().unwrap_or(&lasting);
        fs::create_dir_all(parent).map_err(|e| ClusterError::io(parent, e))?;
        fs::write(&path, profile.to_string()).map_err(|e| ClusterError::io(&path, e))?;
        Ok(disk)
    }

    /// Reads 4 KiB so many times a second until the disk is dropped.
    pub fn load(&mut self, rate: u32) -> Result<(), ClusterError> {
        let mut fio = Command::new("setpriv");
        fio.args(["--pdeathsig", "KILL", "fio", "--name=load", "--thread", "--direct=1", "--rw=randread"])
            .args(["--bs=4096", "--ioengine=psync", "--time_based", "--runtime=3600", "--output=/dev/null"])
            .arg(format!("--rate_iops={rate}"))
            .arg(format!("--filename={}", self.device.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.load = Some(fio.spawn().map_err(|e| ClusterError::program("fio", e))?);
        Ok(())
    }

    /// Makes the disk slow, or as fast as declared again.
    pub fn set_slow(&self, slow: bool) -> Result<(), ClusterError> {
        Ok(self.twin.set_slow(slow)?)
    }
}

impl Drop for NodeDisk {
    fn drop(&mut self) {
        if let Some(load) = &mut self.load {
            let _ = load.kill();
            let _ = load.wait();
        }
        // The error that led here is reported; `rtvirtio-lab down` finds the leftovers.
        let _ = self.twin.remove();
    }
}
