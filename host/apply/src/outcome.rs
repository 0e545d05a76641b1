//! Result of putting back each knob.

use serde::Serialize;

/// Result for one knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// Put back to its old value.
    Restored {
        /// Value before putting back.
        from: String,
    },
    /// Already at its old value.
    Untouched,
    /// Changed by another program; left alone, and still in the journal.
    Conflict { found: String },
    /// Left alone because another knob, which depends on it or excludes it, was left alone; still
    /// in the journal.
    Blocked {
        /// Path of the other knob.
        by: String,
    },
    /// Changed by another program; left alone and forgotten, as asked.
    Accepted,
    /// The device, cgroup, guest or file is gone, and the setting with it.
    Gone {
        /// Object that is gone, and the error.
        why: String,
    },
    /// Not put back because of an error; still in the journal.
    Failed { error: String },
}

impl Fate {
    /// Whether the knob has to stay in the journal.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Blocked { .. } | Self::Failed { .. })
    }
}

/// Knob with its fate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// The setting as users know it.
    pub knob: String,
    /// Path of its file; inside a guest with the VM's name before it.
    pub path: String,
    /// Value that it had before the plan; `None` when its file did not exist.
    pub old: Option<String>,
    /// Result of putting it back.
    #[serde(flatten)]
    pub fate: Fate,
}

/// Result of a revert.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reverted {
    /// Whether everything is settled and the journal is gone.
    pub done: bool,
    /// Whether the machine was restarted since the plan was applied: the kernel has forgotten its
    /// knobs by itself then.
    pub rebooted: bool,
    /// Each knob in the order of the journal.
    pub outcomes: Vec<Outcome>,
    /// Errors that concern no single knob.
    pub warnings: Vec<String>,
}

impl Reverted {
    /// Sentence for the user: `everything was put back`, or the knobs that were not.
    #[must_use]
    pub fn summary(&self) -> String {
        let open: Vec<_> = self
            .outcomes
            .iter()
            .filter_map(|o| {
                let path = &o.path;
                match &o.fate {
                    Fate::Conflict { found } => {
                        Some(format!("{path} was changed by another program to `{found}`"))
                    }
                    Fate::Blocked { by } => Some(format!("{path} was left because of {by}")),
                    Fate::Failed { error } => Some(format!("{path}: {error}")),
                    _ => None,
                }
            })
            .collect();
        match (open.is_empty(), self.warnings.is_empty()) {
            (true, true) => "everything was put back".to_owned(),
            (true, false) => format!("everything was put back, but: {}", self.warnings.join("; ")),
            (false, _) => format!("not put back: {}", open.join("; ")),
        }
    }
}
