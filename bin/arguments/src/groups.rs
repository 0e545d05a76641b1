//! Commands of a program under headings in its `--help`, by what a user wants to do.

use clap::Command;

/// Heading, and the commands below it.
pub type Group = (&'static str, &'static [&'static str]);

/// Width of the list of commands in columns.
const WIDTH: usize = 80;

/// Lists the commands in the help under their headings. A command in no group stands below the
/// last.
pub(crate) fn grouped(command: Command, groups: &[Group]) -> Command {
    let visible: Vec<&Command> = command.get_subcommands().filter(|c| !c.is_hide_set()).collect();
    let indent = visible.iter().map(|c| c.get_name().len()).max().unwrap_or(0) + 4;
    let entry = |command: &&Command| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let name = format!("  {:<1$}", command.get_name(), indent - 2);
        format!("{name}{}\n", wrapped(&about, indent))
    };
    let mut list = String::new();
    for (heading, names) in groups {
        let of_group = names.iter().filter_map(|name| visible.iter().find(|c| c.get_name() == *name));
        list.push_str(&format!("{heading}:\n{}\n", of_group.map(entry).collect::<String>()));
    }
    let others = visible.iter().filter(|c| groups.iter().all(|(_, names)| !names.contains(&c.get_name())));
    let others: String = others.map(entry).collect();
    if !others.is_empty() {
        list.push_str(&format!("Others:\n{others}\n"));
    }
    // Braces of a template are its own.
    let list = list.replace(['{', '}'], "");
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"
    ))
}

/// Text whose lines after the first begin at a column.
fn wrapped(text: &str, indent: usize) -> String {
    let (mut out, mut column) = (String::new(), indent);
    for word in text.split_whitespace() {
        if column > indent && column + 1 + word.len() > WIDTH {
            out.push_str(&format!("\n{:indent$}", ""));
            column = indent;
        } else if column > indent {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += word.len();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_stand_under_their_headings_and_none_is_lost() {
        let long =
            "Does a thing whose description is too long for one line of eighty columns, so that it goes on";
        let command = Command::new("tool")
            .about("Does things")
            .subcommand(Command::new("run").about("Runs it"))
            .subcommand(Command::new("stop").about(long))
            .subcommand(Command::new("look").about("Looks"))
            .subcommand(Command::new("secret").hide(true));
        let groups: &[Group] = &[("Look", &["look"]), ("Act", &["run", "secret"])];
        let help = grouped(command, groups).render_help().to_string();
        let list = "Look:\n  look  Looks\n\nAct:\n  run   Runs it\n\nOthers:\n  stop  Does a thing whose description is too \
                    long for one line of eighty\n        columns, so that it goes on\n\nOptions:\n";
        assert!(help.contains(list), "{help}");
        assert!(help.starts_with("Does things\n\nUsage: tool") && !help.contains("secret"), "{help}");
    }
}
