//! One error type for all steps: its kind, where it happened, its cause.

use std::error::Error as StdError;
use std::fmt;

use rtvirtio_apply::ApplyError;
use rtvirtio_cpu::{CpuError, DemandError};
use rtvirtio_kernel::{ClaimError, HostError};
use rtvirtio_measure::MeasureError;
use rtvirtio_measure::workload::WorkloadError;

/// Kinds of errors, by the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// The user asked to stop.
    Cancelled,
    /// The spec, a plan or a configuration file has a mistake.
    File,
    /// An argument cannot be used as it is.
    Argument,
    /// A VM, an I/O domain or a lab that is named does not run, or does not answer.
    NotRunning,
    /// A profile or a model is missing, or is of another device, kernel or VM.
    NotMeasured,
    /// Something is in force that has to be put back first, or another rtvirtio is at work.
    InForce,
    /// Nothing is in force that could be kept or shown.
    NotInForce,
    /// More is asked for than there is.
    Infeasible,
    /// Data would be lost, or a device in use be disturbed.
    Guarded,
    /// Settings could not be put back.
    NotPutBack,
    /// The kernel, a file, a VMM or a program refused.
    System,
}

/// Error of a step. The message names the remedy where there is one.
///
/// `{}` shows the outermost message; `{:#}` the whole chain on one line.
pub struct Error {
    kind: Kind,
    /// Messages in front of the source, outermost first.
    context: Vec<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of a step.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a message of its own.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, context: vec![message.into()], source: None }
    }

    /// The user asked to stop.
    #[must_use]
    pub fn cancelled() -> Self {
        Self::new(Kind::Cancelled, "stopped as asked")
    }

    /// Wraps an error of a lower crate.
    pub fn from_source(kind: Kind, source: impl StdError + Send + Sync + 'static) -> Self {
        Self { kind, context: Vec::new(), source: Some(Box::new(source)) }
    }

    /// Kind, on which a caller can act.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The cause of this type, wherever it stands in the chain.
    #[must_use]
    pub fn cause<T: StdError + 'static>(&self) -> Option<&T> {
        let mut next: Option<&(dyn StdError + 'static)> = self.source.as_deref().map(|e| e as _);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref::<T>() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }

    /// Adds a message in front of the others.
    pub(crate) fn within(mut self, context: String) -> Self {
        self.context.insert(0, context);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return f.write_str(&one_line(self));
        }
        f.write_str(&self.context.join(": "))?;
        match &self.source {
            Some(source) if self.context.is_empty() => write!(f, "{source}"),
            _ => Ok(()),
        }
    }
}

/// An error and its causes on one line, each cause once: many errors have their cause in their own
/// message as well.
#[must_use]
pub fn one_line(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self:#}", self.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.source.as_deref()?;
        // Without a message of its own it shows its source's: that one's source comes next.
        if self.context.is_empty() { source.source() } else { Some(source) }
    }
}

/// Conversions of lower crates' errors, each with its kind.
macro_rules! from {
    ($($source:ty => $kind:expr;)*) => { $(
        impl From<$source> for Error {
            fn from(source: $source) -> Self {
                let kind: fn(&$source) -> Kind = $kind;
                Self::from_source(kind(&source), source)
            }
        }
    )* };
}

from! {
    rtvirtio_spec::SpecErrors => |_| Kind::File;
    rtvirtio_domain_config::FileError => |_| Kind::File;
    rtvirtio_twin::ProfileError => |_| Kind::File;
    serde_json::Error => |_| Kind::System;
    std::io::Error => |_| Kind::System;
    std::num::ParseIntError => |_| Kind::Argument;
    std::num::TryFromIntError => |_| Kind::System;
    std::string::FromUtf8Error => |_| Kind::File;
    rustix::io::Errno => |_| Kind::System;
    crate::domain::start::IodError => |_| Kind::System;
    HostError => |_| Kind::System;
    ClaimError => |_| Kind::Guarded;
    rtvirtio_vmm::VmmError => |_| Kind::System;
    rtvirtio_model::ModelError => |_| Kind::NotMeasured;
    rtvirtio_model::learned::ModelFileError => |_| Kind::File;
    rtvirtio_planner::PlanError => |_| Kind::File;
    rtvirtio_planner::neighbours::NeighbourError => |e| match e {
        e if e.is_infeasible() => Kind::Infeasible,
        rtvirtio_planner::neighbours::NeighbourError::Model(_)
        | rtvirtio_planner::neighbours::NeighbourError::NoWrites { .. } => Kind::NotMeasured,
        _ => Kind::Argument,
    };
    rtvirtio_domain_plan::DeviceError => |_| Kind::NotMeasured;
    rtvirtio_measure::http::UrlError => |_| Kind::Argument;
    rtvirtio_cpu::ProfileError => |_| Kind::NotMeasured;
    ApplyError => |e| match e {
        ApplyError::InForce { .. } | ApplyError::Locked { .. } => Kind::InForce,
        ApplyError::Interrupted => Kind::Cancelled,
        _ => Kind::System,
    };
    CpuError => |e| if matches!(e, CpuError::TooMuch { .. }) { Kind::Infeasible } else { Kind::System };
    rtvirtio_urgency_host::UrgencyError => |e| match e {
        rtvirtio_urgency_host::UrgencyError::Taken { .. } => Kind::InForce,
        rtvirtio_urgency_host::UrgencyError::NoDevice { .. } => Kind::NotRunning,
        _ => Kind::System,
    };
    DemandError => |e| if e.is_infeasible() { Kind::Infeasible } else { Kind::NotMeasured };
    MeasureError => |e| if matches!(e, MeasureError::Cancelled) { Kind::Cancelled } else { Kind::System };
    WorkloadError => |e| if e.is_cancelled() { Kind::Cancelled } else { Kind::System };
}

/// Says where an error happened.
pub trait Context<T> {
    /// Adds a message in front.
    fn context(self, message: impl Into<String>) -> Result<T>;

    /// Like [`Context::context`], with a message that is made only on an error.
    fn with_context<S: Into<String>>(self, message: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, message: impl Into<String>) -> Result<T> {
        self.map_err(|e| e.into().within(message.into()))
    }

    fn with_context<S: Into<String>>(self, message: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|e| e.into().within(message().into()))
    }
}

/// A missing value is of kind `NotRunning`.
impl<T> Context<T> for Option<T> {
    fn context(self, message: impl Into<String>) -> Result<T> {
        self.ok_or_else(|| Error::new(Kind::NotRunning, message))
    }

    fn with_context<S: Into<String>>(self, message: impl FnOnce() -> S) -> Result<T> {
        self.ok_or_else(|| Error::new(Kind::NotRunning, message()))
    }
}

/// Returns an error of a kind.
macro_rules! bail {
    ($kind:ident, $($message:tt)*) => {
        return Err($crate::error::Error::new($crate::error::Kind::$kind, format!($($message)*)))
    };
}
pub(crate) use bail;

/// Returns an error of a kind unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $kind:ident, $($message:tt)*) => {
        if !$condition {
            $crate::error::bail!($kind, $($message)*);
        }
    };
}
pub(crate) use ensure;

#[cfg(test)]
mod tests {
    use super::*;

    fn locked() -> Error {
        std::io::Error::from_raw_os_error(13).into()
    }

    #[test]
    fn the_chain_is_shown_once_and_the_cause_is_found() {
        let plain = locked();
        assert_eq!(format!("{plain}"), format!("{plain:#}"));
        assert!(plain.source().is_none());
        let outer = Err::<(), _>(locked()).context("cannot read a").context("vm b").unwrap_err();
        assert_eq!(format!("{outer}"), "vm b: cannot read a");
        assert_eq!(format!("{outer:#}"), format!("vm b: cannot read a: {plain}"));
        assert_eq!(outer.kind(), Kind::System);
        assert!(outer.cause::<std::io::Error>().is_some());
        assert!(outer.cause::<ApplyError>().is_none());
    }

    #[test]
    fn a_cause_that_is_in_the_message_too_is_shown_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot write /x: {source}")]
        struct Twice {
            source: std::io::Error,
        }
        let cause = std::io::Error::from_raw_os_error(13).to_string();
        let error = Error::from_source(Kind::System, Twice { source: std::io::Error::from_raw_os_error(13) });
        let outer = Err::<(), _>(error).context("vm a").unwrap_err();
        assert_eq!(format!("{outer:#}"), format!("vm a: cannot write /x: {cause}"));
        assert_eq!(one_line(&outer), format!("{outer:#}"));
    }

    #[test]
    fn what_is_not_there_does_not_run() {
        assert_eq!(None::<()>.context("no VM").unwrap_err().kind(), Kind::NotRunning);
    }
}
