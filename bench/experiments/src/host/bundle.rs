//! The bundle: what is saved after each part, and read when a stopped run goes on.

use serde::{Deserialize, Serialize};

use super::facts::MachineFacts;
use crate::claims::Claim;
use crate::saved::Saved;

/// File of the bundle in the result directory.
pub const FILE: &str = "host.json";

/// Results of one host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Bundle {
    /// Always [`Saved::SCHEMA`].
    pub schema: String,
    /// When, and by which version.
    pub generated: String,
    /// The host.
    pub machine: MachineFacts,
    /// Whether the figures of parts that can use one are of a drive of this host.
    pub own_drive: bool,
    /// In order of worth.
    pub parts: Vec<PartResult>,
}

impl Saved for Bundle {
    const SCHEMA: &str = "rtvirtio-host/1";
}

/// One part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartResult {
    /// As [`Part::name`](super::Part::name).
    pub name: String,
    /// The command that was run, or that would be.
    pub command: String,
    /// Position of its size.
    pub size: usize,
    /// How it ended.
    pub outcome: Outcome,
}

/// How a part ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// There are figures.
    Measured {
        /// How long it took, in seconds.
        seconds: u64,
        /// `kvm`, `tcg` or `none`.
        accelerator: String,
        /// Its figures.
        claims: Vec<Claim>,
    },
    /// It ended with an error.
    Failed {
        /// Its last words.
        reason: String,
    },
    /// It was left out.
    LeftOut {
        /// Why.
        reason: String,
    },
}

impl Bundle {
    /// The size in which a part has figures.
    #[must_use]
    pub fn measured(&self, name: &str) -> Option<usize> {
        let part = self.parts.iter().find(|part| part.name == name)?;
        matches!(part.outcome, Outcome::Measured { .. }).then_some(part.size)
    }

    /// Puts a result in the place of an earlier one. Figures stay where a longer measurement
    /// failed.
    pub fn put(&mut self, result: PartResult) {
        let at = self.parts.iter_mut().find(|part| part.name == result.name);
        let is_measured = |part: &PartResult| matches!(part.outcome, Outcome::Measured { .. });
        match at {
            Some(old) if is_measured(old) && !is_measured(&result) => {}
            Some(old) => *old = result,
            None => self.parts.push(result),
        }
    }

    /// All figures.
    pub fn claims(&self) -> impl Iterator<Item = &Claim> {
        self.parts.iter().flat_map(|part| match &part.outcome {
            Outcome::Measured { claims, .. } => claims.as_slice(),
            _ => &[],
        })
    }
}
