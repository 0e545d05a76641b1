//! What became of each knob that was put back.

use serde::Serialize;

/// What became of one knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// It is as it was before.
    Restored {
        /// Value before putting back.
        from: String,
    },
    /// It already was as before.
    Untouched,
    /// Another program changed it; left alone, and still in the journal.
    Conflict {
        /// Its value now.
        found: String,
    },
    /// Left alone because another knob that depends on it was left alone; still in the journal.
    Blocked {
        /// The other knob.
        by: String,
    },
    /// Another program changed it; left alone and forgotten, as asked.
    Accepted,
    /// The device, cgroup, guest or file is gone, and the setting with it.
    Gone {
        /// What is gone.
        why: String,
    },
    /// It could not be put back; still in the journal.
    Failed {
        /// Why.
        error: String,
    },
}

impl Fate {
    /// Whether the knob has to stay in the journal.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Blocked { .. } | Self::Failed { .. })
    }
}

/// One knob and what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// The setting as users know it.
    pub knob: String,
    /// Its file; inside a guest with the VM's name before it.
    pub path: String,
    /// Value that it had before the plan; `None` when its file did not exist.
    pub old: Option<String>,
    /// What became of it.
    #[serde(flatten)]
    pub fate: Fate,
}

/// What putting back did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reverted {
    /// Whether everything is settled and the journal is gone.
    pub done: bool,
    /// Whether the machine was restarted since the plan was applied: the kernel has forgotten its
    /// knobs by itself then.
    pub rebooted: bool,
    /// Each knob in the order of the journal.
    pub outcomes: Vec<Outcome>,
    /// What went wrong apart from the knobs.
    pub warnings: Vec<String>,
}

impl Reverted {
    /// One sentence: `everything was put back`, or what was not.
    #[must_use]
    pub fn summary(&self) -> String {
        let open: Vec<_> = self
            .outcomes
            .iter()
            .filter_map(|o| {
                let path = &o.path;
                match &o.fate {
                    Fate::Conflict { found } => {
                        Some(format!("{path} was changed by someone else to `{found}`"))
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
