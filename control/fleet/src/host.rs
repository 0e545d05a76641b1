//! Resources of one host, from its files.

use std::path::Path;

use rtvirtio_capacity::{DeviceModel, Disk, Network, Node, Options};
use rtvirtio_measure::profile;
use rtvirtio_spec::{DEFAULT_TWIN_SIZE, HostSpec};
use rtvirtio_units::Ratio;

use crate::file::{FleetError, HostEntry, LinkEntry};

/// Share of each CPU that the kernel grants real-time work by default: 950 of 1000 ms.
const DEFAULT_CPU: Ratio = Ratio(0.95);

impl HostEntry {
    /// Resources of this host for admission. `spec` is that of its VMs; paths are relative to
    /// `dir`. Assumptions behind the numbers are added to `doubts`.
    pub(crate) fn node(
        &self,
        spec: Option<&HostSpec>,
        dir: &Path,
        doubts: &mut Vec<String>,
    ) -> Result<Node, FleetError> {
        let cpu = self.cpu.map_or(DEFAULT_CPU, |share| share.0);
        let named =
            |(name, n): (&String, &LinkEntry)| Network::new(Some(name.clone()), n.link, n.mtu, n.stall);
        let networks = if self.networks.is_empty() {
            spec.map_or(&[][..], HostSpec::networks).iter().map(Network::of_spec).collect()
        } else {
            self.networks.iter().map(named).collect()
        };
        Ok(Node { disks: self.read_disks(dir, doubts)?, networks, cpu })
    }

    fn read_disks(&self, dir: &Path, doubts: &mut Vec<String>) -> Result<Vec<Disk>, FleetError> {
        let host = &self.name;
        let of = || host.clone();
        let said = [self.profile.is_some(), self.twin.is_some(), !self.disks.is_empty()];
        if said.iter().filter(|s| **s).count() != 1 {
            return Err(FleetError::Disks { host: of() });
        }
        if let Some(twin) = &self.twin {
            let at = if twin.contains('/') { dir.join(twin).display().to_string() } else { twin.clone() };
            let model = rtvirtio_files::load_twin(&at)
                .map_err(|e| FleetError::Twin { host: of(), message: e.to_string() })?;
            doubts.push(format!("host {host}: its disk is declared as {twin}, and was not measured"));
            let device = DeviceModel::declared(twin, &model, DEFAULT_TWIN_SIZE);
            return Ok(vec![Disk::new(None, &device, &Options::default())]);
        }
        let one = self.profile.iter().map(|p| (None, p));
        let several = self.disks.iter().map(|(name, p)| (Some(name.clone()), p));
        let mut disks = Vec::new();
        for (name, file) in one.chain(several) {
            let profile = profile::load(&dir.join(file))
                .map_err(|source| FleetError::Profile { host: of(), source })?;
            let file = file.display();
            doubts.extend(profile.doubts.iter().map(|d| format!("host {host}: {file}: {d}")));
            if profile.guest.is_none() {
                doubts.push(format!(
                    "host {host}: {file}: the guest's own part of a request's time was not measured, and is not in what is promised"
                ));
            }
            let disk =
                Disk::measured(name, &profile).map_err(|source| FleetError::Device { host: of(), source })?;
            disks.push(disk);
        }
        Ok(disks)
    }
}
