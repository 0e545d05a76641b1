//! Urgency of each vCPU: the page on which a guest reports it, and the priority that follows.
//!
//! The execution model is that of paravirtual scheduling in J. Kiszka, "Towards Linux as a
//! Real-Time Hypervisor" (RTLWS 2009), section 5.1: a guest reports policy and priority of what
//! each vCPU runs, the host maps them into the range that the VM may use, and a pending or handled
//! interrupt raises the vCPU to the upper end of that range. Three things differ. Reports are
//! written to shared memory, so they cost the guest no exit. A blocked vCPU is at its ceiling, so
//! an interrupt finds it there without a call; the host acts only to demote, at a limited rate. And
//! each boost is charged with the CPU time that it takes, so a guest with false reports uses up its
//! own budget.
//!
//! [`Vcpu`] is that as a state machine with the clock as an argument. [`page`] is the memory that
//! host and guest share ([`docs/reference/urgency-page.md`]). [`Doorbell`] bounds the cost of a
//! guest's notifications to the host, [`GuestClock`] converts times of the guest's clock into the
//! host's, [`Unreported`] replaces the report of a guest that makes none, [`FairShare`] deducts
//! urgent CPU time from the VM's fair share.
//!
//! [`docs/reference/urgency-page.md`]: https://github.com/rtvirtio/rtvirtio/blob/main/docs/reference/urgency-page.md

mod answer;
mod clock;
mod config;
mod doorbell;
mod lead;
mod level;
pub mod page;
mod report;
mod share;
mod unreported;
mod vcpu;

pub use answer::Answer;
pub use clock::GuestClock;
pub use config::Config;
pub use doorbell::Doorbell;
pub use lead::Lead;
pub use level::{Change, GuestPolicy, Level};
pub use report::Report;
pub use share::{FairShare, LEAST as LEAST_WEIGHT, Usage};
pub use unreported::{Activity, Unreported};
pub use vcpu::{Counters, Interrupt, Reason, Step, Vcpu, VcpuSample};
