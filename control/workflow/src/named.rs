//! Specs that the user of a command names: read from a pipe too, unlike those of a service.

use std::path::Path;

use rtvirtio_kernel::trusted;
use rtvirtio_spec::{HostSpec, MAX_FILE_BYTES};

use crate::error::{Context as _, Result};

/// Reads a spec file.
///
/// # Errors
/// [`rtvirtio_spec::SpecErrors`] with file, line and column.
pub fn load_host(path: &Path) -> Result<HostSpec> {
    Ok(rtvirtio_files::load_spec(path)?)
}

/// Reads a spec file, and returns its bytes too.
pub fn load_host_with_text(path: &Path) -> Result<(HostSpec, Vec<u8>)> {
    Ok(rtvirtio_files::load_spec_with_text(path)?)
}

/// Reads the spec that the user of a command names, which may be a pipe such as `/dev/stdin`.
pub fn named_host(path: &Path) -> Result<HostSpec> {
    if !trusted::is_stream(path) {
        return load_host(path);
    }
    let name = path.display().to_string();
    let bytes = trusted::read_named(path, MAX_FILE_BYTES as u64).with_context(|| name.clone())?;
    Ok(HostSpec::parse_bytes(&name, &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_may_come_by_a_pipe() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let fifo = dir.path().join("spec");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        assert!(load_host(&fifo).is_err(), "a service does not wait for it");
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| named_host(&fifo));
            std::fs::write(&fifo, include_str!("../../../examples/fig7.toml")).unwrap();
            assert_eq!(reading.join().unwrap().unwrap().vms().len(), 3);
        });
        assert!(named_host(Path::new("/dev/zero")).is_err(), "read up to the limit");
    }
}
