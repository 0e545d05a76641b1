//! Errors of a request for a reservation.

use super::MOST_ARRIVALS;

/// Errors of a request for a reservation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArrivalError {
    /// The contract has a mistake.
    #[error("the contract of {vm} has a mistake: {why}")]
    Contract {
        /// Name of the VM as its manager has it.
        vm: String,
        /// Mistake, with its place.
        why: String,
    },
    /// The contract does not fit.
    #[error("the contract of {vm} does not fit on this host: {why}")]
    DoesNotFit {
        /// VM of the contract.
        vm: String,
        /// Reason of the admission.
        why: String,
    },
    /// A contract that is admitted would have to give way.
    #[error("the contract of {vm} does not fit on this host: that of {other} would give way: {why}")]
    GivesWay {
        /// VM that was to arrive.
        vm: String,
        /// VM whose contract would give way.
        other: String,
        /// Reason of the admission.
        why: String,
    },
    /// The name is that of another VM.
    #[error("{vm} is the name of another VM here ({place}): give one of them another `name`")]
    NameInUse {
        /// Name in both contracts.
        vm: String,
        /// Place of the other contract.
        place: String,
    },
    /// No contract would be in force after the arrival.
    #[error(
        "rtvirtiod on this host reads no metadata of libvirt's domains, so the contract of {vm} would be lost: \
         write `libvirt = \"qemu:///system\"` into its configuration, or the contract into a file of this host"
    )]
    NotKept {
        /// VM of the contract.
        vm: String,
    },
    /// Reservations for as many VMs as there may be stand already.
    #[error(
        "{MOST_ARRIVALS} VMs are about to arrive already: `rtvirtio status` names them, and `rtvirtio contract release VM` gives a reservation back"
    )]
    TooMany,
    /// Room for contracts is not known now.
    #[error("whether the contract of {vm} fits on this host is not known: {why}")]
    Unknown {
        /// VM that was to arrive.
        vm: String,
        /// Reason why it is not known.
        why: String,
    },
    /// The reservation cannot be stored, so that a restart of the service would lose it.
    #[error("the reservation for {vm} cannot be stored: {why}")]
    NotStored {
        /// VM that was to arrive.
        vm: String,
        /// Reason of the failed write.
        why: String,
    },
}

impl ArrivalError {
    /// Whether the same request may succeed a little later.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::TooMany | Self::Unknown { .. } | Self::NotStored { .. })
    }
}
