//! The service that keeps contracts true.
//!
//! A level-triggered loop: [`reconcile()`] is a pure function from *desired* contracts and the
//! *observed* host to steps, [`Daemon`] carries these out through a [`Host`], and events only wake
//! it. [`linux`] is the real host; a simulated one runs the same code in virtual time. [`api`]
//! serves state, events and metrics over HTTP on a Unix socket.
//!
//! The loop keeps nothing that must survive it: what is in force stands in journals on disk, one
//! for each VM (`rtvirtio_workflow::scopes`). When it ends, however it ends, nothing changes on the
//! host; started again, it goes on from the journals.

pub mod api;
mod arrivals;
pub mod config;
pub mod contract_files;
mod contract_scan;
mod daemon;
mod desired;
mod domain_contracts;
mod domain_status;
mod error;
mod events;
mod history;
mod host;
pub mod linux;
mod lock;
mod memory;
pub mod observe;
mod observed;
mod placement;
mod plan;
mod reconcile;
mod run_dir;
mod service;
mod shared;
mod snapshot;
mod step;
pub mod trouble;
mod variant_name;

pub use arrivals::{ArrivalAnswer, ArrivalError, ArrivalSnapshot, ArrivalState};
pub use config::{CONFIG_FILE, Config, Correction, DriftPolicy, Mode, PlanConfig, ProfileConfig};
pub use daemon::{Daemon, PassEvent};
pub use desired::{Contract, ContractFault, Desired, Origin, PlannedHost};
pub use error::DaemonError;
pub use history::{Event, EventKind, History, read as read_history};
pub use host::{Host, Millis, Outcome, ScanDepth, SettingChange};
pub use memory::Memory;
pub use observed::{
    Admission, Drift, KnobClass, MadePlan, Observed, ObservedVm, PlanScope, Presence, ScopeState, ScopeView,
};
pub use plan::{PlanSnapshot, PlanState, ProposalSnapshot, UnplannedDevice, sight_of};
pub use reconcile::{APPLIED, PLAN, reconcile};
pub use run_dir::socket;
pub use service::state_lock::{RunningService, running};
pub use service::{HISTORY_FILE, Service, ServiceEvent, ServiceOptions};
pub use shared::{Command, Shared};
pub use snapshot::{PlacementSnapshot, Snapshot, VmSnapshot, VmState};
pub use step::{Action, Step};
pub use variant_name::word;
