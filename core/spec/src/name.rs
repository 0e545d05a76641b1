//! Names: what they may hold, and the nearest one to any text.

/// Longest name of a VM, task, disk or network in characters.
pub const MAX_NAME: usize = 32;

/// Whether a name may hold this character: a letter or digit of ASCII, `-`, `_` or `.`. Names
/// become those of directories, cgroups and sections of fio's files, hence so few.
#[must_use]
pub fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

/// A text with `-` in place of each character that no name may hold. How it begins and how long it
/// is are left to the caller.
#[must_use]
pub fn dashed(text: &str) -> String {
    text.chars().map(|c| if is_name_char(c) { c } else { '-' }).collect()
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
