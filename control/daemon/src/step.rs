//! A step of reconciliation: what is to be done for a VM, and why.

use serde::Serialize;

/// Work of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "action")]
pub enum Action {
    /// Put the VM's contract in force.
    Apply,
    /// Revert the settings in force for the VM.
    PutBack {
        /// Also revert settings that another program has changed; else these are left.
        force: bool,
    },
    /// Give a restarted VM the weights and limits of the plan applied by `rtvirtio apply`.
    Renew,
    /// Give a restarted VM the weights and limits of the service's plan.
    RenewHeld,
    /// Put the finished plan in force, in place of the current one.
    SetPlan,
    /// Take new threads into the VM's contract.
    TakeIn,
    /// Split the VM's budget over its threads anew, by what each of them uses.
    Split,
    /// Give the VM's threads the priorities of its rank among the VMs admitted now.
    Relevel,
    /// Set settings again that another program has changed.
    Restore {
        /// Paths of these settings.
        paths: Vec<String>,
    },
    /// Leave settings to the program that has changed them.
    Release {
        /// Paths of these settings.
        paths: Vec<String>,
    },
}

/// Step of reconciliation for one VM or plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Name of the VM, [`APPLIED`](crate::APPLIED) or [`PLAN`](crate::PLAN).
    pub vm: String,
    /// Work of the step.
    #[serde(flatten)]
    pub action: Action,
    /// Reason of the step, in words.
    pub reason: String,
}
