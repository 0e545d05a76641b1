//! The plan that the service makes from its contracts, and holds.

mod keeper;
mod sight;
mod snapshot;

pub use sight::sight_of;
pub use snapshot::{PlanSnapshot, PlanState, ProposalSnapshot};

pub(crate) use keeper::PlanKeeper;
