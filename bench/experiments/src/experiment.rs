//! Form of an experiment whose result is one saved file.

use std::path::Path;

use clap::builder::RangedU64ValueParser;
use rtvirtio_measure::HostFacts;
use rtvirtio_workflow::{cpus, kernel_release};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::report::{ExperimentReport, read};
use crate::saved::Saved;

/// Result of an experiment: its file, and what follows from it. What is measured, and how, is each
/// experiment's own.
pub trait Experiment: DeserializeOwned + Serialize {
    /// Version of the file's form that this program writes and reads.
    const FORM: &str;
    /// File name of the result.
    const FILE: &str;
    /// Title of the page.
    const TITLE: &str;

    /// Claims with their limits, and the page with its figures.
    ///
    /// # Errors
    /// When the data cannot be written as JSON.
    fn report(&self) -> anyhow::Result<ExperimentReport>;
}

impl<E: Experiment> Saved for E {
    const SCHEMA: &str = E::FORM;
}

/// The report of a saved result.
///
/// # Errors
/// When the file cannot be read, or is of another form or version.
pub fn report<E: Experiment>(path: &Path) -> anyhow::Result<ExperimentReport> {
    read::<E>(path)?.report()
}

/// Values of an option that counts: 1 and more.
pub(crate) fn from_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// This host, what makes its VMs and their accelerator, and the device.
pub(crate) fn host_facts((vmm, accelerator): (&str, &str), device: impl Into<String>) -> HostFacts {
    HostFacts {
        kernel: kernel_release(),
        cpus: cpus(),
        vmm: vmm.to_owned(),
        accelerator: accelerator.to_owned(),
        device: device.into(),
    }
}
