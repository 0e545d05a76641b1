//! The plan of a host, as a file: one plan for each device.

use std::path::{Path, PathBuf};

use rtvirtio_model::Profile;
use rtvirtio_planner::{Plan, scheme_name};
use rtvirtio_spec::HostSpec;
use serde::{Deserialize, Serialize};

use crate::dirs::{Dirs, digest};
use crate::error::{Context as _, Error, Kind, Result, bail, ensure};
use crate::plan::load_profile;

/// Version of the plan file's form.
pub const PLAN_SCHEMA: &str = "rtvirtio.plan.v2";
/// The form of a plan of one device without `devices`, which is still read.
pub const PLAN_SCHEMA_V1: &str = "rtvirtio.plan.v1";

/// Plan of a host, with a plan of each device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostPlan {
    /// Schema of the file, always [`PLAN_SCHEMA`].
    pub schema: String,
    /// Absolute path of the spec that it was made for; `None` where that is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec_file: Option<String>,
    /// Digest of that spec's content, its comments aside; `None` where the plan was not made for
    /// later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec_digest: Option<String>,
    /// Whether every target on every device is predicted to be met: for readers of the file. See
    /// [`HostPlan::is_feasible`].
    pub feasible: bool,
    /// Plan of each device of the spec, in its order; never empty.
    pub devices: Vec<DevicePlan>,
}

/// The plan of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicePlan {
    /// Name of the device in the spec; `None` where it has none.
    pub device: Option<String>,
    /// Settings and predictions for the device.
    pub plan: Plan,
    /// The measurement that it rests on; `None` where the plan was not made for later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileUsed>,
    /// Notes on settings that act elsewhere than on the device itself, and on layers below it that
    /// are not seen, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl DevicePlan {
    /// Plan that rests on no saved measurement and has no notes.
    #[must_use]
    pub fn new(device: Option<String>, plan: Plan) -> Self {
        Self { device, plan, profile: None, notes: Vec::new() }
    }
}

/// The measurement of a device that a plan rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileUsed {
    /// The file that was named; `None` for the one that is saved for the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// Digest of the profile's content.
    pub digest: String,
}

impl ProfileUsed {
    /// Of a profile, and the file that was named.
    pub fn from_profile(profile: &Profile, file: Option<&Path>) -> Result<Self> {
        let file = file.map(std::path::absolute).transpose()?;
        Ok(Self { file, digest: digest(&serde_json::to_vec(profile)?) })
    }
}

impl HostPlan {
    /// The plans of a host's devices, in the order of its spec.
    #[must_use]
    pub fn new(devices: Vec<DevicePlan>) -> Self {
        let feasible = devices.iter().all(|d| d.plan.feasible);
        Self { schema: PLAN_SCHEMA.to_owned(), spec_file: None, spec_digest: None, feasible, devices }
    }

    /// The plan of a host of one device.
    #[must_use]
    pub fn of_one(plan: Plan) -> Self {
        Self::new(vec![DevicePlan::new(None, plan)])
    }

    /// Adds the path of its spec file. A path that is not UTF-8 cannot stand in JSON; `apply` then
    /// asks for it.
    pub fn of_spec_file(self, path: &Path) -> Result<Self> {
        Ok(Self { spec_file: std::path::absolute(path)?.into_os_string().into_string().ok(), ..self })
    }

    /// Adds the digest of its spec's content.
    pub fn of_spec(self, host: &HostSpec) -> Result<Self> {
        Ok(Self { spec_digest: Some(digest(&serde_json::to_vec(host)?)), ..self })
    }

    /// Changes of the spec and of profiles since the plan was made, one sentence each; none for a
    /// plan that does not record them.
    pub fn changes_since(&self, host: &HostSpec, dirs: &Dirs) -> Result<Vec<String>> {
        let mut changes = Vec::new();
        let now = digest(&serde_json::to_vec(host)?);
        if self.spec_digest.as_ref().is_some_and(|then| *then != now) {
            changes.push("the spec has changed since the plan was made".to_owned());
        }
        for (of, part) in self.devices.iter().zip(host.parts()) {
            let Some(used) = &of.profile else { continue };
            let name = of.device.as_ref().map_or_else(String::new, |name| format!(" {name}"));
            match load_profile(&part.spec, used.file.as_deref(), dirs) {
                Ok(profile) if ProfileUsed::from_profile(&profile, None)?.digest == used.digest => {}
                Ok(_) => changes.push(format!("the device{name} was measured anew since the plan was made")),
                Err(e) => changes.push(format!(
                    "the measurement of the device{name} that the plan rests on is not there: {e:#}"
                )),
            }
        }
        Ok(changes)
    }

    /// Reads a plan file's text; `path` stands in errors.
    ///
    /// # Errors
    /// [`Kind::File`] when it is not a plan of a form that is known.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let bad = || {
            format!(
                "{} is not a plan: make one with `rtvirtio plan SPEC -o FILE`; a spec's name must end in .toml",
                path.display()
            )
        };
        let json = |e| Error::from_source(Kind::File, e);
        let mut value: serde_json::Value = serde_json::from_slice(text).map_err(json).with_context(bad)?;
        let schema = value.get("schema").and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
        let plan: Self = match (schema.as_str(), value.as_object_mut()) {
            (PLAN_SCHEMA_V1, Some(fields)) => {
                fields.remove("schema");
                let spec_file = fields.remove("spec_file").and_then(|v| v.as_str().map(str::to_owned));
                let plan = serde_json::from_value(value).map_err(json).with_context(bad)?;
                Self { spec_file, ..Self::of_one(plan) }
            }
            (PLAN_SCHEMA, _) => serde_json::from_value(value).map_err(json).with_context(bad)?,
            ("", _) => bail!(File, "{}", bad()),
            (other, _) => bail!(
                File,
                "{} has form {other}, this rtvirtio knows {PLAN_SCHEMA}: plan again",
                path.display()
            ),
        };
        ensure!(!plan.devices.is_empty(), File, "{}: `devices` is empty: plan again", path.display());
        Ok(plan)
    }

    /// Checks that it is for the devices of this spec.
    ///
    /// # Errors
    /// [`Kind::File`] for another number or other names of devices.
    pub fn check_devices(&self, host: &HostSpec) -> Result<()> {
        let names = |names: Vec<Option<&str>>| -> String {
            names.iter().map(|name| name.unwrap_or("one without a name")).collect::<Vec<_>>().join(", ")
        };
        let ours: Vec<_> = self.devices.iter().map(|d| d.device.as_deref()).collect();
        let parts: Vec<_> = host.parts().iter().map(|part| part.name.as_deref()).collect();
        // The only device needs no name.
        ensure!(
            ours == parts || (ours.len() == 1 && parts.len() == 1),
            File,
            "the plan is for the devices {}, and the spec has {}: plan again",
            names(ours),
            names(parts)
        );
        Ok(())
    }

    /// Whether every target on every device is predicted to be met.
    #[must_use]
    pub fn is_feasible(&self) -> bool {
        self.devices.iter().all(|d| d.plan.feasible)
    }

    /// Reasons for missed targets, one sentence for each device that misses some.
    #[must_use]
    pub fn reasons(&self) -> Vec<String> {
        let of = |d: &DevicePlan| {
            let reason = &d.plan.infeasible.as_ref()?.reason;
            Some(d.device.as_ref().map_or_else(|| reason.clone(), |name| format!("{name}: {reason}")))
        };
        self.devices.iter().filter_map(of).collect()
    }

    /// The scheme that chose the settings; of several devices the first one's, as all are planned
    /// the same way.
    #[must_use]
    pub fn scheme(&self) -> &str {
        self.devices.first().map_or("", |d| d.plan.scheme.as_str())
    }

    /// Name of that scheme for users, by [`scheme_name`].
    #[must_use]
    pub fn scheme_name(&self) -> &str {
        scheme_name(self.scheme())
    }
}

#[cfg(test)]
#[path = "plan_file_tests.rs"]
mod tests;
