//! Plants a limit inside the guest, where nothing on the host shows it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rtvirtio_measure::workload::{Place, VmLoad};
use rtvirtio_vmm::{AgentAddress, GuestAgent};

/// Cgroups of the guest (v2).
const CGROUPS: &str = "/run/rtvirtio-cgroups";
/// Longest wait for the guest's agent.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Limits the reads of all that the guest's agent starts; returns what takes the limit away.
pub fn limit(reads: u64, load: &VmLoad) -> anyhow::Result<impl FnOnce() -> anyhow::Result<()> + use<>> {
    let Place::Guest { agent, target, .. } = &load.place else { anyhow::bail!("the VM has no guest") };
    let disk = target.file_name().and_then(|name| name.to_str()).context("the guest's disk has no name")?;
    let held = Path::new(CGROUPS).join("held");
    let held = held.display();
    // The shell is started by the agent.
    let plant = format!(
        "set -e; mkdir -p {CGROUPS}; [ -e {CGROUPS}/cgroup.procs ] || mount -t cgroup2 none {CGROUPS}; \
         echo +io >{CGROUPS}/cgroup.subtree_control; mkdir -p {held}; \
         echo \"$(cat /sys/class/block/{disk}/dev) riops={reads}\" >{held}/io.max; echo $PPID >{held}/cgroup.procs"
    );
    let remove =
        format!("set -e; for pid in $$ $PPID; do echo $pid >{CGROUPS}/cgroup.procs; done; rmdir {held}");
    let agent = agent.clone();
    run(&agent, &plant)?;
    Ok(move || run(&agent, &remove))
}

fn run(agent: &AgentAddress, script: &str) -> anyhow::Result<()> {
    let out = GuestAgent::reach(agent, TIMEOUT)?.exec(&["sh", "-c", script], TIMEOUT)?;
    ensure!(out.success(), "in the guest: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(())
}
