//! Choice of the model that predicts: a formula, or one learned of this device on this host.

use std::path::Path;
use std::sync::Arc;

use rtvirtio_kernel::trusted::DATA_LIMIT;
use rtvirtio_model::{Config, HostModel, ModelKind, Profile};
use rtvirtio_planner::PlanOptions;
use rtvirtio_spec::Spec;

use crate::dirs::{Dirs, is_there, profile_key};
use crate::error::{Context as _, Result};
use crate::progress::Progress;

/// Models by name, as a user asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelName {
    /// The model learned on this host, if any, else slice.
    Auto,
    /// BFQ's slices and queueing at the device.
    Slice,
    /// Learned on this host, with an upper bound.
    Bound,
}

/// A kind of model, with what was learned where the kind needs it.
#[derive(Clone)]
pub struct ModelChoice {
    /// Kind of the model.
    pub kind: ModelKind,
    /// Model learned on this host; `None` for a formula alone.
    pub learned: Option<Arc<HostModel>>,
}

impl ModelChoice {
    /// A formula that needs nothing learned.
    pub fn formula(kind: ModelKind) -> Self {
        Self { kind, learned: None }
    }

    /// The chosen model; `auto` is the learned model where it fits and no requests come at once,
    /// else the slice model, with a warning when a learned model does not fit.
    pub fn find(
        name: ModelName,
        spec: &Spec,
        profile: &Profile,
        dirs: &Dirs,
        progress: &dyn Progress,
    ) -> Result<Self> {
        if name == ModelName::Slice {
            return Ok(Self::formula(ModelKind::Slice));
        }
        if name == ModelName::Auto && spec.tasks().any(|(_, task)| task.at_once() > 1) {
            progress.step("requests come at once, which no learned model knows: the slice model predicts");
            return Ok(Self::formula(ModelKind::Slice));
        }
        match (load(spec, profile, dirs), name) {
            (Ok(Some(model)), _) => Ok(Self { kind: ModelKind::Bound, learned: Some(Arc::new(model)) }),
            (Ok(None), ModelName::Auto) => Ok(Self::formula(ModelKind::Slice)),
            (Err(e), ModelName::Auto) => {
                progress.warn(&format!("the learned model is not used: {e:#}"));
                Ok(Self::formula(ModelKind::Slice))
            }
            (Ok(None), _) => Err(rtvirtio_model::ModelError::NotLearned.into()),
            (Err(e), _) => Err(e),
        }
    }

    /// The options of a search.
    pub fn options(&self, start: Config) -> PlanOptions {
        match (self.kind, &self.learned) {
            (ModelKind::Bound, Some(learned)) => PlanOptions::bound(start, Arc::clone(learned)),
            _ => PlanOptions::new(start),
        }
    }
}

/// Keeps a model that learned from guests aside before one without takes its place: its runs in
/// guests took an hour or more, and a sweep has none.
pub fn keep_aside(path: &Path, progress: &dyn Progress) -> Result<()> {
    if !read(path).is_ok_and(|model| model.guests.is_some()) {
        return Ok(());
    }
    let aside = path.with_extension("json.before");
    std::fs::rename(path, &aside).with_context(|| format!("cannot keep {} aside", path.display()))?;
    progress.warn(&format!(
        "the model that was there had learned from guests too and is kept as {}; the new one has not: `rtvirtio-bench accuracy DATA --guests GUESTS --model {}` makes one that has",
        aside.display(),
        path.display()
    ));
    Ok(())
}

/// The learned model of the spec's device; `None` when there is none.
fn load(spec: &Spec, profile: &Profile, dirs: &Dirs) -> Result<Option<HostModel>> {
    let path = dirs.model(&profile_key(&spec.device)?);
    if !is_there(&path)? {
        return Ok(None);
    }
    let model = read(&path)?;
    model.fits(profile).with_context(|| path.display().to_string())?;
    Ok(Some(model))
}

/// The model of a file, where one is named.
pub fn read_if(path: Option<&Path>) -> Result<Option<Arc<HostModel>>> {
    Ok(path.map(read).transpose()?.map(Arc::new))
}

/// A model file, checked.
pub fn read(path: &Path) -> Result<HostModel> {
    let text = rtvirtio_kernel::trusted::read_named_text(path, DATA_LIMIT)
        .with_context(|| format!("cannot read {}", path.display()))?;
    HostModel::from_json(&text).with_context(|| path.display().to_string())
}
