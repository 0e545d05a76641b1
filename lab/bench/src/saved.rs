//! Results that are saved as one file: each knows the version of its form.

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A result that is saved as one JSON file.
pub trait Saved: DeserializeOwned {
    /// Version of the form that this program writes and reads.
    const FORM: &str;
}

/// Why a saved result cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SavedError {
    /// Another version wrote it.
    #[error(
        "it has form {theirs}, this rtvirtio knows {ours}: measure again, or show it with the version that wrote it"
    )]
    Form {
        /// Form of the file.
        theirs: String,
        /// Form that is known.
        ours: &'static str,
    },
    /// Not what it should be.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Reads a result.
///
/// # Errors
/// [`SavedError`]; another version is told as that, not as the first field that differs.
pub fn from_json<T: Saved>(text: &str) -> Result<T, SavedError> {
    #[derive(Deserialize)]
    struct Schema {
        schema: String,
    }
    let Schema { schema } = serde_json::from_str(text)?;
    if schema != T::FORM {
        return Err(SavedError::Form { theirs: schema, ours: T::FORM });
    }
    Ok(serde_json::from_str(text)?)
}

macro_rules! saved {
    ($($kind:ty),+ $(,)?) => { $(impl Saved for $kind { const FORM: &str = <$kind>::SCHEMA; })+ };
}

saved!(
    crate::iod_crash::CrashData,
    crate::cyclictest::CyclictestData,
    crate::iod::IodData,
    crate::planning::Planning,
    crate::reservation::ReservationData,
    crate::iod_startup::StartupData,
    crate::tails::TailsData,
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tails::TailsData;

    #[test]
    fn another_version_is_refused_by_its_version() {
        let told = |text: &str| from_json::<TailsData>(text).unwrap_err().to_string();
        let old = told(r#"{"schema": "rtvirtio-tails/0", "runs": 5}"#);
        assert!(
            old.contains("rtvirtio-tails/0") && old.contains(TailsData::SCHEMA) && old.contains("again"),
            "{old}"
        );
        assert!(told(r#"{"schema": "rtvirtio-tails/1", "runs": 5}"#).contains("line 1"));
        assert!(told("{}").contains("schema"));
    }
}
