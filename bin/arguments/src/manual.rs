//! Manual pages and shell completions, made by each program from its own arguments: what is
//! installed cannot differ from what the program takes.
//!
//! `PROGRAM --write-manual DIR` writes `DIR/man/PROGRAM.N` and a page for each command, and
//! `DIR/completions/` with files for bash, zsh and fish. Packages call it; `--help` does not show
//! it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// The option, without its value.
const OPTION: &str = "--write-manual";

/// A section of the manual (man-pages(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Section 1: programs for all users.
    User,
    /// Section 8: programs for the administrator.
    Admin,
}

impl Section {
    fn number(self) -> &'static str {
        match self {
            Self::User => "1",
            Self::Admin => "8",
        }
    }
}

/// Writes the manual of `command` when the arguments ask for it: `None` when they do not. `args`
/// are those of the process, with its name.
pub(crate) fn requested(
    command: Command,
    section: Section,
    args: impl IntoIterator<Item = OsString>,
) -> Option<io::Result<()>> {
    let args: Vec<OsString> = args.into_iter().skip(1).collect();
    let [option, dir] = args.as_slice() else { return None };
    (option == OsStr::new(OPTION)).then(|| write_manual(command, section, Path::new(dir)))
}

/// Writes pages and completions below `dir`.
///
/// # Errors
/// When a file cannot be written.
pub fn write_manual(mut command: Command, section: Section, dir: &Path) -> io::Result<()> {
    let (man, completions) = (dir.join("man"), dir.join("completions"));
    fs::create_dir_all(&man)?;
    fs::create_dir_all(&completions)?;
    let name = command.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, &name, &completions)?;
    }
    command.build();
    page(&command, section.number(), &man)
}

/// The page of a command, and those of the commands below it.
fn page(command: &Command, section: &str, dir: &Path) -> io::Result<()> {
    // `rtvirtio iod status` has the page rtvirtio-iod-status(1).
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut text = Vec::new();
    Man::new(command.clone()).title(&name).section(section).render(&mut text)?;
    fs::write(dir.join(format!("{name}.{section}")), text)?;
    let below = command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help");
    below.into_iter().try_for_each(|command| page(command, section, dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command::new("tool")
            .about("Does things")
            .subcommand(Command::new("run").about("Runs it").subcommand(Command::new("fast").about("Fast")))
            .subcommand(Command::new("secret").hide(true))
    }

    #[test]
    fn every_command_has_a_page_but_hidden_ones() {
        let dir = std::env::temp_dir().join(format!("rtvirtio-arguments-{}", std::process::id()));
        let args = ["tool", OPTION, dir.to_str().unwrap()].map(OsString::from);
        requested(command(), Section::User, args).unwrap().unwrap();
        let names = |of: &str| {
            let mut names: Vec<String> = fs::read_dir(dir.join(of))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let (man, completions) = (names("man"), names("completions"));
        let run = fs::read_to_string(dir.join("man/tool-run.1")).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(man, ["tool-run-fast.1", "tool-run.1", "tool.1"]);
        assert_eq!(completions, ["_tool", "tool.bash", "tool.fish"]);
        assert!(run.contains(".TH tool-run 1"), "{run}");
    }

    #[test]
    fn other_arguments_are_the_programs_own() {
        for args in [&["tool"][..], &["tool", "run", "x"], &["tool", OPTION], &["tool", OPTION, "d", "e"]] {
            let args = args.iter().map(OsString::from);
            assert!(requested(command(), Section::User, args).is_none());
        }
    }
}
