//! Names of a cluster's properties, as the installed Pacemaker has them.

use std::path::Path;
use std::process::Command;

use super::{ClusterError, output};

/// Directories of Pacemaker's daemons, by distribution.
const DAEMONS: [&str; 3] = ["/usr/lib/pacemaker", "/usr/libexec/pacemaker", "/usr/lib64/pacemaker"];
/// Daemon that describes the properties of fencing.
const SCHEDULER: &str = "pacemaker-schedulerd";

/// First part of the names of the fencing properties: `fencing` from Pacemaker 3.0.2 on, `stonith`
/// before.
pub(super) fn fencing_prefix() -> Result<&'static str, ClusterError> {
    let daemon = DAEMONS.iter().map(|dir| Path::new(dir).join(SCHEDULER)).find(|path| path.is_file());
    let Some(daemon) = daemon else {
        return Err(ClusterError::program(SCHEDULER, std::io::ErrorKind::NotFound.into()));
    };
    let described = output(Command::new(daemon).arg("metadata"), &[SCHEDULER, "metadata"])?;
    prefix_in(&described).ok_or_else(|| ClusterError::Refused {
        command: format!("{SCHEDULER} metadata"),
        said: "it describes no property that enables fencing".to_owned(),
        code: Some(0),
    })
}

/// Prefix in the description of a Pacemaker; the new one where it knows both.
fn prefix_in(described: &str) -> Option<&'static str> {
    let has = |prefix: &&str| described.contains(&format!("<parameter name=\"{prefix}-enabled\""));
    ["fencing", "stonith"].into_iter().find(has)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pacemaker_says_how_it_names_fencing() {
        let described = |names: &[&str]| {
            let parameters = names.iter().map(|name| format!("<parameter name=\"{name}\">\n</parameter>\n"));
            format!("<resource-agent>{}</resource-agent>", parameters.collect::<String>())
        };
        let of = |names: &[&str]| prefix_in(&described(names));
        assert_eq!(of(&["no-quorum-policy", "stonith-enabled", "stonith-action"]), Some("stonith"));
        assert_eq!(of(&["fencing-enabled", "fencing-action"]), Some("fencing"));
        assert_eq!(of(&["stonith-enabled", "fencing-enabled"]), Some("fencing"));
        assert_eq!(of(&["fence-reaction"]), None);
    }

    #[test]
    fn the_pacemaker_of_this_host_is_asked() {
        let test = "the_pacemaker_of_this_host_is_asked";
        if rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::Program("pacemakerd")]) {
            fencing_prefix().unwrap();
        }
    }
}
