//! Builds the shared object that keeps fio from busy waiting, see `preload/fio_sleep.rs`.

use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "preload/fio_sleep.rs";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let var = |name: &str| std::env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}"));
    let out = PathBuf::from(var("OUT_DIR")).join("fio_sleep.so");
    let mut rustc = Command::new(var("RUSTC"));
    rustc
        .args(["--edition=2024", "--crate-type=cdylib", "--crate-name=fio_sleep", "-Copt-level=s"])
        .args(["-Cpanic=abort", "-Cstrip=symbols", "-Clink-arg=-nostartfiles", "-Dwarnings", "-o"])
        .arg(&out)
        .arg("--target")
        .arg(var("TARGET"))
        .arg(SOURCE);
    if let Some(linker) = std::env::var_os("RUSTC_LINKER") {
        let mut option = std::ffi::OsString::from("-Clinker=");
        option.push(linker);
        rustc.arg(option);
    }
    let status = rustc.status().unwrap_or_else(|e| panic!("cannot run {rustc:?}: {e}"));
    assert!(status.success(), "{rustc:?}: {status}");
}
