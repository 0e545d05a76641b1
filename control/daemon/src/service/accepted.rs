//! Accepted contracts, stored for the next start of the service.

use std::collections::BTreeSet;
use std::path::Path;

use rtvirtio_kernel::trusted;

/// Name of the file in the state directory.
pub(super) const FILE: &str = "accepted.json";

/// Reads the accepted contracts; an error is the reason why these are not known, and all wait
/// again.
pub(super) fn read(state: &Path) -> Result<BTreeSet<String>, String> {
    let path = state.join(FILE);
    let unread = |why: String| {
        format!("which contracts were accepted is not known, so they wait again: {}: {why}", path.display())
    };
    match trusted::read_config(&path, trusted::CONFIG_LIMIT) {
        Ok(text) => serde_json::from_slice(&text).map_err(|e| unread(e.to_string())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(e) => Err(unread(e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_not_taken_for_none() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        assert_eq!(read(dir.path()), Ok(BTreeSet::new()));
        std::fs::write(dir.path().join(FILE), "[\"plc 1\"]").unwrap();
        assert_eq!(read(dir.path()).unwrap().len(), 1);
        for text in ["", "{", "[1]"] {
            std::fs::write(dir.path().join(FILE), text).unwrap();
            assert!(read(dir.path()).unwrap_err().contains("they wait again"), "{text}");
        }
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        std::fs::create_dir(dir.path().join(FILE)).unwrap();
        assert!(read(dir.path()).is_err());
    }
}
