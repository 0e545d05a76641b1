//! resctrl's own words on a refusal.

use std::io;
use std::path::Path;

use crate::target::{Form, Target};

/// Below the mount point: the reason for which the last call was refused, else `ok`.
const STATUS: &str = "info/last_cmd_status";

/// Reason that resctrl gives for the refusal of a write just now; `None` where it gives none, or
/// the target is not its own.
pub(crate) fn status(target: &Target, read: &dyn Fn(&Path) -> io::Result<String>) -> Option<String> {
    let file = match &target.form {
        Form::ResctrlTask { mount } => mount,
        Form::ResctrlGroup { .. } | Form::Schemata { .. } | Form::IoAlloc | Form::IoAllocWays => &target.path,
        _ => return None,
    };
    let status = file.ancestors().find_map(|dir| read(&dir.join(STATUS)).ok())?;
    Some(status.trim().to_owned()).filter(|status| !status.is_empty() && status != "ok")
}
