//! Units as text in files that people write: `#[serde(with = "rtvirtio_units::as_text")]`.

use std::fmt::Display;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

/// Writes a value with its unit, such as "300ms".
pub fn serialize<T: Display, S: Serializer>(value: &T, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(value)
}

/// Reads what [`serialize`] writes.
///
/// # Errors
/// Another form than text, or text without such a value.
pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(d: D) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}
