//! A device whose pieces take exactly their charged cost.
#![allow(dead_code, reason = "each test uses a part")]

use rtvirtio_sched::bound::{Deallocations, Device};
use rtvirtio_sched::{Config, Cost, Line, Policy, VmConfig, WindowConfig};
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::Nanos;

/// Size of the device.
pub const SIZE: u64 = 1 << 30;

/// 60 us and 1 ns a byte, `channels` pieces at once.
pub fn device(channels: u32) -> TwinProfile {
    let text = format!(
        "description = \"test\"\nchannels = {channels}\nread = {{ base = \"60us\", per_byte_ns = 1.0 }}\nwrite = {{ base = \"25us\", per_byte_ns = 1.0 }}"
    );
    TwinProfile::parse("test", &text).unwrap()
}

/// The same device as a cost.
pub const COST: Cost = Cost {
    read: Line { base_ns: 60_000, per_mib_ns: 1 << 20 },
    write: Line { base_ns: 25_000, per_mib_ns: 1 << 20 },
    flush_ns: 1_000,
    discard_ns: 25_000,
};

/// The same device for bounds.
pub fn known(channels: u32, window: u32) -> Device {
    Device {
        parallel: channels,
        window,
        latency: Nanos(0),
        stretch: 1.0,
        deallocations: Deallocations::default(),
    }
}

pub fn config(policy: Policy, window: u32, vms: Vec<VmConfig>) -> Config {
    Config { policy, cost: COST, window: WindowConfig::fixed(window), vms, ..Config::default() }
}
