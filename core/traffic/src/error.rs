//! Why an actuator refuses.

use crate::settings::Actuator;
use crate::tspec::{Direction, TspecError, Unit};

/// Why an actuator cannot take a specification.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// A number out of its range.
    #[error(transparent)]
    Tspec(#[from] TspecError),
    /// An actuator of disks, or of networks.
    #[error("{actuator} does not regulate {}: {remedy}", direction.name())]
    Direction {
        /// The actuator.
        actuator: Actuator,
        /// The direction.
        direction: Direction,
        /// Which one does.
        remedy: &'static str,
    },
    /// It counts only the other unit.
    #[error("{actuator} cannot count {}: {remedy}", match unit { Unit::Bytes => "bytes", Unit::Requests => "requests" })]
    Unit {
        /// The actuator.
        actuator: Actuator,
        /// The unit of the specification.
        unit: Unit,
        /// What can.
        remedy: &'static str,
    },
    /// A number that its field does not hold.
    #[error("{actuator}: {what} of {value} is out of its range of {least} to {most}: {remedy}")]
    Range {
        /// The actuator.
        actuator: Actuator,
        /// Which number.
        what: &'static str,
        /// As asked.
        value: f64,
        /// Smallest that it holds.
        least: f64,
        /// Largest that it holds.
        most: f64,
        /// What to do.
        remedy: &'static str,
    },
    /// Something of the host that has to be known first.
    #[error("{actuator}: {what}")]
    Missing {
        /// The actuator.
        actuator: Actuator,
        /// What, and how it is given.
        what: String,
    },
}
