//! Parameters of the agent's resource.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_workflow::Dirs;

use crate::node::{contract_dirs, has_directory};

/// Parameters of the agent's resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    pub spec: PathBuf,
    /// Name of the VM's resource.
    pub resource: String,
    /// Whether the disk's settings are applied too.
    pub disk: bool,
    /// State and run directories of the host.
    pub dirs: Dirs,
    /// Timeout of this call in the cluster; `None` where the caller gives none.
    pub timeout: Option<Duration>,
}

impl Parameters {
    /// Reads the environment that Pacemaker's executor gives an agent: `OCF_RESKEY_*`,
    /// `OCF_RESOURCE_INSTANCE`. `dirs` holds the directories without a parameter.
    ///
    /// # Errors
    /// The parameter that is missing or invalid, in words.
    pub fn of_environment(variable: &dyn Fn(&str) -> Option<String>, dirs: &Dirs) -> Result<Self, String> {
        let given = |name: &str| variable(&format!("OCF_RESKEY_{name}")).filter(|v| !v.is_empty());
        let spec = given("spec").ok_or("the parameter `spec` is missing")?;
        let resource = given("resource").or_else(|| variable("OCF_RESOURCE_INSTANCE"));
        let resource = resource.ok_or("neither `resource` nor OCF_RESOURCE_INSTANCE is given")?;
        if !has_directory(&resource) {
            return Err(format!("resource {resource:?} cannot name a directory: give it another name"));
        }
        let disk = match given("disk").as_deref() {
            None | Some("false" | "no" | "0") => false,
            Some("true" | "yes" | "1") => true,
            Some(other) => return Err(format!("disk is {other:?}: write true or false")),
        };
        let state = given("state_dir").map_or_else(|| dirs.state.clone(), PathBuf::from);
        let timeout = match given("CRM_meta_timeout").map(|ms| (ms.parse::<NonZeroU64>(), ms)) {
            None => None,
            Some((Ok(ms), _)) => Some(Duration::from_millis(ms.get())),
            Some((Err(_), ms)) => return Err(format!("CRM_meta_timeout is {ms:?}: write milliseconds")),
        };
        let dirs = Dirs { state, run: dirs.run.clone() };
        Ok(Self { spec: spec.into(), resource, disk, dirs, timeout })
    }

    /// Directories with the contract's own journal.
    pub(super) fn own(&self) -> Dirs {
        contract_dirs(&self.dirs, &self.resource)
    }
}
