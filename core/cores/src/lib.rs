//! CPUs for the threads of a VM, by the host's topology and by what other VMs have taken.
//!
//! One VM is placed at a time, as at its start: [`Host::place`] answers with a CPU for each thread,
//! or refuses and says what would fit. Whether a VM fits on what others leave is decided
//! exactly. A placement has the fewest NUMA nodes, and among those the fewest
//! [domains](Cpu::domain); where there are too many sets of domains to try, [`Placement::beyond`]
//! bounds how many more it has than the fewest possible.
//!
//! Rules that every placement keeps:
//!
//! * The vCPUs of a VM have a CPU each: two real-time vCPUs on one keep each other from running.
//! * The shares on a CPU are at most what the kernel grants real-time threads.
//! * A vCPU with a [whole](Use::Whole) CPU shares it with nothing; the other CPUs of its core take
//!   threads of the same VM only.
//! * An isolated CPU takes whole vCPUs only: what else runs there is no balanced load.

mod list;
mod place;
mod topology;

pub use list::{cpu_list, cpu_ranges};
pub use place::{Host, Placement, Refused, Request, Use};
pub use topology::{BadTopology, Cpu, MAX_CPUS};
