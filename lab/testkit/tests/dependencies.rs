//! Dependencies of the workspace: licences, sources and the compilers that build them. cargo-deny
//! checks more of it where it is installed; this needs cargo alone.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use spdx::{Expression, Licensee, ParseMode};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Every package that is built on this platform, tests included, as `cargo metadata` lists it.
fn packages() -> Vec<Value> {
    let version = Command::new("rustc").arg("-vV").current_dir(ROOT).output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|l| l.strip_prefix("host: ")).unwrap();
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", host])
        .current_dir(ROOT)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let all: Value = serde_json::from_slice(&out.stdout).unwrap();
    let packages = all["packages"].as_array().unwrap().clone();
    assert!(packages.len() > 100, "the list is cut: {}", packages.len());
    packages
}

fn name(package: &Value) -> String {
    format!("{} {}", package["name"].as_str().unwrap(), package["version"].as_str().unwrap())
}

fn parsed(file: &str) -> toml::Table {
    std::fs::read_to_string(Path::new(ROOT).join(file)).unwrap().parse().unwrap()
}

/// Major and minor of a Rust version such as `1.85` or `1.85.1`.
fn minor(version: &str) -> (u32, u32) {
    let mut parts = version.split('.').map(|p| p.parse().unwrap());
    (parts.next().unwrap(), parts.next().unwrap_or(0))
}

/// Whether a licence expression can be met with what `deny.toml` allows.
fn permitted(expression: &str, allowed: &[Licensee]) -> bool {
    // Older crates separate alternatives by `/`.
    let expression = Expression::parse_mode(expression, ParseMode::LAX);
    expression.is_ok_and(|e| e.evaluate(|req| allowed.iter().any(|a| a.satisfies(req))))
}

fn allowed() -> Vec<Licensee> {
    let deny = parsed("deny.toml");
    let list = deny["licenses"]["allow"].as_array().unwrap();
    list.iter().map(|l| Licensee::parse(l.as_str().unwrap()).unwrap()).collect()
}

#[test]
fn a_copyleft_licence_is_refused() {
    let allowed = allowed();
    for good in ["MIT", "MIT/Apache-2.0", "GPL-2.0-only OR MIT", "(MIT OR Apache-2.0) AND Unicode-3.0"] {
        assert!(permitted(good, &allowed), "{good}");
    }
    for bad in ["GPL-3.0-or-later", "LGPL-2.1-only", "AGPL-3.0-only", "MIT AND GPL-2.0-only", "", "mine"] {
        assert!(!permitted(bad, &allowed), "{bad}");
    }
}

#[test]
fn licences_are_permissive() {
    let allowed = allowed();
    let bad: Vec<String> = packages()
        .iter()
        .filter(|p| !permitted(p["license"].as_str().unwrap_or(""), &allowed))
        .map(|p| format!("{}: {}", name(p), p["license"]))
        .collect();
    assert!(bad.is_empty(), "not allowed by deny.toml: {bad:#?}");
}

#[test]
fn sources_are_crates_io_or_this_repository() {
    let foreign =
        |p: &&Value| !p["source"].is_null() && p["source"].as_str().is_none_or(|source| source != CRATES_IO);
    let foreign: Vec<String> = packages().iter().filter(foreign).map(name).collect();
    assert!(foreign.is_empty(), "{foreign:#?}");
}

#[test]
fn dependencies_build_with_the_declared_rust() {
    let cargo = parsed("Cargo.toml");
    let declared = cargo["workspace"]["package"]["rust-version"].as_str().unwrap().to_owned();
    let newer: Vec<String> = packages()
        .iter()
        .filter(|p| p["rust_version"].as_str().is_some_and(|needs| minor(needs) > minor(&declared)))
        .map(|p| format!("{} needs Rust {}", name(p), p["rust_version"]))
        .collect();
    assert!(newer.is_empty(), "{declared} is declared: {newer:#?}");
}
