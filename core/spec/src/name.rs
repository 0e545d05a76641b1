//! Names of a spec: allowed characters, and the nearest valid name for any text.

/// Longest name of a VM, task, disk or network in characters.
pub const MAX_NAME: usize = 32;

/// Whether a name may contain this character: an ASCII letter or digit, `-`, `_` or `.`. Names
/// become those of directories, cgroups and sections of fio's job files.
#[must_use]
pub fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// Replaces each character that is not allowed in a name by `-`. First character and length are not
/// checked.
#[must_use]
pub fn dashed(text: &str) -> String {
    text.chars().map(|c| if is_name_char(c) { c } else { '-' }).collect()
}

/// Reason why a name is not allowed; `None` for a valid one.
pub(crate) fn name_problem(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("is empty")
    } else if !name.chars().all(is_name_char) {
        Some("has a character other than letters, digits, `-`, `_` and `.`")
    } else if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        Some("does not start with a letter or digit")
    } else if name.len() > MAX_NAME {
        Some("is longer than 32 characters")
    } else {
        None
    }
}

/// A valid name similar to `name`; `None` if there is none.
pub(crate) fn repaired(name: &str) -> Option<String> {
    let dashed = dashed(name);
    let good: String =
        dashed.trim_matches(|c: char| !c.is_ascii_alphanumeric()).chars().take(MAX_NAME).collect();
    name_problem(&good).is_none().then_some(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dash_stands_for_each_character_that_no_name_may_hold() {
        for (text, name) in [("plc-1_a.b", "plc-1_a.b"), ("a b/ü", "a-b--"), ("", ""), ("../x", "..-x")] {
            assert_eq!(dashed(text), name);
            assert!(name.chars().all(is_name_char));
        }
    }
}
