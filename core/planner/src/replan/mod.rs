//! When a plan no longer fits what is observed, and what becomes of a new one.
//!
//! A plan is a function of contracts and of an [`Input`]: observations as levels, which follow what
//! is needed at once and leave it after a long time only ([`Ladder`]). So the same observations
//! give the same plan whatever was in force before, and a load that comes and goes settles.
//! [`Replan`] asks for a plan when the input differs from that of the plan in force, at most so
//! often, and says whether it may be applied.

mod candidate;
mod effect;
mod input;
mod ladder;
mod machine;
mod unplanned;

pub use candidate::{Candidate, Ground, candidate, difference};
pub use effect::{Change, Effect, effects, given_up, objection};
pub use input::{Input, LOAD_STEP, MOST_CAUTION, SLOW_STEP, load_key, load_level, slow_level};
pub use ladder::{HIGHEST, Ladder, Pace, Patience};
pub use machine::{Basis, CAUTION, Outline, Policy, Proposal, Replan, Request, Sight, Timing};
pub use unplanned::{NoPlan, Unplanned};
