//! The last verification without our settings in force, with which one under them is compared.

use std::path::PathBuf;

use rtvirtio_apply::StateDir;
use rtvirtio_measure::{ResultFile, Run, TaskResult};
use serde::{Deserialize, Serialize};

use crate::dirs::{Dirs, write_state};
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::files::generated;

/// Its file in the state directory.
pub const FILE: &str = "as-found.json";
/// Version of the file's form.
const SCHEMA: &str = "rtvirtio.as-found.v1";

/// A verification under the settings found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AsFound {
    /// Always `rtvirtio.as-found.v1`.
    pub schema: String,
    /// When, and by which version.
    pub generated: String,
    /// What was measured.
    pub result: ResultFile,
}

/// Keeps a result for later comparison.
///
/// # Errors
/// When the file cannot be written.
pub fn keep(result: &ResultFile, dirs: &Dirs) -> Result<()> {
    let file = AsFound { schema: SCHEMA.to_owned(), generated: generated(), result: result.clone() };
    write_state(&dirs.state, FILE, &serde_json::to_vec_pretty(&file)?)
}

/// The run to compare `now` with: the last one of the same tasks, rates and targets on the same
/// device under the settings found. `None` where there is none.
///
/// # Errors
/// [`Kind::File`] when the file cannot be read.
pub fn comparable(now: &ResultFile, dirs: &Dirs) -> Result<Option<AsFound>> {
    let Some(dir) = StateDir::find(&dirs.state)? else { return Ok(None) };
    let path = path(dirs);
    let text = match dir.read(FILE) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let file: AsFound = serde_json::from_slice(&text)
        .map_err(|e| Error::from_source(Kind::File, e))
        .with_context(|| format!("{} is damaged: remove it", path.display()))?;
    if file.schema != SCHEMA {
        bail!(File, "{} has form {}, this rtvirtio knows {SCHEMA}: remove it", path.display(), file.schema);
    }
    let same_host = file.result.host == now.host;
    let same_tasks = match (file.result.runs.as_slice(), now.runs.as_slice()) {
        ([before], [after]) => asks_the_same(before, after),
        _ => false,
    };
    Ok((same_host && same_tasks).then_some(file))
}

/// Where [`keep`] writes.
#[must_use]
pub fn path(dirs: &Dirs) -> PathBuf {
    dirs.state.join(FILE)
}

fn asks_the_same(a: &Run, b: &Run) -> bool {
    let asked = |t: &TaskResult| (t.vm.clone(), t.task.clone(), t.percentile, t.target_ns, t.declared_rate);
    a.kind == b.kind && a.tasks.iter().map(asked).eq(b.tasks.iter().map(asked))
}

#[cfg(test)]
mod tests {
    use rtvirtio_measure::{HostFacts, RESULT_SCHEMA, VmKind};
    use rtvirtio_units::{Iops, Nanos, Percentile};

    use super::*;

    fn result(target_ms: u64) -> ResultFile {
        let task = TaskResult {
            vm: "a".into(),
            task: "t".into(),
            percentile: Percentile(99.0),
            target_ns: Some(Nanos::from_millis(target_ms)),
            declared_rate: Some(Iops(100.0)),
            achieved_rate: Iops(100.0),
            n: 100,
            p50_ns: Nanos(1),
            p99_ns: Nanos(2),
            p9999_ns: Nanos(3),
            p9999_excl_host_stalls_ns: None,
            p9999_placebo_ns: None,
            at_target_ns: None,
            max_ns: Nanos(3),
            fio_p9999_ns: Nanos(3),
            fio_cpus: 0.0,
            tail: None,
            predicted_ns: None,
            flow: None,
            verdict: None,
            why: String::new(),
        };
        let run = Run {
            scheme: "as-found".into(),
            kind: VmKind::Process,
            seconds: 1.0,
            noise: None,
            disk: None,
            tasks: vec![task],
        };
        let host = HostFacts {
            kernel: "k".into(),
            cpus: 2,
            vmm: "none".into(),
            accelerator: "none".into(),
            device: "loop0".into(),
        };
        ResultFile { schema: RESULT_SCHEMA.to_owned(), host, runs: vec![run] }
    }

    #[test]
    fn only_the_same_question_is_compared() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        assert_eq!(comparable(&result(10), &dirs).unwrap(), None, "nothing is kept");
        assert!(StateDir::open_or_create(&dirs.state).is_ok());
        keep(&result(10), &dirs).unwrap();
        assert_eq!(comparable(&result(10), &dirs).unwrap().unwrap().result, result(10));
        assert_eq!(comparable(&result(11), &dirs).unwrap(), None, "another target");
        let mut elsewhere = result(10);
        elsewhere.host.device = "loop1".into();
        assert_eq!(comparable(&elsewhere, &dirs).unwrap(), None, "another device");
        write_state(&dirs.state, FILE, b"{").unwrap();
        let error = format!("{:#}", comparable(&result(10), &dirs).unwrap_err());
        assert!(error.contains(FILE) && error.contains("remove it"), "{error}");
    }
}
