//! One traffic specification for every regulator.
//!
//! A [`Tspec`] (RFC 2215) says what one direction of a VM may move: rate, burst, peak.
//! [`compile()`] turns it into the settings of an actuator: the I/O domain's caps, cgroups, tc,
//! QEMU, libvirt, resctrl, QoS-400 registers. Each says what it keeps of the specification, the
//! most by which any interval can exceed it, and how firmly it is held ([`Worth`]); what an
//! actuator cannot express is refused with a [`CompileError`].
//!
//! [`choose()`] goes the other way: from what a victim must get to the regulator of its
//! neighbours; [`VictimModel`] says what measured runs promise in between. [`curve`] holds the
//! network calculus: arrival curves, and what (alpha, Delta) they leave.

mod choose;
mod compile;
pub mod curve;
mod error;
pub mod qos400;
mod settings;
mod tspec;
mod victim;

pub use choose::{Choice, ChooseError, Curve, CurvePoint, ServiceTarget, choose, largest_that_holds};
pub use compile::{Bandwidth, Cache, MemoryControl, Place, ResctrlPlace, compile, limit_value};
pub use curve::{Arrival, Service};
pub use error::CompileError;
pub use qos400::AxiPort;
pub use settings::{Actuator, Compiled, Part, Setting, Worth};
pub use tspec::{Direction, Tspec, TspecError, Unit};
pub use victim::{CURVE_SCHEMA, Outstanding, VictimCurve, VictimModel, VictimRun};
