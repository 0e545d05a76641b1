//! Compiles a specification to the settings of an actuator.

mod block;
mod network;
mod qemu;
mod resctrl;

use crate::error::CompileError;
use crate::qos400::{self, AxiPort};
use crate::settings::{Actuator, Compiled};
use crate::tspec::{Direction, Tspec, Unit};

pub use block::limit_value;
pub use network::Bandwidth;
pub use resctrl::{Cache, MemoryControl, ResctrlPlace};

/// Location of an actuator: where its settings are written.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// Table of the VM in `iod.toml`.
    IoDomain,
    /// A cgroup of v2 and a device.
    IoMax {
        /// Directory of the cgroup.
        cgroup: String,
        /// Device number as `MAJ:MIN`.
        dev: String,
    },
    /// A cgroup of v1 and a device.
    ThrottleV1 {
        /// Directory of the cgroup.
        cgroup: String,
        /// Device number as `MAJ:MIN`.
        dev: String,
    },
    /// A network interface, such as a VM's tap.
    TcTbf { interface: String },
    /// A network interface, for an HTB class.
    TcHtb { interface: String },
    /// A drive of QEMU.
    Qemu {
        /// Path of the drive's device, as `query-block` shows it (`qdev`).
        drive: String,
    },
    /// A VM of libvirt.
    Libvirt {
        /// Name of the libvirt domain.
        domain: String,
        /// Target of the VM's disk, such as `vda`.
        disk: String,
        /// Target of the VM's network card, such as `vnet0`.
        interface: String,
    },
    /// A group of resctrl.
    Resctrl(ResctrlPlace),
    /// A port of an interconnect.
    Qos400(AxiPort),
}

impl Place {
    /// Actuator at this location.
    #[must_use]
    pub fn actuator(&self) -> Actuator {
        match self {
            Self::IoDomain => Actuator::IoDomain,
            Self::IoMax { .. } => Actuator::IoMax,
            Self::ThrottleV1 { .. } => Actuator::ThrottleV1,
            Self::TcTbf { .. } => Actuator::TcTbf,
            Self::TcHtb { .. } => Actuator::TcHtb,
            Self::Qemu { .. } => Actuator::Qemu,
            Self::Libvirt { .. } => Actuator::Libvirt,
            Self::Resctrl(_) => Actuator::Resctrl,
            Self::Qos400(_) => Actuator::Qos400,
        }
    }
}

/// Compiles a specification of one direction for an actuator.
///
/// # Errors
/// [`CompileError`] when the actuator cannot express it, or has no field for one of its numbers.
pub fn compile(tspec: &Tspec, direction: Direction, place: &Place) -> Result<Compiled, CompileError> {
    compile_among(tspec, direction, &[], place)
}

/// Compiles for a VM that has `others` too: a setting that holds several limits at once, such as a
/// line of `io.max` or a command of QEMU's, has them in it. The limit itself may be among `others`.
pub fn compile_among(
    tspec: &Tspec,
    direction: Direction,
    others: &[(Direction, Tspec)],
    place: &Place,
) -> Result<Compiled, CompileError> {
    tspec.check()?;
    let is_other = |of: &&(Direction, Tspec)| (of.0, of.1.unit) != (direction, tspec.unit);
    let others: Vec<(Direction, Tspec)> = others.iter().filter(is_other).copied().collect();
    for (_, other) in &others {
        other.check()?;
    }
    let pair = others.iter().find(|(other, _)| *other == direction).map(|(_, tspec)| tspec);
    match place {
        Place::IoDomain => block::io_domain(tspec, pair, direction),
        Place::IoMax { cgroup, dev } => block::io_max(tspec, pair, direction, cgroup, dev),
        Place::ThrottleV1 { cgroup, dev } => block::throttle_v1(tspec, direction, cgroup, dev),
        Place::TcTbf { interface } => network::tbf(tspec, direction, interface),
        Place::TcHtb { interface } => network::htb(tspec, direction, interface),
        Place::Qemu { drive } => qemu::io_throttle(tspec, direction, drive, &others),
        Place::Libvirt { domain, disk, interface } => {
            if direction.is_disk() {
                qemu::iotune(tspec, direction, domain, disk, &others)
            } else {
                network::bandwidth(tspec, direction, domain, interface)
            }
        }
        Place::Resctrl(place) => resctrl::schemata(tspec, direction, place),
        Place::Qos400(port) => qos400::compile(tspec, direction, port),
    }
}

/// Returns an error for directions of networks.
fn disks_only(actuator: Actuator, direction: Direction) -> Result<(), CompileError> {
    if direction.is_disk() {
        return Ok(());
    }
    let remedy = "use tc-tbf, tc-htb, libvirt or io-domain";
    Err(CompileError::Direction { actuator, direction, remedy })
}

/// Returns an error for directions of disks.
fn networks_only(actuator: Actuator, direction: Direction) -> Result<(), CompileError> {
    if !direction.is_disk() {
        return Ok(());
    }
    let remedy = "use io-domain, io-max, throttle-v1, qemu or libvirt";
    Err(CompileError::Direction { actuator, direction, remedy })
}

fn bytes_only(actuator: Actuator, tspec: &Tspec, remedy: &'static str) -> Result<(), CompileError> {
    if tspec.unit == Unit::Bytes {
        return Ok(());
    }
    Err(CompileError::Unit { actuator, unit: tspec.unit, remedy })
}

#[cfg(test)]
mod tests;
