//! Limits of a spec's size: its text is not trusted.

/// Largest spec file in bytes. 256 VMs with 32 tasks each fit.
pub const MAX_FILE_BYTES: usize = 1 << 20;
/// Limit of devices in one spec.
pub const MAX_DEVICES: usize = 16;
/// Limit of disks of one VM.
pub const MAX_DISKS_PER_VM: usize = 16;
/// Limit of networks in one spec.
pub const MAX_NETWORKS: usize = 16;
/// Limit of ports of one VM.
pub const MAX_NICS_PER_VM: usize = 8;
/// Limit of flows of one VM.
pub const MAX_FLOWS_PER_VM: usize = 64;
/// Limit of paths of one VM.
pub const MAX_PATHS_PER_VM: usize = 8;
/// Limit of VMs in one spec.
pub const MAX_VMS: usize = 256;
/// Limit of tasks in one VM.
pub const MAX_TASKS_PER_VM: usize = 64;
/// Default `depth` of an open loop.
pub const DEFAULT_OPEN_DEPTH: u32 = 64;
