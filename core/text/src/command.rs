//! Names within commands that are printed for the user to run.

use std::borrow::Cow;
use std::path::Path;

/// An argument in a POSIX shell's command line: quoted where it needs to be, else as it is.
#[must_use]
pub fn shell_word(word: &str) -> Cow<'_, str> {
    // Option lists stay readable: behind a command's name `=` and `,` mean nothing to a shell.
    if !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "+-./:=@_,".contains(c)) {
        return Cow::Borrowed(word);
    }
    // Only a NUL can fail, and no argument of a process holds one.
    shlex::Quoter::new().allow_nul(true).quote(word).unwrap_or(Cow::Borrowed("''"))
}

/// A path as a word of a command line; one that begins with a dash is made no option by `./`.
#[must_use]
pub fn shell_path(path: &Path) -> String {
    let path = path.to_string_lossy();
    let prefix = if path.starts_with('-') { "./" } else { "" };
    shell_word(&format!("{prefix}{path}")).into_owned()
}

/// A positional argument that also has an option's form (`--domain`), which is used where the
/// value would be read as an option itself.
#[must_use]
pub fn shell_argument(option: &str, value: &str) -> String {
    let word = shell_word(value);
    if value.starts_with('-') { format!("{option} {word}") } else { word.into_owned() }
}

/// A value in a comma-separated option list of QEMU, in which a comma is doubled
/// (`qemu(1)`, "Device URL syntax" and `-drive`).
#[must_use]
pub fn qemu_value(value: &str) -> Cow<'_, str> {
    if value.contains(',') { Cow::Owned(value.replace(',', ",,")) } else { Cow::Borrowed(value) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const NAMES: [&str; 9] = [
        "plc",
        "Home Assistant (prod)",
        "a b$(touch x)",
        "it's",
        "`id`",
        "--help",
        "",
        "two\nlines",
        "back\\slash\"and!",
    ];

    #[test]
    fn a_shell_reads_each_name_as_one_word() {
        for name in NAMES {
            let script = format!("printf '%s|' {}", shell_word(name));
            let read = Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(read.stdout).unwrap(), format!("{name}|"), "{script}");
        }
    }

    #[test]
    fn usual_names_stay_as_they_are() {
        assert_eq!(shell_word("plc-1.2_3"), "plc-1.2_3");
        assert_eq!(shell_word("socket,id=c0,path=/run/plc.sock"), "socket,id=c0,path=/run/plc.sock");
        assert_eq!(shell_path(Path::new("/etc/rtvirtio/plc.toml")), "/etc/rtvirtio/plc.toml");
        assert_eq!(shell_argument("--domain", "plc"), "plc");
    }

    #[test]
    fn a_name_is_no_option() {
        assert_eq!(shell_argument("--domain", "--help"), "--domain --help");
        assert_eq!(shell_path(Path::new("-o")), "./-o");
    }

    #[test]
    fn commas_are_doubled_for_qemu() {
        assert_eq!(qemu_value("/run/a,b & c"), "/run/a,,b & c");
        assert_eq!(qemu_value("/run/plc.sock"), "/run/plc.sock");
    }
}
