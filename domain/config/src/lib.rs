//! The I/O domain's configuration file: TOML, with units in the text. Unknown keys are errors, with
//! their line.

mod admission;
pub mod edit;
mod error;
mod id;
mod network;
mod network_sched;
mod paths;
mod rate;
mod sched;
mod schema;
mod text;

use std::collections::BTreeSet;
use std::path::Path;

use rtvirtio_kernel::trusted::CONFIG_LIMIT;

pub use error::FileError;
pub use id::{DiskId, PortId};
pub use network::{FrameCap, Network, Port, RateConfig, UplinkKind};
pub use network_sched::{OFFLOADED_FRAME, TURN};
pub use paths::{NamedPath, parent_dir};
pub use rtvirtio_sched::{CATCH_UP, LINK_SHARE, LINK_WINDOW};
pub use rtvirtio_units::{Mac, MacError, SHORTEST_FRAME, WIRE_OVERHEAD};
pub use schema::{
    CapConfig, CostConfig, DEFAULT_QUEUES, Device, Disk, File, Format, GuestPriorityConfig, LineConfig,
    OnFull, Poll, Power, ReservationConfig, Sandbox, Window,
};

/// Block sizes that a guest may see, in bytes.
const BLOCK_SIZES: [u64; 4] = [512, 1_024, 2_048, 4_096];

impl File {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let text = rtvirtio_kernel::trusted::read_config_text(path, CONFIG_LIMIT)
            .map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    pub fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let file: Self = toml::from_str(text)
            .map_err(|e| FileError::Parse { path: path.to_owned(), message: e.to_string() })?;
        let mut seen = BTreeSet::new();
        for device in &file.devices {
            require_unique(&mut seen, "device", &device.name)?;
            if device.fifo.is_some() && device.poll.is_some_and(|poll| poll.0 > 0) {
                return Err(FileError::Conflict { device: device.name.clone() });
            }
            for disk in &device.disks {
                require_unique(&mut seen, "disk", &disk.name)?;
                require_unique(&mut seen, "socket", &disk.socket.to_string_lossy())?;
                if disk.block_size.is_some_and(|size| !BLOCK_SIZES.contains(&size.0)) {
                    return Err(FileError::BlockSize { disk: disk.name.clone() });
                }
                if disk.migrate && (disk.cached || disk.shared) {
                    return Err(FileError::Migrate { disk: disk.name.clone() });
                }
                for (key, cap) in [("read_cap", disk.read_cap), ("write_cap", disk.write_cap)] {
                    let place = || format!("disk \"{}\": `{key}`", disk.name);
                    cap.check().map_err(|message| FileError::Rate { place: place(), message })?;
                }
            }
            device.sched().check().map_err(|source| FileError::Sched {
                device: device.name.clone(),
                message: device.with_disk_names(&source.to_string()),
                source,
            })?;
            device.admit()?;
        }
        for network in &file.networks {
            require_unique(&mut seen, "network", &network.name)?;
            if network.fifo.is_some_and(|priority| !(1..=99).contains(&priority)) {
                let what = "`fifo` must be 1 to 99".to_owned();
                return Err(FileError::Network { network: network.name.clone(), what });
            }
            for port in &network.ports {
                require_unique(&mut seen, "port", &port.name)?;
                require_unique(&mut seen, "socket", &port.socket.to_string_lossy())?;
            }
            network.check()?;
        }
        if file.devices.is_empty() && file.networks.is_empty() {
            let message = "neither a `[[device]]` nor a `[[network]]`".to_owned();
            return Err(FileError::Parse { path: path.to_owned(), message });
        }
        file.refuse_collisions(path)?;
        Ok(file)
    }
}

fn require_unique(
    seen: &mut BTreeSet<(&'static str, String)>,
    what: &'static str,
    name: &str,
) -> Result<(), FileError> {
    if seen.insert((what, name.to_owned())) {
        return Ok(());
    }
    Err(FileError::Duplicate { what, name: name.to_owned() })
}

#[cfg(test)]
mod tests;
