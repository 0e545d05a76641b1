//! Errors of compiling a specification for an actuator.

use crate::settings::Actuator;
use crate::tspec::{Direction, TspecError, Unit};

/// Reasons why an actuator cannot implement a specification.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// A number of the specification is out of its range.
    #[error(transparent)]
    Tspec(#[from] TspecError),
    /// The actuator is one of disks, or of networks, and the direction is not.
    #[error("{actuator} does not regulate {}: {remedy}", direction.name())]
    Direction {
        /// Actuator of the request.
        actuator: Actuator,
        /// Direction of the specification.
        direction: Direction,
        /// Actuators that do, in words.
        remedy: &'static str,
    },
    /// The actuator counts only in the other unit.
    #[error("{actuator} cannot count {}: {remedy}", match unit { Unit::Bytes => "bytes", Unit::Requests => "requests" })]
    Unit {
        /// Actuator of the request.
        actuator: Actuator,
        /// Unit of the specification.
        unit: Unit,
        /// Actuators or settings that can, in words.
        remedy: &'static str,
    },
    /// A number does not fit its field.
    #[error("{actuator}: {what} of {value} is out of its range of {least} to {most}: {remedy}")]
    Range {
        /// Actuator of the request.
        actuator: Actuator,
        /// Name of the number.
        what: &'static str,
        /// Value as asked, in the unit of the field.
        value: f64,
        /// Smallest value of the field.
        least: f64,
        /// Largest value of the field.
        most: f64,
        /// Change of the specification that would work.
        remedy: &'static str,
    },
    /// A fact about the host is missing.
    #[error("{actuator}: {what}")]
    Missing {
        /// Actuator of the request.
        actuator: Actuator,
        /// Missing fact, and how to give it.
        what: String,
    },
}
