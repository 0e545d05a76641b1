//! Results that are saved as one file, each with the version of its form.

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A result that is saved as one JSON file.
pub trait Saved: DeserializeOwned {
    /// Version of the form that this program writes and reads.
    const SCHEMA: &str;
}

/// Error of reading a saved result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SavedError {
    /// The file was written by another version.
    #[error(
        "it has form {theirs}, this rtvirtio knows {ours}: measure again, or show it with the version that wrote it"
    )]
    Form {
        /// Form of the file.
        theirs: String,
        /// Form that is known.
        ours: &'static str,
    },
    /// The file is not JSON of this form.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Reads a result.
///
/// # Errors
/// [`SavedError`]; another version is reported as such, not by the first field that differs.
pub fn from_json<T: Saved>(text: &str) -> Result<T, SavedError> {
    #[derive(Deserialize)]
    struct Schema {
        schema: String,
    }
    let Schema { schema } = serde_json::from_str(text)?;
    if schema != T::SCHEMA {
        return Err(SavedError::Form { theirs: schema, ours: T::SCHEMA });
    }
    Ok(serde_json::from_str(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Data {
        #[serde(rename = "schema")]
        _schema: String,
        #[serde(rename = "runs")]
        _runs: Vec<u8>,
    }

    impl Saved for Data {
        const SCHEMA: &str = "rtvirtio-tails/1";
    }

    #[test]
    fn another_version_is_refused_by_its_version() {
        let error = |text: &str| from_json::<Data>(text).unwrap_err().to_string();
        let old = error(r#"{"schema": "rtvirtio-tails/0", "runs": 5}"#);
        assert!(
            old.contains("rtvirtio-tails/0") && old.contains(Data::SCHEMA) && old.contains("again"),
            "{old}"
        );
        assert!(error(r#"{"schema": "rtvirtio-tails/1", "runs": 5}"#).contains("line 1"));
        assert!(error("{}").contains("schema"));
    }
}
