//! Tail-latency models: the slice model and the model that is learned on a host.
//!
//! The equations of the RT-VirtIO paper are among the features of the learned model; planning with
//! them is an experiment. All read the same three inputs (a measured [`Profile`], the declared
//! [`Spec`](rtvirtio_spec::Spec) and a [`Config`] of knobs) and answer with one [`Forecast`] per
//! task in spec order. They are pure: no I/O, no clock, no randomness. The formulas and their
//! sources are in `docs/explanation/models.md`.

pub mod ageing;
mod analytical;
mod cpus;
mod device;
mod fingerprint;
mod flow;
mod guest;
mod io_cost;
pub mod learned;
mod load;
mod saturation;
mod slice;
mod supply;
mod tail_curve;
mod tail_model;
mod terms;
mod types;

use std::sync::Arc;

pub use analytical::{Analytical, Coefficients, SliceIdleEffect};
pub use cpus::CpuLoad;
pub use device::{Service, ServiceLine, declared_shares, service, spare_rates};
pub use fingerprint::fingerprint;
pub use io_cost::{MeasuredCost, io_cost};
pub use learned::{HostModel, Learned};
pub use load::is_guest;
pub use slice::{Slice, SliceSearch, weights_act};
pub use supply::{response_of_stream, tail_of_waits};
pub use tail_model::{ModelError, TailModel, percentile_of};
pub use types::*;

/// The model of a kind: the slice model, or the one that was learned on this host.
pub fn model(kind: ModelKind, learned: Option<&Arc<HostModel>>) -> Result<Box<dyn TailModel>, ModelError> {
    Ok(match kind {
        ModelKind::Slice => Box::new(Slice),
        ModelKind::Bound => Box::new(Learned::bound(learned.cloned().ok_or(ModelError::NotLearned)?)),
    })
}

#[cfg(test)]
mod testkit;
