//! One traffic specification for every regulator.
//!
//! A [`Tspec`] (RFC 2215) limits one direction of a VM's traffic: rate, burst, peak. [`compile()`]
//! turns it into the settings of an actuator: the I/O domain's caps, cgroups, tc, QEMU, libvirt,
//! resctrl, QoS-400 registers. The result has the values that the actuator enforces, the largest
//! excess over the specification in any interval, and the enforcement ([`Enforcement`]); a
//! specification that an actuator cannot express is refused with a [`CompileError`].
//!
//! [`choose()`] is the inverse: from the service that a victim needs to the regulator of its
//! neighbours; [`VictimModel`] interpolates between measured runs. [`curve`] holds the network
//! calculus: arrival curves, and the (alpha, Delta) that they leave.

mod choose;
mod compile;
pub mod curve;
mod error;
mod held_back;
pub mod qos400;
mod settings;
mod tspec;
mod victim;

pub use choose::{Choice, ChooseError, Curve, CurvePoint, ServiceTarget, choose, largest_that_holds};
pub use compile::{
    Bandwidth, Cache, MemoryControl, Place, ResctrlPlace, compile, compile_among, limit_value,
};
pub use curve::{Arrival, Service};
pub use error::CompileError;
pub use held_back::{Stream, held_back};
pub use qos400::AxiPort;
pub use rtvirtio_units::Enforcement;
pub use settings::{Actuator, Compiled, Part, Setting};
pub use tspec::{Direction, Tspec, TspecError, Unit};
pub use victim::{CURVE_SCHEMA, Outstanding, VictimCurve, VictimModel, VictimRun};
