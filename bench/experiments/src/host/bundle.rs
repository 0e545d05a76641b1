//! The bundle: results saved after each part, and read when a stopped run continues.

use serde::{Deserialize, Serialize};

use super::facts::MachineFacts;
use crate::claims::Claim;
use crate::saved::Saved;

/// File of the bundle in the result directory.
pub const FILE: &str = "host.json";

/// Results of one host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bundle {
    /// [`Saved::SCHEMA`], checked on reading.
    pub schema: String,
    /// Date of the latest part, and version of the program.
    pub generated: String,
    /// Hardware, kernel and installed programs.
    pub machine: MachineFacts,
    /// Whether the figures of parts that can use one are of a drive of this host.
    pub own_drive: bool,
    /// Results of the parts, the most valuable first.
    pub parts: Vec<PartResult>,
}

impl Saved for Bundle {
    const SCHEMA: &str = "rtvirtio-host/1";
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartResult {
    /// Name of the part ([`Part::name`](super::Part::name)).
    pub name: String,
    /// Command that was run, or that would be.
    pub command: String,
    /// Index in the part's sizes, shortest first.
    pub size: usize,
    /// Figures, error or reason for leaving the part out.
    pub outcome: Outcome,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The part was measured.
    Measured {
        /// Duration of the part, s.
        seconds: u64,
        /// `kvm`, `tcg` or `none`.
        accelerator: String,
        /// Numbers that the part's command reported.
        claims: Vec<Claim>,
    },
    /// The part's command failed.
    Failed {
        /// Error of the command, or its last lines.
        reason: String,
    },
    /// The part was not run.
    LeftOut {
        /// Reason, such as a missing program or too little time.
        reason: String,
    },
}

impl Bundle {
    /// Index of the size that was measured; `None` without figures.
    #[must_use]
    pub fn measured(&self, name: &str) -> Option<usize> {
        let part = self.parts.iter().find(|part| part.name == name)?;
        matches!(part.outcome, Outcome::Measured { .. }).then_some(part.size)
    }

    /// Replaces an earlier result of the part. Figures stay where a longer measurement failed.
    pub fn put(&mut self, result: PartResult) {
        let at = self.parts.iter_mut().find(|part| part.name == result.name);
        let is_measured = |part: &PartResult| matches!(part.outcome, Outcome::Measured { .. });
        match at {
            Some(old) if is_measured(old) && !is_measured(&result) => {}
            Some(old) => *old = result,
            None => self.parts.push(result),
        }
    }

    /// Figures of all measured parts.
    pub fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.parts.iter().flat_map(|part| match &part.outcome {
            Outcome::Measured { claims, .. } => claims.as_slice(),
            _ => &[],
        })
    }
}
