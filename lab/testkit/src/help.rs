//! Files of the repository that a text names.

use std::path::Path;

/// Directories whose files are in the repository.
const TRACKED: [&str; 4] = ["data/", "docs/", "examples/", "scripts/"];

/// The help of a command and of all below it.
#[must_use]
pub fn help(command: &mut clap::Command) -> String {
    let own = command.render_long_help().to_string();
    command.get_subcommands_mut().fold(own, |text, sub| text + &help(sub))
}

/// The files of the repository that a text names and that do not exist.
#[must_use]
pub fn missing_files(text: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let words = text.split(|c: char| c.is_whitespace() || "`'\"()[],;".contains(c));
    let paths = words.map(|word| word.split('#').next().unwrap_or(word).trim_end_matches(['.', ':']));
    let named = paths.filter(|path| TRACKED.iter().any(|dir| path.starts_with(dir)));
    named.filter(|path| !root.join(path).exists()).map(ToOwned::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_there_is_told_from_one_that_is_not() {
        let text = "see (docs/reference/cli.md#options), `data/README.md`: data/no-such.json. [default: examples/fig7.toml]";
        assert_eq!(missing_files(text), ["data/no-such.json"]);
    }
}
