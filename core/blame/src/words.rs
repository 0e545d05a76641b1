//! Causes as text.

use crate::Cause;

/// Causes in words, each with its remedy; where none is seen, what could not be read.
#[must_use]
pub fn describe(causes: &[Cause], unread: &[String]) -> String {
    if causes.is_empty() {
        let unread = match unread {
            [] => "no counter shows one".to_owned(),
            unread => format!("not known are {}", unread.join(", ")),
        };
        return format!("cause not seen: {unread}");
    }
    let one = |cause: &Cause| {
        let of_late = |share: f64| format!(" (about {:.0} % of the late requests)", 100.0 * share);
        let share = cause.share.map_or_else(String::new, of_late);
        format!("{}{share}: {}", cause.evidence, cause.remedy)
    };
    let all: Vec<String> = causes.iter().map(one).collect();
    all.join("; also ")
}
