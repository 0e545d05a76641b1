//! Tail-latency models: the paper's analytical model and the slice model.
//!
//! Both read the same three inputs (a measured [`Profile`], the declared [`Spec`] and a [`Config`] of knobs) and answer
//! with one [`Forecast`] per task in spec order. They are pure: no I/O, no clock, no randomness. The formulas and their
//! sources are in `docs/model.md`.

mod analytical;
mod crowd;
mod device;
mod guest;
pub mod learned;
mod load;
mod slice;
mod tail_curve;
mod types;

use std::borrow::Cow;
use std::sync::Arc;

use rtvirtio_spec::{Spec, Task};
use rtvirtio_units::{Nanos, Percentile};

pub use analytical::{Analytical, Coefficients, SliceIdleEffect};
pub use device::{Service, ServiceLine, declared_shares, service, spare_rates};
pub use learned::{HostModel, Learned};
pub use slice::{Slice, SliceSearch, weights_act};
pub use types::*;

/// Why a model cannot predict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The model has no formula for this configuration; another model may have one.
    #[error("the {model} model has no formula for {what}: {remedy}")]
    NotCovered {
        /// Name of the model.
        model: &'static str,
        /// What it does not cover.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The profile lacks a measurement that every prediction needs, or holds one that cannot be.
    #[error("profile of {device}: {what}; measure again with `rtvirtio profile`")]
    BadProfile {
        /// Device name of the profile.
        device: String,
        /// What is missing or wrong.
        what: String,
    },
    /// The configuration does not fit the spec.
    #[error("configuration: {0}")]
    BadConfig(String),
    /// A learned model was asked for and none is there.
    #[error("no model was learned for this device yet: run `rtvirtio profile DEVICE --sweep 20m` first")]
    NotLearned,
    /// The learned model has no network of the paper's form.
    #[error(
        "the learned model has too few runs of the kind that the RT-VirtIO paper measured for its network: `rtvirtio-lab bench sweep --paper N` measures them"
    )]
    NoNetwork,
}

/// A model of tail latency.
pub trait TailModel {
    /// Which model this is.
    fn kind(&self) -> ModelKind;

    /// One forecast per task, in spec order.
    ///
    /// # Errors
    /// [`ModelError::NotCovered`] where the model has no formula, [`ModelError::BadProfile`] and
    /// [`ModelError::BadConfig`] for inputs that contradict themselves.
    fn forecast(&self, profile: &Profile, spec: &Spec, config: &Config) -> Result<Vec<Forecast>, ModelError>;
}

/// The model of a kind: the formulas with the coefficients they ship with, or what was learned on this host.
///
/// # Errors
/// [`ModelError::NotLearned`] for a learned kind without a learned model.
pub fn model(kind: ModelKind, learned: Option<&Arc<HostModel>>) -> Result<Box<dyn TailModel>, ModelError> {
    let needed = || learned.cloned().ok_or(ModelError::NotLearned);
    Ok(match kind {
        ModelKind::Analytical => {
            // The paper fits its coefficients on the host that it plans for; Table III is of the authors' host.
            let fitted = learned.and_then(|l| l.analytical);
            let coefficients = fitted.unwrap_or(Coefficients::TABLE_III);
            Box::new(Analytical { coefficients, ..Analytical::default() })
        }
        ModelKind::Slice => Box::new(Slice),
        ModelKind::Mlp => Box::new(Learned::paper(needed()?)),
        ModelKind::Bound => Box::new(Learned::bound(needed()?)),
    })
}

/// The percentile a task is judged at: its target's, or p99.99 without a target.
#[must_use]
pub fn percentile_of(task: &Task) -> Percentile {
    task.target.map_or(Percentile::P9999, |t| t.percentile)
}

/// Checks what both models take for granted.
fn check_config(spec: &Spec, config: &Config) -> Result<(), ModelError> {
    if config.vms.len() != spec.vms.len() {
        return Err(ModelError::BadConfig(format!(
            "it has {} VMs but the spec has {}; list one entry per VM in spec order",
            config.vms.len(),
            spec.vms.len()
        )));
    }
    for (vm, c) in spec.vms.iter().zip(&config.vms) {
        if !(1..=1000).contains(&c.weight) {
            return Err(ModelError::BadConfig(format!(
                "BFQ weight {} of VM {} is outside 1 to 1000; choose one inside",
                c.weight, vm.name
            )));
        }
        if c.cap.is_some_and(|cap| !cap.0.is_finite() || cap.0 < 1.0) {
            return Err(ModelError::BadConfig(format!(
                "the cap of VM {} is below one request per second; raise it or remove it",
                vm.name
            )));
        }
    }
    Ok(())
}

/// Collects terms in seconds.
trait Terms: Default {
    /// What they are collected into.
    type Whole;

    fn add(&mut self, side: Side, name: &'static str, seconds: f64);

    fn whole(self, rate_kept: f64) -> Self::Whole;
}

/// Keeps the terms, for a forecast whose terms sum exactly to the total.
struct Sum {
    terms: Vec<Term>,
}

/// Keeps their sum only, in ns: the same to the bit, for searches that ask about thousands of configurations.
#[derive(Default)]
struct Total(u64);

/// Terms that a model gives a task at most.
const MOST_TERMS: usize = 10;

/// Longest term in seconds (about 11 days): keeps every sum finite whatever the input.
const LONGEST_TERM: f64 = 1e6;

impl Default for Sum {
    fn default() -> Self {
        Self { terms: Vec::with_capacity(MOST_TERMS) }
    }
}

/// A term of so many seconds as it is counted.
fn counted(seconds: f64) -> Nanos {
    Nanos::from_secs_f64(if seconds.is_nan() { LONGEST_TERM } else { seconds.clamp(0.0, LONGEST_TERM) })
}

impl Terms for Total {
    type Whole = Brief;

    fn add(&mut self, _: Side, _: &'static str, seconds: f64) {
        self.0 = self.0.saturating_add(counted(seconds).0);
    }

    fn whole(self, rate_kept: f64) -> Brief {
        Brief { latency_ns: Nanos(self.0), rate_kept: rate_kept.clamp(0.0, 1.0) }
    }
}

impl Terms for Sum {
    type Whole = Forecast;

    fn add(&mut self, side: Side, name: &'static str, seconds: f64) {
        self.terms.push(Term { side, name: Cow::Borrowed(name), latency_ns: counted(seconds) });
    }

    fn whole(self, rate_kept: f64) -> Forecast {
        let total = self.terms.iter().fold(0u64, |sum, t| sum.saturating_add(t.latency_ns.0));
        Forecast {
            latency_ns: Nanos(total),
            rate_kept: rate_kept.clamp(0.0, 1.0),
            terms: self.terms,
            upper: None,
        }
    }
}

#[cfg(test)]
mod testkit;
