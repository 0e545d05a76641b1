//! Part of a profile that windows are compared with.

use crate::{ModelError, Profile, Service, service};

/// Service times and standstills of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Profiled {
    service: Service,
    /// Longest time without a completion, s.
    longest_s: Option<f64>,
}

impl Profiled {
    /// Service times of a profile. Standstills are known where flushes were measured: else one
    /// would be taken for a change of the device.
    pub fn new(profile: &Profile) -> Result<Self, ModelError> {
        let service = service(profile)?;
        let alone = service.write.as_ref().map_or(service.read.alone, |w| w.alone.max(service.read.alone));
        let stall = service.stall.max(service.write_stall);
        let flush = profile.sync.iter().map(|point| point.max).max();
        let longest_s = flush.map(|flush| flush.max(stall).as_secs_f64() + alone);
        Ok(Self { service, longest_s })
    }

    /// Service times.
    #[must_use]
    pub fn service(&self) -> &Service {
        &self.service
    }

    /// Longest time without a completion while requests were in the device, s: stalls of device and
    /// host, a flush, and one request. `None` where flushes were not measured.
    #[must_use]
    pub fn longest_s(&self) -> Option<f64> {
        self.longest_s
    }
}
