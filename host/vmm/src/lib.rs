//! Clients of a running virtual machine: QEMU's monitor ([`qmp`]), the agent inside the guest
//! ([`agent`]), both over sockets or through libvirt ([`libvirt`]), starting QEMU so that it cannot
//! outlive its owner ([`spawn`]), testing whether KVM really works here ([`probe`]), and finding
//! every thread that works for a VM on the host ([`threads`]).
//!
//! Two rules hold everywhere, because a guest may be hostile and a VMM may hang: every call has a
//! deadline, and every reply has a size limit that is checked before the bytes are kept.

mod address;
pub mod agent;
mod block_node;
pub mod disk_stats;
mod error;
mod events;
pub mod libvirt;
mod lines;
mod link;
pub mod machines;
pub mod probe;
pub mod qmp;
mod reconnect;
pub mod spawn;
mod start_port;
pub mod threads;
pub mod throttle;
mod wire;

pub use address::{AgentAddress, LibvirtAgent};
pub use agent::GuestAgent;
pub use error::{VmmError, shown};
pub use events::{EVENTS_CHARDEV, MonitorEvents};
pub use probe::{KvmProbe, probe_kvm};
pub use qmp::Qmp;
pub use reconnect::Reconnect;
pub use rtvirtio_kernel::WaitLimit;
pub use start_port::{PortState, StartPort};
pub use threads::{Role, Thread, VmHandle, Watcher};
