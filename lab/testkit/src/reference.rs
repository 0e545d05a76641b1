//! Pages of the reference that are made from a program's arguments: `docs/reference/cli`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;

use clap::{Arg, Command};

use crate::site::project;

/// With this variable set the pages are written instead of compared.
const WRITE: &str = "RTVIRTIO_WRITE_REFERENCE";

/// Compares a program's pages of the reference with its arguments.
///
/// # Panics
/// A page is stale.
pub fn check_reference(command: Command) {
    let reference = project().join("docs/reference");
    let notes = fs::read_to_string(reference.join("json.md")).unwrap();
    let (cli, name) = (reference.join("cli"), command.get_name().to_owned());
    let made = pages(command, &notes);
    if std::env::var_os(WRITE).is_some() {
        let _ = fs::remove_dir_all(cli.join(&name));
        fs::create_dir_all(cli.join(&name)).unwrap();
        made.iter().for_each(|(page, text)| fs::write(cli.join(page), text).unwrap());
    }
    let stale =
        |(page, text): &(&String, &String)| fs::read_to_string(cli.join(page)).ok().as_ref() != Some(*text);
    let stale: Vec<_> = made.iter().filter(stale).map(|(page, _)| page).collect();
    assert!(stale.is_empty(), "stale in docs/reference/cli: {stale:?}; `make reference` writes them");
    let files = fs::read_dir(cli.join(&name)).map_or(0, Iterator::count);
    assert_eq!(files, made.len() - 1, "docs/reference/cli/{name} has another command: `make reference`");
}

/// Address of a heading within its page, as GitHub makes it.
#[must_use]
pub fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Text of each page by its path: of the program, and of each of its commands with those below.
fn pages(mut command: Command, notes: &str) -> BTreeMap<String, String> {
    command.build();
    let name = command.get_name().to_owned();
    let (mut list, mut pages) = (String::new(), BTreeMap::new());
    let above = handed_on(&command);
    for sub in commands(&command) {
        let page = format!("{name}/{}.md", sub.get_name());
        rows(sub, &page, &mut list);
        let mut text = String::new();
        section(sub, "#", notes, &above, &mut text);
        let _ = write!(text, "\n[All commands, and the options that every one has](../{name}.md)\n");
        pages.insert(page, text);
    }
    let mut text = String::new();
    describe(&command, "#", notes, &above, &mut text);
    let global: Vec<&Arg> = command.get_arguments().filter(|a| a.is_global_set() && is_shown(a)).collect();
    if !global.is_empty() {
        let _ = write!(text, "\nOptions of every command:\n\n{}", table(&global));
    }
    if !list.is_empty() {
        let _ = write!(text, "\n| command | |\n|---|---|\n{list}");
    }
    pages.insert(format!("{name}.md"), text);
    pages
}

fn commands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
}

fn full_name(command: &Command) -> &str {
    command.get_bin_name().unwrap_or_else(|| command.get_name())
}

/// A row for a command and each below it.
fn rows(command: &Command, page: &str, list: &mut String) {
    let (name, about) = (full_name(command), command.get_about().map(ToString::to_string));
    let about = cell(&about.unwrap_or_default());
    let _ = writeln!(list, "| [`{name}`]({page}#{}) | {about} |", anchor(name));
    commands(command).for_each(|sub| rows(sub, page, list));
}

/// Options of a command that each command below it has too.
fn handed_on(command: &Command) -> BTreeSet<String> {
    command.get_arguments().filter(|arg| arg.is_global_set()).map(|arg| arg.get_id().to_string()).collect()
}

/// A section for a command and each below it; options from `above` are shown there.
fn section(command: &Command, level: &str, notes: &str, above: &BTreeSet<String>, text: &mut String) {
    describe(command, level, notes, above, text);
    let shown = handed_on(command);
    for sub in commands(command) {
        text.push('\n');
        section(sub, "##", notes, &shown, text);
    }
}

/// Purpose, usage, options and examples of one command.
fn describe(command: &Command, level: &str, notes: &str, above: &BTreeSet<String>, text: &mut String) {
    let name = full_name(command);
    let _ = writeln!(text, "{level} {name}");
    if level == "#" {
        text.push_str("\n<!-- Made from the program's arguments: make reference -->\n");
    }
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        let _ = write!(text, "\n{about}\n");
    }
    let usage = command.clone().render_usage().to_string();
    let lines = usage.trim_start_matches("Usage: ").lines().map(str::trim);
    let _ = write!(text, "\n```sh\n{}\n```\n", lines.collect::<Vec<_>>().join("\n"));
    if notes.lines().any(|line| line.strip_prefix("## ") == Some(name)) {
        let up = if name.contains(' ') { "../.." } else { ".." };
        let _ = write!(text, "\nWhat it does and prints: [json.md]({up}/json.md#{}).\n", anchor(name));
    }
    let own = |arg: &&Arg| is_shown(arg) && !above.contains(arg.get_id().as_str());
    let mut args: Vec<&Arg> = command.get_arguments().filter(own).collect();
    args.sort_by_key(|arg| !arg.is_positional());
    if !args.is_empty() {
        let _ = write!(text, "\n{}", table(&args));
    }
    if let Some(after) = command.get_after_long_help().or_else(|| command.get_after_help()) {
        examples(&after.to_string(), text);
    }
}

fn is_shown(arg: &Arg) -> bool {
    !arg.is_hide_set() && !["help", "version"].contains(&arg.get_id().as_str())
}

fn table(args: &[&Arg]) -> String {
    let row = |arg: &&Arg| format!("| {} | {} |\n", written(arg), meaning(arg));
    format!("| argument | meaning |\n|---|---|\n{}", args.iter().map(row).collect::<String>())
}

/// An argument as it is written in a command line.
fn written(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let names = names.iter().map(|name| format!("<{name}>")).collect::<Vec<_>>().join(" ");
    let value = match arg.get_num_args().filter(|n| n.takes_values()) {
        None => String::new(),
        Some(_) if arg.is_positional() => names,
        Some(n) => match (n.min_values() == 0, arg.is_require_equals_set()) {
            (true, true) => format!("[={names}]"),
            (true, false) => format!(" [{names}]"),
            (false, true) => format!("={names}"),
            (false, false) => format!(" {names}"),
        },
    };
    let long = arg.get_long().map_or_else(String::new, |long| format!("--{long}"));
    let short = arg.get_short().map_or_else(String::new, |short| format!("`-{short}`, "));
    format!("{short}`{}`", cell(&format!("{long}{value}")))
}

/// Help of an argument, its values, default and variable.
fn meaning(arg: &Arg) -> String {
    let mut text =
        arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    if !text.ends_with('.') {
        text.push('.');
    }
    let values = arg.get_possible_values();
    let takes = arg.get_num_args().is_some_and(|n| n.takes_values());
    let values: Vec<_> = values.iter().filter(|value| takes && !value.is_hide_set()).collect();
    for (i, value) in values.iter().enumerate() {
        let about = value.get_help().map(|help| format!(" ({help})")).unwrap_or_default();
        let _ = write!(text, "{}`{}`{about}", if i == 0 { " Values: " } else { ", " }, value.get_name());
    }
    if !values.is_empty() {
        text.push('.');
    }
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes && !defaults.is_empty() {
        let _ = write!(text, " Default `{}`.", defaults.join(","));
    }
    if let Some(variable) = arg.get_env() {
        let _ = write!(text, " Variable `{}`.", variable.to_string_lossy());
    }
    cell(&text)
}

/// Text in one cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Indented lines are code, the others text.
fn examples(after: &str, text: &mut String) {
    let is_code = |line: &str| line.starts_with("  ");
    let lines: Vec<&str> = after.lines().filter(|line| *line != "EXAMPLES").collect();
    for part in lines.chunk_by(|a, b| is_code(a) == is_code(b) && a.is_empty() == b.is_empty()) {
        if is_code(part[0]) {
            let code: String = part.iter().map(|line| format!("{}\n", &line[2..])).collect();
            let _ = write!(text, "\n```sh\n{code}```\n");
        } else if !part[0].is_empty() {
            let _ = write!(text, "\n{}\n", part.join("\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_commands_usage_options_and_examples() {
        let run = Command::new("run")
            .subcommand(Command::new("below"))
            .args_conflicts_with_subcommands(true)
            .about("Runs it")
            .after_help("EXAMPLES\n  tool run x\n\nIt ends by itself.")
            .arg(Arg::new("file").value_name("A|B").required(true).help("A file"))
            .arg(
                Arg::new("for")
                    .long("for")
                    .short('f')
                    .value_name("TIME")
                    .default_value("1s")
                    .help("How long"),
            )
            .arg(Arg::new("secret").long("secret").hide(true))
            .arg(Arg::new("dir").long("dir").value_name("DIR").global(true).help("Where"))
            .arg(
                Arg::new("form")
                    .long("form")
                    .value_name("N")
                    .num_args(0..=1)
                    .require_equals(true)
                    .help("Form"),
            );
        let json =
            Arg::new("json").long("json").global(true).action(clap::ArgAction::SetTrue).help("As JSON");
        let hidden = Command::new("hidden").hide(true);
        let tool = Command::new("tool").about("Does things").arg(json).subcommands([run, hidden]);
        let made = pages(tool, "## tool run\n");
        let program = "\
# tool

<!-- Made from the program's arguments: make reference -->

Does things

```sh
tool [OPTIONS] [COMMAND]
```

Options of every command:

| argument | meaning |
|---|---|
| `--json` | As JSON. |

| command | |
|---|---|
| [`tool run`](tool/run.md#tool-run) | Runs it |
| [`tool run below`](tool/run.md#tool-run-below) |  |
";
        let command = "\
# tool run

<!-- Made from the program's arguments: make reference -->

Runs it

```sh
tool run [OPTIONS] <A|B>
tool run <COMMAND>
```

What it does and prints: [json.md](../../json.md#tool-run).

| argument | meaning |
|---|---|
| `<A\\|B>` | A file. |
| `-f`, `--for <TIME>` | How long. Default `1s`. |
| `--dir <DIR>` | Where. |
| `--form[=<N>]` | Form. |

```sh
tool run x
```

It ends by itself.

## tool run below

```sh
tool run below [OPTIONS]
```

[All commands, and the options that every one has](../tool.md)
";
        let expected = [("tool.md", program), ("tool/run.md", command)];
        assert_eq!(made, BTreeMap::from(expected.map(|(page, text)| (page.to_owned(), text.to_owned()))));
    }

    #[test]
    fn an_anchor_is_that_of_the_heading() {
        assert_eq!(anchor("rtvirtio.plan.v2"), "rtvirtioplanv2");
        assert_eq!(anchor("What a spec needs"), "what-a-spec-needs");
    }
}
