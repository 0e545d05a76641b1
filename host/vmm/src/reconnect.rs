//! Option by which a QEMU connects again to a socket whose server was restarted.
//!
//! QEMU has taken `reconnect-ms` since 9.2, and no longer takes `reconnect` (in seconds) since
//! 10.2. The program itself is asked, so versions that a distribution has changed are right too.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rtvirtio_kernel::Root;
use rtvirtio_kernel::check::qemu_program;
use rtvirtio_kernel::child::{Running, read};
use serde_json::Value;

use crate::VmmError;
use crate::wire::Deadline;

/// Time for a start of QEMU without a machine, and its answer; 0.2 s on an idle host.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer in bytes; that of QEMU 7.2 has 3 KiB.
const ANSWER_LIMIT: usize = 1 << 20;
const OPERATION: &str = "query-command-line-options";

/// Key of a socket chardev that a QEMU takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// `reconnect-ms`: QEMU 9.2 and later.
    Milliseconds,
    /// `reconnect`, in whole seconds: QEMU before 10.2.
    Seconds,
}

impl Reconnect {
    /// Shortest useful pause between two tries, as key and value.
    #[must_use]
    pub const fn option(self) -> &'static str {
        match self {
            Self::Milliseconds => "reconnect-ms=20",
            Self::Seconds => "reconnect=1",
        }
    }

    /// Asks a QEMU program which of the two it takes.
    ///
    /// # Errors
    /// When it cannot be started, does not answer in 10 s, or knows neither.
    pub fn of_program(program: &Path) -> Result<Self, VmmError> {
        let answer = ask(program)?;
        let names = parameters(&answer);
        let has = |wanted: &str| names.iter().any(|name| name == wanted);
        if has("reconnect-ms") {
            return Ok(Self::Milliseconds);
        }
        if has("reconnect") {
            return Ok(Self::Seconds);
        }
        Err(VmmError::Protocol {
            peer: program.display().to_string(),
            operation: OPERATION.to_owned(),
            detail: "no chardev with `reconnect-ms` or `reconnect`".to_owned(),
        })
    }

    /// Asks the QEMU of this host; `None` where it has none, or none that answers.
    #[must_use]
    pub fn of_host() -> Option<Self> {
        Self::of_program(&qemu_program(&Root::default())?).ok()
    }
}

/// Output of a QEMU without a machine that was asked for the parameters of chardevs.
fn ask(program: &Path) -> Result<Vec<u8>, VmmError> {
    let peer = || program.display().to_string();
    let failed = |source| VmmError::Io { peer: peer(), operation: OPERATION.to_owned(), source };
    let deadline = Deadline::after(ASK_TIMEOUT);
    let mut command = Command::new(program);
    command.args(["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S"]);
    command.args(["-qmp", "stdio"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = Running::for_call(&mut command).map_err(failed)?;
    let output = read(child.0.stdout.take(), ANSWER_LIMIT).map_err(failed)?;
    // The pipe has room for all of it, so this never waits. A QEMU that has ended closes it.
    if let Some(mut stdin) = child.0.stdin.take() {
        let questions = concat!(
            "{\"execute\":\"qmp_capabilities\"}\n",
            "{\"execute\":\"query-command-line-options\",\"arguments\":{\"option\":\"chardev\"}}\n",
            "{\"execute\":\"quit\"}\n",
        );
        stdin.write_all(questions.as_bytes()).map_err(failed)?;
        let waited =
            || VmmError::Timeout { peer: peer(), operation: OPERATION.to_owned(), waited: ASK_TIMEOUT };
        let left = deadline.left().unwrap_or_default();
        return output.wait(left).ok_or_else(waited)?.and_then(|read| read).map_err(failed);
    }
    Err(failed(io::ErrorKind::BrokenPipe.into()))
}

/// Names of the parameters in QMP's lines.
fn parameters(answer: &[u8]) -> Vec<String> {
    let lines = answer.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok());
    let lists = lines.filter_map(|line: Value| line["return"][0]["parameters"].as_array().cloned());
    lists.flatten().filter_map(|parameter| Some(parameter["name"].as_str()?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Program that answers as QEMU does, with these parameters of a chardev.
    fn answers(dir: &Path, names: &[&str]) -> std::path::PathBuf {
        let parameters: Vec<String> =
            names.iter().map(|name| format!("{{\"name\": \"{name}\", \"type\": \"number\"}}")).collect();
        let text = format!(
            "#!/bin/sh\nread a; read b; read c\ncat <<'END'\n{{\"QMP\": {{\"version\": {{}}}}}}\n{{\"return\": {{}}}}\n\
             {{\"return\": [{{\"parameters\": [{}], \"option\": \"chardev\"}}]}}\n{{\"return\": {{}}}}\nEND\n",
            parameters.join(", ")
        );
        let path = dir.join("qemu");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_qemu_says_which_key_it_takes() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let asked = |names: &[&str]| Reconnect::of_program(&answers(dir.path(), names));
        assert_eq!(asked(&["id", "reconnect"]).unwrap(), Reconnect::Seconds);
        assert_eq!(asked(&["reconnect", "reconnect-ms"]).unwrap(), Reconnect::Milliseconds);
        assert_eq!(asked(&["reconnect-ms"]).unwrap(), Reconnect::Milliseconds);
        assert!(matches!(asked(&["id"]), Err(VmmError::Protocol { .. })));
        assert!(matches!(Reconnect::of_program(&dir.path().join("none")), Err(VmmError::Io { .. })));
    }

    /// The QEMU of this host accepts the option that it has named, and refuses the other one or
    /// takes both.
    #[test]
    fn the_qemu_of_this_host_takes_its_option() {
        const NAME: &str = "the_qemu_of_this_host_takes_its_option";
        let Some(program) = qemu_program(&Root::default()) else {
            return rtvirtio_testkit::skip(NAME, "no QEMU");
        };
        let key = Reconnect::of_program(&program).unwrap();
        // A back end that is not there: QEMU waits for it after it has parsed the line. The option
        // behind it, which no QEMU has, ends the start before.
        let line = format!("socket,id=c,path=/nonexistent/rtvirtio,{}", key.option());
        let output = Command::new(&program)
            .args(["-machine", "none", "-nodefaults", "-display", "none", "-chardev", &line])
            .args(["-object", "rtvirtio-none,id=x"])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("rtvirtio-none"), "{said}");
        assert!(!said.contains("reconnect"), "{said}");
    }
}
