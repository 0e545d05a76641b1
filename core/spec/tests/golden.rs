//! Every malformed spec in `tests/bad` gives exactly the text in its `.expected` file.
//!
//! `UPDATE_GOLDEN=1 cargo test -p rtvirtio-spec --test golden` writes the files anew; read the
//! difference.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use rtvirtio_spec::{Spec, SpecErrors};

/// Files of `tests/bad` with this extension, sorted. Cargo runs tests in the crate's directory.
fn files(extension: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir("tests/bad")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
}

fn load(spec: &Path) -> Result<Spec, SpecErrors> {
    rtvirtio_spec::parse_bytes(&spec.display().to_string(), &fs::read(spec).unwrap())
}

/// The lines that differ, with their numbers.
fn difference(expected: &str, found: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), found.lines().collect());
    let mut out = String::new();
    for i in 0..old.len().max(new.len()) {
        if old.get(i) != new.get(i) {
            for (sign, line) in [('-', old.get(i)), ('+', new.get(i))] {
                if let Some(line) = line {
                    writeln!(out, "{:>4} {sign} {line}", i + 1).unwrap();
                }
            }
        }
    }
    if out.is_empty() { "only the line ends differ".to_owned() } else { out }
}

#[test]
fn malformed_specs_give_their_messages() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    assert!(!(update && std::env::var_os("CI").is_some()), "UPDATE_GOLDEN is for developers, not for CI");
    let specs = files("toml");
    assert!(specs.len() >= 34, "only {} malformed specs found", specs.len());
    let mut failures = String::new();
    for spec in &specs {
        let found = match load(spec) {
            Err(errors) => format!("{errors}\n"),
            Ok(_) => panic!("{} is accepted", spec.display()),
        };
        let golden = spec.with_extension("expected");
        if update {
            fs::write(&golden, &found).unwrap();
        }
        let expected = fs::read_to_string(&golden).unwrap_or_default();
        if expected != found {
            writeln!(failures, "{}:\n{}", golden.display(), difference(&expected, &found)).unwrap();
        }
    }
    assert!(failures.is_empty(), "messages changed (UPDATE_GOLDEN=1 accepts them):\n{failures}");
}

#[test]
fn every_expected_text_has_its_spec() {
    for golden in files("expected") {
        assert!(Path::new(&golden.with_extension("toml")).exists(), "{} has no spec", golden.display());
    }
}

/// The JSON form has the same facts: as many errors as the text, each with its position and a
/// remedy.
#[test]
fn json_agrees_with_the_text() {
    for spec in files("toml") {
        let errors = load(&spec).unwrap_err();
        let text = errors.to_string();
        let json = serde_json::to_value(&errors).unwrap();
        let list = json.as_array().unwrap();
        assert_eq!(
            list.len(),
            text.lines().filter(|l| l.starts_with("error: ")).count(),
            "{}",
            spec.display()
        );
        for error in list {
            let keys: Vec<&String> = error.as_object().unwrap().keys().collect();
            assert_eq!(keys, ["column", "file", "help", "line", "message"]);
            let place = format!("--> {}:{}:{}\n", spec.display(), error["line"], error["column"]);
            assert!(text.contains(&place), "{place} is not in:\n{text}");
            assert!(!error["help"].as_str().unwrap().is_empty());
        }
    }
}
