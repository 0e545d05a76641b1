//! File names in `query-block`: plain paths, or whole block nodes as `json:{...}`, where there are
//! filters or options, such as an offset.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// Largest depth of nodes in a JSON filename.
const MOST_NODES: usize = 64;

/// File and throttle groups in the filename of a drive.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockNode {
    pub(crate) file: Option<PathBuf>,
    pub(crate) groups: Vec<String>,
}

impl BlockNode {
    /// Parses a plain path, or QEMU's `json:{...}`.
    pub(crate) fn parse(filename: &str) -> Self {
        let Some(text) = filename.strip_prefix("json:") else {
            let file = (!filename.is_empty() && !filename.contains("://")).then(|| PathBuf::from(filename));
            return Self { file, groups: Vec::new() };
        };
        let mut found = Self::default();
        let whole: Value = serde_json::from_str(text).unwrap_or_default();
        let mut node = &whole;
        for _ in 0..MOST_NODES {
            let text = |key: &str| node.get(key).and_then(Value::as_str);
            found.groups.extend(text("throttle-group").map(str::to_owned));
            if let Some(file) = text("filename") {
                found.file = Some(Path::new(file).to_owned());
            }
            // Both are forms of QEMU's: an object, or dotted keys of a flattened one.
            if let Some(file) = text("file.filename").or_else(|| text("file.file.filename")) {
                found.file = Some(Path::new(file).to_owned());
            }
            match node.get("file") {
                Some(below) => node = below,
                None => break,
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filename_shows_the_file_and_the_groups() {
        let of = |text: &str| BlockNode::parse(text);
        assert_eq!(of("/vm/a.img"), BlockNode { file: Some("/vm/a.img".into()), groups: vec![] });
        assert_eq!(of(""), BlockNode::default());
        assert_eq!(of("nbd://host/x"), BlockNode::default());
        assert_eq!(of("json:{\"driver\": [1"), BlockNode::default());
        let nested = r#"json:{"throttle-group": "tg0", "driver": "throttle", "file": {"driver": "raw", "file": {"driver": "file", "filename": "/b.img"}}}"#;
        assert_eq!(of(nested), BlockNode { file: Some("/b.img".into()), groups: vec!["tg0".to_owned()] });
        let deep = format!("json:{}{{}}{}", r#"{"file":"#.repeat(100), "}".repeat(100));
        assert_eq!(of(&deep), BlockNode::default());
    }
}
