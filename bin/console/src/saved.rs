//! Profiles and learned models, in the directories where other commands look for them.

use std::path::Path;

use anyhow::Context as _;
use rtvirtio_measure::profile::to_json;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_report::text;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::model_choice::keep_aside;

use crate::{Global, Ui, show, style, write_result};

/// Prints a device's profile and saves it.
pub fn save_profile(profile: &Profile, path: &Path, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    // Printed first: a full disk must not lose the measurement.
    show(ui, profile, || text::profile(profile, &style()))?;
    write_result(path, &to_json(profile, path)?, global)?;
    ui.step(&format!("saved {}", path.display()));
    Ok(())
}

/// Saves a learned model for `predict` and `plan`.
pub fn save_model(model: &HostModel, path: &Path, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    keep_aside(path, ui)?;
    write_result(path, &serde_json::to_vec(model)?, global)?;
    ui.step(&format!(
        "learned from {} runs; predict and plan use {} from now on",
        model.points,
        path.display()
    ));
    Ok(())
}
