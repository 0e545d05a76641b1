//! Names of variants, as clients of the interface see them.

use serde::Serialize;

/// Name of a variant without fields, as in JSON.
#[must_use]
pub fn word(value: &impl Serialize) -> String {
    // Plain data: it cannot fail.
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}
