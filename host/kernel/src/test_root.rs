//! Directory that stands in for a host in unit tests.

use std::fs;
use std::ops::Deref;

use crate::Root;

/// Root directory of a test, removed at its end.
pub(crate) struct TestRoot {
    _dir: tempfile::TempDir,
    root: Root,
}

impl TestRoot {
    /// Root with these files.
    pub(crate) fn new(files: &[(&str, &str)]) -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let new = Self { root: Root::new(dir.path()), _dir: dir };
        files.iter().for_each(|(path, text)| new.put(path, text));
        new
    }

    /// Writes a file, and makes the directories that it needs.
    pub(crate) fn put(&self, path: &str, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Deref for TestRoot {
    type Target = Root;

    fn deref(&self) -> &Root {
        &self.root
    }
}
