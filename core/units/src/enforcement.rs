//! Kind of enforcement of a setting.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of enforcement by a mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Enforcement {
    /// Holds by construction whatever other VMs do.
    Guarantee,
    /// An upper limit that is enforced, with a stated excess where there is one.
    Cap,
    /// Shifts shares or order, or slows traffic down; no bound by itself.
    Hint,
}

impl Enforcement {
    /// Name in texts and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Guarantee => "guarantee",
            Self::Cap => "cap",
            Self::Hint => "hint",
        }
    }
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
