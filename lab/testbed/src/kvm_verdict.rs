//! Cache of the result that KVM does not run a guest on this host, for an hour: the probe takes 15
//! s, and a benchmark boots guests many times.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// File name, in the directory of the guest's kernel.
const FILE: &str = "kvm-broken.json";
/// Lifetime of a result: a busy machine may have been too slow for the probe.
const AGE: Duration = Duration::from_secs(3_600);
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Serialize, Deserialize)]
struct Verdict {
    boot_id: String,
    reason: String,
}

fn file(kernel: &Path) -> PathBuf {
    kernel.with_file_name(FILE)
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// Reason for which KVM did not run this kernel, and the file with it, if that was found within the
/// last hour and since the host's boot.
pub(crate) fn recall(kernel: &Path) -> Option<(String, PathBuf)> {
    let file = file(kernel);
    let age = SystemTime::now().duration_since(fs::metadata(&file).ok()?.modified().ok()?).ok()?;
    let verdict: Verdict = serde_json::from_slice(&fs::read(&file).ok()?).ok()?;
    (age < AGE && verdict.boot_id == boot_id().ok()?).then_some((verdict.reason, file))
}

/// Saves the reason. If that fails, the next guest is probed again.
pub(crate) fn remember(kernel: &Path, reason: &str) {
    let Ok(boot_id) = boot_id() else { return };
    let verdict = Verdict { boot_id, reason: reason.to_owned() };
    if let Ok(text) = serde_json::to_vec(&verdict) {
        let _ = rtvirtio_workflow::write_file(&file(kernel), &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_of_this_start_of_the_host_and_of_this_hour() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let kernel = dir.path().join("vmlinuz");
        assert_eq!(recall(&kernel), None);
        remember(&kernel, "it hangs");
        let (reason, file) = recall(&kernel).unwrap();
        assert_eq!(reason, "it hangs");
        let old = SystemTime::now() - AGE - Duration::from_secs(1);
        fs::File::options().write(true).open(&file).unwrap().set_modified(old).unwrap();
        assert_eq!(recall(&kernel), None);
        let text = fs::read_to_string(&file).unwrap();
        for other in [text.replace(&boot_id().unwrap(), "another"), "{".to_owned()] {
            fs::write(&file, other).unwrap();
            assert_eq!(recall(&kernel), None);
        }
    }
}
