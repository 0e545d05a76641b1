//! Values with their unit, as in `300ms`, from the text of a key, and defaults that devices and
//! disks share with networks and ports.

use std::fmt::Display;
use std::str::FromStr;

use rtvirtio_sched::Policy;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// Parses a value with its unit.
pub(crate) fn parse_text<'de, T, D>(d: D) -> Result<T, D::Error>
where
    T: FromStr,
    T::Err: Display,
    D: Deserializer<'de>,
{
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

pub(crate) fn parse_optional_text<'de, T, D>(d: D) -> Result<Option<T>, D::Error>
where
    T: FromStr,
    T::Err: Display,
    D: Deserializer<'de>,
{
    parse_text(d).map(Some)
}

pub(crate) fn default_policy() -> Policy {
    Policy::Edf
}

pub(crate) fn default_weight() -> u32 {
    100
}

pub(crate) fn default_true() -> bool {
    true
}
