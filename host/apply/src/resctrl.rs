//! resctrl's own words on a refusal.

use std::io;

use crate::machine::{Fault, HostFiles};
use crate::target::{Form, Target};

/// Below the mount point: the reason for which the last call was refused, else `ok`.
const STATUS: &str = "info/last_cmd_status";

/// Adds the reason that resctrl gives to the error of a write to one of its files.
pub(crate) fn with_status(host: &dyn HostFiles, target: &Target, fault: Fault) -> Fault {
    let file = match &target.form {
        Form::ResctrlTask { mount } => mount,
        Form::ResctrlGroup { .. } | Form::Schemata { .. } | Form::IoAlloc | Form::IoAllocWays => &target.path,
        _ => return fault,
    };
    let status = file.ancestors().find_map(|dir| host.read(&dir.join(STATUS)).ok());
    let status = status.as_deref().map_or("", str::trim);
    if status.is_empty() || status == "ok" {
        return fault;
    }
    let told = |e: io::Error| io::Error::new(e.kind(), format!("{e}; resctrl: {status}"));
    match fault {
        Fault::Gone(e) => Fault::Gone(told(e)),
        Fault::Io(e) => Fault::Io(told(e)),
    }
}
