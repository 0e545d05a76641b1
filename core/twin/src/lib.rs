//! Declared service-time model of an emulated device, pure and seeded. The lab's twin serves real
//! requests by it, the simulator virtual ones.

mod profile;
mod service;

pub use profile::{Arm, GarbageCollection, ProfileError, Timing, TwinProfile, WriteCache};
pub use service::{Access, ServiceModel, mean_service};
