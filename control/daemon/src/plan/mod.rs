//! The plan that the service makes from its contracts, and keeps in force.

mod keeper;
mod observations;
mod snapshot;
mod unplanned;

pub use observations::sight_of;
pub use snapshot::{PlanSnapshot, PlanState, ProposalSnapshot};
pub use unplanned::UnplannedDevice;

pub(crate) use keeper::PlanKeeper;
