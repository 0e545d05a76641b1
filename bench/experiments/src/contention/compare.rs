//! Measured tails next to the models' predictions.

use std::sync::Arc;

use rtvirtio_learn::load::spec;
use rtvirtio_model::{Analytical, Forecast, HostModel, Learned, Profile, TailModel};
use rtvirtio_paper::PaperModels;
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_units::Bytes;

use super::{Row, Setup};

/// A measured row with the models' predictions, ms.
pub struct Compared {
    /// Results of the set-up.
    pub row: Row,
    /// The paper's equations, with coefficients fitted on this host's runs where the model has
    /// them, else those of Table III.
    pub analytical: Option<f64>,
    /// Tail predicted by the paper's network, as learned on this host.
    pub mlp: Option<f64>,
    /// Tail predicted by our learned model.
    pub expected: Option<f64>,
    /// Upper bound of our learned model.
    pub upper: Option<f64>,
}

/// A row with the predictions of every model that covers it.
pub fn compare(
    setup: &Setup,
    row: Row,
    profile: &Profile,
    (learned, paper): (Option<&Arc<HostModel>>, &PaperModels),
) -> Compared {
    let device = Device::Twin { profile: "any".to_owned(), size: Bytes(1 << 30) };
    let (spec, config) = (spec(&setup.vms, device, LabKind::Process), setup.knobs.config());
    let task = row.task;
    let of = |model: &dyn TailModel| -> Option<Forecast> {
        model.forecast(profile, &spec, &config).ok()?.get(task).cloned()
    };
    let ms = |f: Option<Forecast>| f.map(|f| f.latency_ns.as_millis_f64());
    let ours = learned.and_then(|m| of(&Learned::bound(Arc::clone(m))));
    let equations = Analytical { coefficients: paper.coefficients(), ..Analytical::default() };
    Compared {
        analytical: ms(of(&equations)),
        mlp: ms(paper.network().and_then(|m| of(&m))),
        upper: ours.as_ref().map(|f| f.judged().as_millis_f64()),
        expected: ms(ours),
        row,
    }
}
