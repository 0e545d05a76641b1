//! The paper's models as fitted on one device, and their place in a model file.

use std::path::Path;
use std::sync::Arc;

use rtvirtio_kernel::trusted::{DATA_LIMIT, read_named_text};
use rtvirtio_learn::dataset::Point;
use rtvirtio_model::learned::ModelFileError;
use rtvirtio_model::{Coefficients, HostModel, Profile};
use rtvirtio_workflow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::coefficients::fitted;
use crate::ensemble::{Ensemble, EnsembleError};
use crate::mlp::Loss;
use crate::network::{self, EPOCHS, Network};

/// The paper's models as fitted on one device; without any of them where the runs did not suffice.
#[derive(Clone, Debug, Default)]
pub struct PaperModels {
    network: Option<Network>,
    coefficients: Option<Coefficients>,
}

/// Parts of a model file that this crate reads.
#[derive(Deserialize)]
struct Parts {
    profile: Profile,
    /// Network on the paper's features, in s.
    #[serde(default)]
    paper: Option<Ensemble>,
    #[serde(default)]
    analytical: Option<Coefficients>,
}

/// A model file with the paper's models.
#[derive(Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    host: &'a HostModel,
    paper: Option<&'a Ensemble>,
    analytical: Option<Coefficients>,
}

impl PaperModels {
    /// Fits both models to measured runs.
    pub fn fit(points: &[Point], profile: &Profile, seed: u64) -> std::result::Result<Self, EnsembleError> {
        let options = network::options(EPOCHS, seed, Loss::Squared);
        let network = network::fit(&network::rows(points), &options)?.map(|(ensemble, _)| Network {
            ensemble: Arc::new(ensemble),
            profile: Arc::new(profile.clone()),
        });
        Ok(Self { network, coefficients: fitted(points, profile).ok() })
    }

    /// From the text of a model file, which may hold none of them.
    ///
    /// # Errors
    /// A file of another format, or with a network that cannot be used.
    pub fn from_json(text: &str) -> std::result::Result<Self, ModelFileError> {
        let parts: Parts = serde_json::from_str(text).map_err(|e| ModelFileError::Form(e.to_string()))?;
        if let Some(ensemble) = &parts.paper {
            ensemble.check().map_err(|e| ModelFileError::Damaged(e.to_string()))?;
        }
        let network =
            |ensemble| Network { ensemble: Arc::new(ensemble), profile: Arc::new(parts.profile.clone()) };
        Ok(Self { network: parts.paper.map(network), coefficients: parts.analytical })
    }

    /// From a model file; nothing without one.
    ///
    /// # Errors
    /// A file that cannot be read, and those of [`PaperModels::from_json`].
    pub fn read_if(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text =
            read_named_text(path, DATA_LIMIT).with_context(|| format!("cannot read {}", path.display()))?;
        Self::from_json(&text).with_context(|| path.display().to_string())
    }

    /// Text of a model file that holds these too.
    pub fn to_json(&self, host: &HostModel) -> serde_json::Result<Vec<u8>> {
        let paper = self.network.as_ref().map(|network| &*network.ensemble);
        serde_json::to_vec(&Whole { host, paper, analytical: self.coefficients })
    }

    /// Coefficients fitted on the device; `None` where the runs do not determine them.
    #[must_use]
    pub fn fitted_coefficients(&self) -> Option<Coefficients> {
        self.coefficients
    }

    /// Coefficients of the equations: as fitted, else of Table III, which are of the authors' host.
    #[must_use]
    pub fn coefficients(&self) -> Coefficients {
        self.coefficients.unwrap_or(Coefficients::TABLE_III)
    }

    /// The paper's network; `None` where there were too few runs of the paper's kind.
    #[must_use]
    pub fn network(&self) -> Option<Network> {
        self.network.clone()
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_learn::synthetic::{profile, quick, synthetic_runs};
    use rtvirtio_learn::train::fit;
    use rtvirtio_model::{Elevator, TailModel};

    use super::*;

    #[test]
    fn a_model_file_holds_both_kinds_and_each_reader_finds_its_own() {
        let points = synthetic_runs(400, 0.3, 3);
        let host = fit(&points, &profile(), "today", &quick()).unwrap();
        let paper = PaperModels::fit(&points, &profile(), 1).unwrap();
        let text = String::from_utf8(paper.to_json(&host).unwrap()).unwrap();
        assert_eq!(HostModel::from_json(&text).unwrap(), host, "the product reads over the rest");
        let read = PaperModels::from_json(&text).unwrap();
        assert_eq!(read.fitted_coefficients(), paper.fitted_coefficients());
        let (network, again) = (paper.network().unwrap(), read.network().unwrap());
        assert_eq!(network.ensemble, again.ensemble);
        let like = |p: &&Point| p.knobs.elevator == Elevator::Bfq;
        let (spec, config) = rtvirtio_learn::condition::inputs(points.iter().find(like).unwrap());
        let said = network.forecast(&profile(), &spec, &config).unwrap();
        assert_eq!(said, again.forecast(&profile(), &spec, &config).unwrap());
        assert!(said.iter().all(|f| f.upper.is_none() && f.rate_kept == 1.0));
        // A model of a sweep alone has none of the paper's.
        let none = PaperModels::from_json(&serde_json::to_string(&host).unwrap()).unwrap();
        assert!(none.network().is_none() && none.coefficients() == Coefficients::TABLE_III);
        let damaged = text.replacen("rtvirtio.ensemble.v1", "rtvirtio.ensemble.v0", 1);
        assert!(matches!(PaperModels::from_json(&damaged), Err(ModelFileError::Damaged(_))));
        HostModel::from_json(&damaged).unwrap();
    }

    #[test]
    fn a_handful_of_runs_makes_no_network() {
        let few = PaperModels::fit(&synthetic_runs(12, 0.3, 1), &profile(), 1).unwrap();
        assert!(few.network().is_none() && few.fitted_coefficients().is_none());
    }
}
