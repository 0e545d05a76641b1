//! Tail-latency models: the paper's analytical model and the slice model.
//!
//! Both read the same three inputs (a measured [`Profile`], the declared
//! [`Spec`](rtvirtio_spec::Spec) and a [`Config`] of knobs) and answer with one [`Forecast`] per
//! task in spec order. They are pure: no I/O, no clock, no randomness. The formulas and their
//! sources are in `docs/explanation/models.md`.

mod analytical;
mod device;
mod fingerprint;
mod flow;
mod guest;
pub mod learned;
mod load;
mod saturation;
mod slice;
mod tail_curve;
mod tail_model;
mod terms;
mod types;

use std::sync::Arc;

pub use analytical::{Analytical, Coefficients, SliceIdleEffect};
pub use device::{Service, ServiceLine, declared_shares, service, spare_rates};
pub use fingerprint::fingerprint;
pub use learned::{HostModel, Learned};
pub use slice::{Slice, SliceSearch, weights_act};
pub use tail_model::{ModelError, TailModel, percentile_of};
pub use types::*;

/// The model of a kind: the formulas with the coefficients they ship with, or the model that was
/// learned on this host.
///
/// # Errors
/// [`ModelError::NotLearned`] for a learned kind without a learned model.
pub fn model(kind: ModelKind, learned: Option<&Arc<HostModel>>) -> Result<Box<dyn TailModel>, ModelError> {
    let needed = || learned.cloned().ok_or(ModelError::NotLearned);
    Ok(match kind {
        ModelKind::Analytical => {
            // The paper fits its coefficients on the host that it plans for; Table III is of the
            // authors' host.
            let fitted = learned.and_then(|l| l.analytical);
            let coefficients = fitted.unwrap_or(Coefficients::TABLE_III);
            Box::new(Analytical { coefficients, ..Analytical::default() })
        }
        ModelKind::Slice => Box::new(Slice),
        ModelKind::Mlp => Box::new(Learned::paper(needed()?)),
        ModelKind::Bound => Box::new(Learned::bound(needed()?)),
    })
}

#[cfg(test)]
mod testkit;
