//! Decides when a plan no longer fits the observations, and whether a new one is applied.
//!
//! A plan is a function of contracts and of an [`Input`]: observations as levels, which rise soon
//! after a need and fall only after a long time without it ([`Hysteresis`]). So the same
//! observations give the same plan whatever was in force before, and a load that comes and goes
//! settles. [`Replan`] requests a plan when the input differs from that of the plan in force, at a
//! limited rate, and decides whether it may be applied.

mod candidate;
mod effect;
mod hysteresis;
mod input;
mod machine;
mod unplanned;

pub use candidate::{Candidate, PlanInput, candidate, difference};
pub use effect::{Change, Effect, effects, given_up, objection};
pub use hysteresis::{Backoff, HIGHEST, Hysteresis, HysteresisTiming};
pub use input::{Input, LOAD_STEP, MOST_CAUTION, SLOW_STEP, load_key, load_level, slow_level};
pub use machine::{Basis, CAUTION, Observations, Outline, Policy, Proposal, Replan, Request, Timing};
pub use unplanned::{NoPlan, Unplanned};
