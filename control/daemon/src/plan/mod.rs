//! The plan that the service makes from its contracts, and keeps in force.

mod keeper;
mod sight;
mod snapshot;
mod unplanned;

pub use sight::sight_of;
pub use snapshot::{PlanSnapshot, PlanState, ProposalSnapshot};
pub use unplanned::UnplannedDevice;

pub(crate) use keeper::PlanKeeper;
