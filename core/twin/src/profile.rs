//! A twin's profile: the declared service-time model, read from TOML.

use std::io;
use std::str::FromStr;

use rtvirtio_units::{Bytes, BytesPerSec, Nanos, Ratio};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// Profiles that come with rtvirtio: name and TOML text.
const BUILT_IN: [(&str, &str); 4] = [
    ("qlc-nvme", include_str!("../profiles/qlc-nvme.toml")),
    ("emmc", include_str!("../profiles/emmc.toml")),
    ("microsd", include_str!("../profiles/microsd.toml")),
    ("disk-1.8in", include_str!("../profiles/disk-1.8in.toml")),
];

/// Declared service-time model of an emulated device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwinProfile {
    /// The kind of device that is emulated, in one line.
    pub description: String,
    /// Requests served at once, 1 to 64.
    pub channels: u32,
    /// Service time of reads.
    pub read: Timing,
    /// Service time of writes, before cache and garbage collection.
    pub write: Timing,
    /// Service times are stretched by up to this share, uniformly.
    #[serde(default, deserialize_with = "text")]
    pub jitter: Ratio,
    pub write_cache: Option<WriteCache>,
    /// Stalls by garbage collection, if any.
    pub garbage_collection: Option<GarbageCollection>,
    /// A disk arm, if any.
    pub arm: Option<Arm>,
}

/// Service time of one direction: `base + bytes * per_byte_ns`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Time of a request before its first byte.
    #[serde(deserialize_with = "text")]
    pub base: Nanos,
    /// Nanoseconds per byte: 1 is 1 GB/s.
    pub per_byte_ns: f64,
}

/// A write cache that drains to the medium at a constant rate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteCache {
    /// Bytes that the cache holds.
    #[serde(deserialize_with = "text")]
    pub size: Bytes,
    /// Rate at which it drains.
    #[serde(deserialize_with = "text")]
    pub drain: BytesPerSec,
}

/// A stall of all channels after so many bytes written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GarbageCollection {
    /// Bytes written between two stalls.
    #[serde(deserialize_with = "text")]
    pub every: Bytes,
    /// Length of a stall.
    #[serde(deserialize_with = "text")]
    pub pause: Nanos,
}

/// A disk arm over a turning platter.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// Seek time over the shortest distance.
    #[serde(deserialize_with = "text")]
    pub settle: Nanos,
    /// Mean seek time between uniformly random positions.
    #[serde(deserialize_with = "text")]
    pub average_seek: Nanos,
    /// Time of one revolution of the platter.
    #[serde(deserialize_with = "text")]
    pub revolution: Nanos,
}

/// Errors of loading a twin profile.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// Neither a built-in name nor a readable file.
    #[error(
        "twin profile \"{name}\": no built-in of this name (there are {known}) and no such file: {source}"
    )]
    Unknown {
        /// Name or path as given.
        name: String,
        /// Built-in names, separated by commas.
        known: String,
        /// Error of opening or reading the file.
        source: io::Error,
    },
    /// The text is not a profile.
    #[error("twin profile \"{name}\": {message}")]
    Invalid {
        /// Name or path as given.
        name: String,
        /// The fault, with the line where known.
        message: String,
    },
}

impl ProfileError {
    /// Error of a name that is not built in, and of no file that could be read: `source`.
    #[must_use]
    pub fn unknown(name: &str, source: io::Error) -> Self {
        let known = TwinProfile::built_in_names().join(", ");
        Self::Unknown { name: name.to_owned(), known, source }
    }
}

impl TwinProfile {
    /// Finds a built-in profile by its name.
    pub fn built_in(name: &str) -> Result<Self, ProfileError> {
        let Some((_, text)) = BUILT_IN.iter().find(|(n, _)| *n == name) else {
            return Err(ProfileError::unknown(name, io::ErrorKind::NotFound.into()));
        };
        Self::parse(name, text)
    }

    #[must_use]
    pub fn built_in_names() -> Vec<&'static str> {
        BUILT_IN.iter().map(|(n, _)| *n).collect()
    }

    /// Reads and checks a profile's text.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let invalid = |message: String| ProfileError::Invalid { name: name.to_owned(), message };
        let profile: Self = toml::from_str(text).map_err(|e| invalid(e.to_string()))?;
        profile.check().map_err(invalid)?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), String> {
        if !(1..=64).contains(&self.channels) {
            return Err(format!("channels = {}: must be 1 to 64", self.channels));
        }
        for (what, t) in [("read", &self.read), ("write", &self.write)] {
            if !(t.per_byte_ns.is_finite() && t.per_byte_ns >= 0.0) {
                return Err(format!("{what}.per_byte_ns = {}: must be 0 or more", t.per_byte_ns));
            }
            if t.base.0 > 10_000_000_000 {
                return Err(format!("{what}.base = {}: must be at most 10s", t.base));
            }
        }
        if let Some(cache) = &self.write_cache {
            if cache.size.0 == 0 || cache.drain.0 <= 0.0 {
                return Err("write_cache: size and drain must be above zero".to_owned());
            }
        }
        if let Some(gc) = &self.garbage_collection {
            if gc.every.0 == 0 {
                return Err("garbage_collection.every must be above zero".to_owned());
            }
        }
        if let Some(arm) = &self.arm {
            if arm.settle > arm.average_seek {
                return Err("arm.settle must not exceed arm.average_seek".to_owned());
            }
        }
        Ok(())
    }
}

/// A value with its unit in the text, such as "60us".
fn text<'de, T, D>(d: D) -> Result<T, D::Error>
where
    T: FromStr,
    T::Err: std::fmt::Display,
    D: Deserializer<'de>,
{
    let s = String::deserialize(d)?;
    s.parse().map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_is_valid() {
        for name in TwinProfile::built_in_names() {
            TwinProfile::built_in(name).unwrap();
        }
    }

    #[test]
    fn peak_read_rates_are_those_of_the_papers() {
        // vm-storage-responsiveness, Table 1: 70, 16 and 10 MB/s. The peak is the sequential rate
        // at 128 KiB.
        for (name, peak) in [("emmc", 70e6), ("microsd", 16e6), ("disk-1.8in", 10e6)] {
            let p = TwinProfile::built_in(name).unwrap();
            let seconds = crate::mean_service(&p, crate::Access::Read, 131_072).as_secs_f64();
            let rate = f64::from(p.channels) * 131_072.0 / seconds;
            assert!((rate / peak - 1.0).abs() < 0.05, "{name}: {rate}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let e = TwinProfile::built_in("qlc").unwrap_err().to_string();
        assert!(e.contains("qlc-nvme") && e.contains("no such file"), "{e}");
        let bad = "description='x'\nchannels=0\nread={base='1us',per_byte_ns=1.0}\nwrite={base='1us',per_byte_ns=1.0}";
        assert!(TwinProfile::parse("x", bad).unwrap_err().to_string().contains("channels"));
        let unit = bad.replace("base='1us'", "base='1'").replace("channels=0", "channels=1");
        assert!(TwinProfile::parse("x", &unit).unwrap_err().to_string().contains("has no unit"));
    }
}
