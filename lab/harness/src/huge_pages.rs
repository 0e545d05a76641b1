//! Temporary huge pages: their number is restored afterwards, also after `kill -9`.

use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

use anyhow::{Context, bail};
use rtvirtio_kernel::ProcessId;
use serde::{Deserialize, Serialize};

/// Number of huge pages of 2 MiB.
const NUMBER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
/// Record of the added pages and their process, as long as these pages exist.
const RECORD: &str = "/run/rtvirtio-huge-pages.json";

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    by: ProcessId,
    before: u64,
    added: u64,
}

/// Added huge pages; removed on drop.
#[derive(Debug)]
pub struct HugePages {
    files: Files,
    record: Record,
}

/// Paths of the kernel's file and of the record.
#[derive(Clone, Debug)]
struct Files {
    number: PathBuf,
    record: PathBuf,
}

impl Files {
    fn real() -> Self {
        Self { number: NUMBER.into(), record: RECORD.into() }
    }

    fn number(&self) -> anyhow::Result<u64> {
        let text = std::fs::read_to_string(&self.number);
        Ok(text.with_context(|| self.number.display().to_string())?.trim().parse()?)
    }

    fn set(&self, number: u64) -> anyhow::Result<()> {
        let written = std::fs::write(&self.number, number.to_string());
        written.with_context(|| self.number.display().to_string())
    }

    fn read_record(&self) -> anyhow::Result<Option<Record>> {
        let unreadable = || {
            let (record, number) = (self.record.display(), self.number.display());
            format!(
                "{record} says how many huge pages to take away from {number}: do it by hand and remove it"
            )
        };
        match std::fs::read(&self.record) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text).with_context(unreadable)?)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(unreadable),
        }
    }

    /// Records the pages to be removed, unless another process has recorded some.
    fn write_record(&self, record: &Record) -> anyhow::Result<()> {
        let name = || self.record.display().to_string();
        let dir = self.record.parent().with_context(name)?;
        let mut file = tempfile::NamedTempFile::new_in(dir).with_context(name)?;
        file.write_all(&serde_json::to_vec(record)?).with_context(name)?;
        file.persist_noclobber(&self.record).map(drop).map_err(|e| e.error).with_context(name)
    }

    /// Removes added pages that still exist; a smaller number is another program's choice.
    fn remove(&self, record: &Record) -> anyhow::Result<()> {
        let number = self.number()?;
        let ours = number.saturating_sub(record.before).min(record.added);
        if ours > 0 {
            self.set(number - ours)?;
        }
        match std::fs::remove_file(&self.record) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(e).with_context(|| self.record.display().to_string())
            }
            _ => Ok(()),
        }
    }

    fn remove_left(&self) -> anyhow::Result<bool> {
        let Some(record) = self.read_record()?.filter(|record| !record.by.is_alive()) else {
            return Ok(false);
        };
        self.remove(&record)?;
        Ok(true)
    }

    fn reserve(self, pages: u64) -> anyhow::Result<HugePages> {
        self.remove_left()?;
        if let Some(record) = self.read_record()? {
            bail!("process {} measures with huge pages: wait for its end", record.by.pid);
        }
        let before = self.number()?;
        let by = ProcessId::find(std::process::id())?.context("this process")?;
        let record = Record { by, before, added: pages };
        self.write_record(&record)?;
        let reserved = HugePages { files: self, record };
        reserved.files.set(before + pages)?;
        let added = reserved.files.number()?.saturating_sub(before).min(pages);
        if added < pages {
            bail!("{added} of {pages} huge pages of 2 MiB: memory is full or fragmented");
        }
        Ok(reserved)
    }
}

impl HugePages {
    /// Adds this many huge pages.
    ///
    /// # Errors
    /// When the kernel has too few, or another process has added some; the added pages are removed
    /// again.
    pub fn reserve(pages: u64) -> anyhow::Result<Self> {
        Files::real().reserve(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(e) = self.files.remove(&self.record) {
            let added = self.record.added;
            let _ =
                writeln!(std::io::stderr(), "{added} huge pages may remain: {e:#}; run `rtvirtio-lab down`");
        }
    }
}

/// Removes the pages that a killed process has added; whether there were some.
pub fn remove_left() -> anyhow::Result<bool> {
    Files::real().remove_left()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn files(dir: &Path, number: u64) -> Files {
        let files = Files { number: dir.join("nr_hugepages"), record: dir.join("record.json") };
        std::fs::write(&files.number, format!("{number}\n")).unwrap();
        files
    }

    /// A file in place of the kernel's.
    #[test]
    fn huge_pages_are_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path(), 3);
        let reserved = files.clone().reserve(256).unwrap();
        assert_eq!(files.number().unwrap(), 259);
        assert!(!files.remove_left().unwrap(), "its process lives");
        assert!(files.clone().reserve(1).unwrap_err().to_string().contains("wait for its end"));
        // A number that another program has set since is left alone; so are pages that it added.
        files.set(3).unwrap();
        drop(reserved);
        assert_eq!((files.number().unwrap(), files.record.exists()), (3, false));
        let reserved = files.clone().reserve(256).unwrap();
        files.set(300).unwrap();
        drop(reserved);
        assert_eq!((files.number().unwrap(), files.record.exists()), (44, false));
        // A kernel without pages: the number read differs from the number written.
        let null = Files { number: "/dev/null".into(), ..files.clone() };
        assert!(null.reserve(1).is_err() && !files.record.exists());
        let none = Files { number: dir.path().join("none"), ..files.clone() };
        assert!(none.reserve(1).is_err() && !files.record.exists());
    }

    #[test]
    fn what_a_killed_process_has_added_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        // Killed after it added all, some and none.
        for (number, left) in [(10, 4), (7, 4), (4, 4), (2, 2)] {
            let files = files(dir.path(), number);
            let by = ProcessId { pid: std::process::id(), start_time: 1 };
            let record = Record { by, before: 4, added: 6 };
            std::fs::write(&files.record, serde_json::to_vec(&record).unwrap()).unwrap();
            assert!(files.remove_left().unwrap());
            assert_eq!((files.number().unwrap(), files.record.exists()), (left, false));
            assert!(!files.remove_left().unwrap());
        }
    }
}
