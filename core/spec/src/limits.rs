//! Bounds of what a spec may hold: its text is not trusted.

/// Largest spec file in bytes. 64 VMs with 64 tasks each fit several times.
pub const MAX_FILE_BYTES: usize = 1 << 20;
/// Most devices in one spec.
pub const MAX_DEVICES: usize = 16;
/// Most disks of one VM.
pub const MAX_DISKS_PER_VM: usize = 16;
/// Most networks in one spec.
pub const MAX_NETWORKS: usize = 16;
/// Most ports of one VM.
pub const MAX_NICS_PER_VM: usize = 8;
/// Most flows of one VM.
pub const MAX_FLOWS_PER_VM: usize = 64;
/// Most paths of one VM.
pub const MAX_PATHS_PER_VM: usize = 8;
/// Most VMs in one spec.
pub const MAX_VMS: usize = 64;
/// Most tasks in one VM.
pub const MAX_TASKS_PER_VM: usize = 64;
/// `depth` of an open loop that does not give one.
pub const DEFAULT_OPEN_DEPTH: u32 = 64;
