//! Warns of settings in cgroups of systemd's units, on cgroup v2, that systemd does not keep:
//! because it could not be told of them, or although it was.

use rtvirtio_apply::{Machine, Unkept, Why, Write, unkept};
use rtvirtio_kernel::Root;

use crate::error::Result;
use crate::guests::GuestAgents;

/// Warning about writes that systemd changes; `None` where there are none.
///
/// # Errors
/// When it cannot be seen whether systemd runs here.
pub fn warning(writes: &[Write], root: &Root) -> Result<Option<String>> {
    Ok(text(&unkept(writes, &Machine::new(root, &GuestAgents))?))
}

fn text(found: &[Unkept]) -> Option<String> {
    let list = |given: bool| {
        let of_kind = found.iter().filter(|f| matches!(f.why, Why::Rounded(_)) == given);
        of_kind.map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    let (lost, rounded) = (list(false), list(true));
    if found.is_empty() {
        return None;
    }
    let mut all = Vec::new();
    if !lost.is_empty() {
        all.push(format!("settings unknown to systemd are lost: {lost}"));
    }
    if !rounded.is_empty() {
        all.push(format!("systemd keeps whole percents: {rounded}"));
    }
    Some(format!(
        "at `systemctl daemon-reload`, which each package installation runs, and at `set-property` of the unit: {}. \
         rtvirtiod sets them again; without it look with `rtvirtio status`",
        all.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::{Form, Target};

    use super::*;

    fn write(path: &str) -> Write {
        Write::new(path, Target::host(path, Form::Plain), "20000 100000")
    }

    fn weight(path: &str) -> Write {
        let form = Form::DeviceWeight { dev: "8:0".to_owned() };
        Write::new(path, Target::host(path, form), "300")
    }

    #[test]
    fn what_a_unit_loses_is_named() {
        let (_dir, root) = crate::fixtures::root();
        let scope = "/sys/fs/cgroup/machine.slice/rtvirtio-test-none.scope";
        let writes = [
            write(&format!("{scope}/cpu.max")),
            weight(&format!("{scope}/io.bfq.weight")),
            weight(&format!("{scope}/io.bfq.weight")),
            // No unit's own.
            write(&format!("{scope}/libvirt/vcpu0/cpu.max")),
            write("/sys/fs/cgroup/plc/cpu.max"),
        ];
        assert_eq!(warning(&writes, &root).unwrap(), None, "no systemd");
        // A systemd that cannot be asked.
        std::fs::create_dir_all(root.at("/run/systemd/system")).unwrap();
        let said = warning(&writes, &root).unwrap().unwrap();
        for file in ["cpu.max", "io.bfq.weight"] {
            let named = format!("{file} of rtvirtio-test-none.scope is lost (");
            assert_eq!(said.matches(&named).count(), 1, "{said}");
        }
        assert_eq!(warning(&writes[3..], &root).unwrap(), None);
    }

    #[test]
    fn what_systemd_rounds_is_named_with_its_value() {
        let found = |why| Unkept { file: "cpu.max".to_owned(), unit: "plc.scope".to_owned(), why };
        let said = text(&[found(Why::Rounded("13000 100000".to_owned()))]).unwrap();
        assert!(said.contains("keeps whole percents: cpu.max of plc.scope becomes `13000 100000`"), "{said}");
        assert!(!said.contains("lost"), "{said}");
        assert_eq!(text(&[]), None);
    }
}
