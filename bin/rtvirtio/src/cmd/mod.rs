//! One module per command.

use std::path::Path;

use rtvirtio_spec::HostSpec;

pub mod apply;
pub mod check;
pub mod contract;
pub mod discover;
pub mod domain;
pub mod fleet;
pub mod iod;
pub mod ivshmem;
pub mod keep;
pub mod measure;
pub mod neighbours;
pub mod plan;
pub mod profile;
pub mod profile_cpu;
pub mod profile_library;
pub mod regulator;
pub mod revert;
pub mod service;
pub mod simulate;
pub mod starts;
pub mod status;
pub mod threads;
pub mod top;
pub mod tune;
pub mod verify;
pub mod waits;

/// Refuses a profile file for several devices.
fn one_profile(profile: Option<&Path>, host: &HostSpec) -> anyhow::Result<()> {
    let many = host.parts().len();
    anyhow::ensure!(
        profile.is_none() || many == 1,
        "--profile is of one device, and the spec has {many}: measure each with `rtvirtio profile SPEC`"
    );
    Ok(())
}

/// Title of a device's part of the output; empty for a single device.
fn title(device: Option<&str>, of: usize) -> String {
    match device {
        Some(name) if of > 1 => format!("== device {name}\n"),
        _ => String::new(),
    }
}
