//! Groups of resctrl that are there: which ways of the L3 cache they have, and whose tasks.

use std::path::Path;

use super::{Resctrl, bad, children, schema};
use crate::{HostError, Root};

/// Control group other than the default one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    /// Name of its directory.
    pub name: String,
    /// Bit mask of its ways of any L3 cache.
    pub ways: u64,
    /// Whether no other group may have these (`mode`: `exclusive`, `pseudo-locked`).
    pub exclusive: bool,
}

impl Resctrl {
    /// Control groups besides the default one. A group that vanishes meanwhile is left out.
    pub fn control_groups(&self, root: &Root) -> Result<Vec<ControlGroup>, HostError> {
        let mut all = Vec::new();
        for dir in children(root, &self.mount)? {
            match self.control_group(root, &dir) {
                Ok(group) => all.push(group),
                Err(e) if e.is_gone() => {}
                Err(e) => return Err(e),
            }
        }
        Ok(all)
    }

    fn control_group(&self, root: &Root, dir: &Path) -> Result<ControlGroup, HostError> {
        let schemata = root.read(dir.join("schemata"))?;
        let mut ways = 0;
        for resource in self.cache.iter().flat_map(|cache| cache.resources()) {
            let values = schema(&schemata, resource, 16).ok_or_else(|| bad(&schemata))?;
            ways |= values.iter().fold(0, |all, (_, mask)| all | mask);
        }
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mode = root.read_optional(dir.join("mode"))?;
        let exclusive = mode.is_some_and(|mode| mode != "shareable");
        Ok(ControlGroup { name, ways, exclusive })
    }

    /// Bit mask of the ways of any L3 cache that devices have by `io_alloc` now.
    pub fn device_ways(&self, root: &Root) -> Result<u64, HostError> {
        if self.cache.as_ref().and_then(|cache| cache.devices) != Some(true) {
            return Ok(0);
        }
        let text = root.read(self.mount.join("info/L3/io_alloc_cbm"))?;
        let values = schema(&format!("L3:{}", text.trim()), "L3", 16).ok_or_else(|| bad(&text))?;
        Ok(values.iter().fold(0, |all, (_, mask)| all | mask))
    }
}

/// Group of a task by `/proc/PID/cpu_resctrl_groups`, as a path below the mount point: `/` is the
/// default group, also where resctrl is not mounted. `None` for a text of another form.
///
/// Form: `res:` with the control group, `/` for the default one, then `mon:` with the monitoring
/// group in it, if any (`proc_resctrl_show()`).
#[must_use]
pub fn task_group(text: &str) -> Option<String> {
    let of = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let control = of("res:")?.trim_start_matches('/');
    Some(match (control, of("mon:")?) {
        ("", "") => "/".to_owned(),
        (control, "") => format!("/{control}"),
        ("", monitor) => format!("/mon_groups/{monitor}"),
        (control, monitor) => format!("/{control}/mon_groups/{monitor}"),
    })
}

/// Values of a resource's line by domain, without the kernel's padding: `0=7ff;1=7ff`. A file
/// without names, such as `io_alloc_cbm`, has the resource `""`. `None` without the line, and for
/// one of another form.
#[must_use]
pub fn line_values(text: &str, resource: &str) -> Option<String> {
    let line = match resource {
        "" => text.trim(),
        _ => text.lines().find_map(|line| line.trim().strip_prefix(resource)?.strip_prefix(':'))?,
    };
    let short = |part: &str| {
        let (domain, value) = part.split_once('=')?;
        let (domain, value) = (domain.trim().parse::<u32>().ok()?, value.trim());
        let is_number = !value.is_empty() && value.chars().all(|c| c.is_ascii_hexdigit());
        let digits = value.trim_start_matches('0').to_lowercase();
        is_number.then(|| format!("{domain}={}", if digits.is_empty() { "0" } else { &digits }))
    };
    let all: Option<Vec<String>> = line.split(';').map(short).collect();
    all.map(|all| all.join(";"))
}
