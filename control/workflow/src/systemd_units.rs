//! Settings in cgroups that belong to units of systemd, on cgroup v2: what it writes there by
//! itself, and so takes away.
//!
//! Seen with systemd 252: `systemctl daemon-reload` puts `cpu.max` of running units and scopes back
//! to `max` and removes the lines of devices from `io.bfq.weight`; `io.max` stays. `set-property`
//! of any property of a unit does the same for that unit, also with systemd 257.

use std::ffi::OsStr;
use std::path::Path;

use rtvirtio_apply::{Place, Write};
use rtvirtio_kernel::Root;

use crate::error::Result;

/// The directory that says that systemd is the init (`sd_booted(3)`).
const BOOTED: &str = "/run/systemd/system";
/// Files of a unit that systemd writes anew.
const FILES: [&str; 2] = ["cpu.max", "io.bfq.weight"];

/// The unit whose own cgroup a file is in.
fn unit(file: &Path) -> Option<&str> {
    let dir = file.parent()?;
    let kinds = ["scope", "service", "slice"];
    let is_unit = dir.extension().is_some_and(|e| kinds.iter().any(|kind| e == OsStr::new(kind)));
    dir.file_name().filter(|_| is_unit)?.to_str()
}

/// What is to be said of writes that systemd takes away; `None` where there are none.
///
/// # Errors
/// When it cannot be seen whether systemd runs here.
pub fn warning(writes: &[Write], root: &Root) -> Result<Option<String>> {
    if !root.exists(BOOTED)? {
        return Ok(None);
    }
    let mut found: Vec<String> = Vec::new();
    for write in writes.iter().filter(|write| write.target.place == Place::Host) {
        let file = write.target.path.file_name().and_then(OsStr::to_str);
        let Some(file) = file.filter(|name| FILES.contains(name)) else { continue };
        let Some(unit) = unit(&write.target.path) else { continue };
        let of = format!("{file} of {unit}");
        if !found.contains(&of) {
            found.push(of);
        }
    }
    Ok((!found.is_empty()).then(|| {
        format!(
            "systemd takes these away at `systemctl daemon-reload`, which each package installation runs, and at \
             `set-property` of the unit: {}. rtvirtiod sets them again; without it look with `rtvirtio status`",
            found.join(", ")
        )
    }))
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::{Form, Target};

    use super::*;

    fn write(path: &str) -> Write {
        let target = Target { place: Place::Host, path: path.into(), form: Form::Plain };
        Write::new(path, target, "20000 100000")
    }

    #[test]
    fn what_a_unit_loses_is_named() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let scope = "/sys/fs/cgroup/machine.slice/machine-qemu-1.scope";
        let writes = [
            write(&format!("{scope}/cpu.max")),
            write(&format!("{scope}/io.bfq.weight")),
            write(&format!("{scope}/io.bfq.weight")),
            // These stay.
            write(&format!("{scope}/io.max")),
            write(&format!("{scope}/libvirt/vcpu0/cpu.max")),
            write("/sys/fs/cgroup/plc/cpu.max"),
        ];
        assert_eq!(warning(&writes, &root).unwrap(), None, "no systemd");
        std::fs::create_dir_all(root.at(BOOTED)).unwrap();
        let said = warning(&writes, &root).unwrap().unwrap();
        let named = "cpu.max of machine-qemu-1.scope, io.bfq.weight of machine-qemu-1.scope.";
        assert!(said.contains(named), "{said}");
        assert_eq!(warning(&writes[3..], &root).unwrap(), None);
    }
}
