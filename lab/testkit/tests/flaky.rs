//! `scripts/retry_failed.sh` on the log of a real `cargo test`.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use rtvirtio_testkit::site;

/// One program that fails at its first run, one that always fails, one that passes.
fn package(dir: &Path) {
    let file = |name: &str, text: &str| fs::write(dir.join(name), text).unwrap();
    fs::create_dir_all(dir.join("src")).unwrap();
    fs::create_dir_all(dir.join("tests")).unwrap();
    file("Cargo.toml", "[package]\nname = \"flaky\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n");
    file("src/lib.rs", "");
    let once = "#[test]\nfn second_time() {\n    let mark = std::path::Path::new(\"mark\");\n    \
                let is_second = mark.exists();\n    std::fs::write(mark, \"\").unwrap();\n    \
                assert!(is_second);\n}\n#[test]\nfn steady() {}\n";
    file("tests/once.rs", once);
    file("tests/never.rs", "#[test]\nfn never() {\n    panic!();\n}\n");
    file("tests/passes.rs", "#[test]\nfn passes() {}\n");
}

fn run(command: &mut Command, dir: &Path) -> Output {
    command.current_dir(dir).env_remove("CARGO_TARGET_DIR").env("CARGO_TERM_COLOR", "never");
    command.output().unwrap()
}

#[test]
fn what_passes_when_run_again_counts_as_passed_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    package(dir.path());
    let made = run(Command::new("cargo").args(["generate-lockfile", "--offline"]), dir.path());
    assert!(made.status.success(), "{made:?}");
    let log = dir.path().join("log");
    // Both streams into one file, as in the pipe of `scripts/test.sh`.
    let first = "cargo test --locked --no-fail-fast --tests >log 2>&1";
    let first = run(Command::new("sh").args(["-c", first]), dir.path());
    assert!(!first.status.success(), "{first:?}");
    let script = site::project().join("scripts/retry_failed.sh");
    let again = run(Command::new("sh").arg(script).arg(&log), dir.path());
    assert!(again.status.success(), "{again:?}");
    let printed = String::from_utf8(again.stdout).unwrap();
    assert!(printed.lines().any(|l| l == "FLAKY --test once: second_time"), "{printed}");
    let text = fs::read_to_string(&log).unwrap();
    let lines = |start: &str| text.lines().filter(|l| l.starts_with(start)).collect::<Vec<_>>();
    assert_eq!(lines("FLAKY "), ["FLAKY --test once: second_time"], "{text}");
    assert_eq!(lines("error: test failed"), ["error: test failed, to rerun pass `--test never`"], "{text}");
    assert_eq!(lines("test never ..."), ["test never ... FAILED"], "{text}");
    assert_eq!(lines("test second_time ..."), ["test second_time ... ok"], "{text}");
    let sums = lines("test result: ");
    assert_eq!(sums.iter().filter(|l| l.contains(" 1 failed")).count(), 1, "{text}");
    assert_eq!(sums.iter().filter(|l| l.contains("ok. 2 passed")).count(), 1, "{text}");
}
