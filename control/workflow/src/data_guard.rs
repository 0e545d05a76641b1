//! Looks for users of a device before it is overwritten or flooded.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rtvirtio_kernel::holders::describe_unseen;
use rtvirtio_kernel::{Claim, Holders, Stack};
use rtvirtio_measure::workload::{Place, VmLoad};

use crate::error::{Result, bail};
use crate::inventory::Inventory;
use crate::progress::Progress;
use crate::site::Site;
use crate::vmms;

/// Claims a device whose data is about to be overwritten; refused while anything except the
/// processes of `except` uses it. Unobservable users are a warning.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) when it is in use.
pub fn claim(path: &Path, except: &[u32], progress: &dyn Progress) -> Result<Claim> {
    let claim = Claim::take(path, except)?;
    if let Some(unseen) = describe_unseen(claim.unseen()) {
        progress.warn(&format!("{} is about to be overwritten: {unseen}", path.display()));
    }
    Ok(claim)
}

/// Warns of what is slowed while a device is measured by reads only.
pub fn warn_of_load(path: &Path, progress: &dyn Progress) -> Result<()> {
    let holders = Holders::find(path, &[])?;
    if !holders.found.is_empty() {
        progress.warn(&format!(
            "{} is in use, and what uses it is slowed meanwhile: it is flooded with reads, up to 32 at a time, and its \
             elevator changes between none and bfq ({})",
            path.display(),
            holders.describe()
        ));
    } else if !holders.unseen.is_empty() {
        progress.warn(&format!(
            "it is not known whether {} is in use: {}",
            path.display(),
            holders.describe()
        ));
    }
    Ok(())
}

/// Refuses to flood a disk that VMs have in use.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) with the VMs' names.
pub fn refuse_under_vms(path: &Path, stack: &Stack, length: Duration) -> Result<()> {
    let vms = vmms::using(stack)?;
    if vms.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = vms.iter().map(ToString::to_string).collect();
    bail!(
        Guarded,
        "VMs have {path} in use: {}. The measurement floods it with reads, up to 32 at a time, for {:.0} s and changes its elevator meanwhile, which \
         slows them. Measure with --gentle (at most 4 reads at a time, the elevator as it is), or at a time of low load with --yes",
        names.join(", "),
        length.as_secs_f64(),
        path = path.display()
    )
}

/// Claims what the tasks of these sites are about to overwrite from the host. A lab's own devices
/// and processes are known; a guest's tasks write the disk that the guest has.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) when a target is in use.
pub fn claim_targets(sites: &[&Site], loads: &[VmLoad], progress: &dyn Progress) -> Result<Vec<Claim>> {
    if sites.iter().all(|site| site.spec.device.is_made()) {
        return Ok(Vec::new());
    }
    let mut targets = BTreeSet::new();
    for load in loads {
        if let Place::Host { .. } = &load.place {
            let writers = load.vm.tasks.iter().enumerate().filter(|(_, t)| t.op.write_share() > 0.0);
            targets.extend(writers.map(|(i, _)| load.target(i)));
        }
    }
    let lab = sites.iter().find_map(|site| site.lab.as_ref());
    let ours = lab.map(Inventory::pids).unwrap_or_default();
    let mut claims = Vec::new();
    for target in targets {
        // fio makes a file that does not exist: nothing is overwritten.
        if matches!(target.symlink_metadata(), Err(e) if e.kind() == std::io::ErrorKind::NotFound) {
            continue;
        }
        if ours.is_empty() {
            claims.push(claim(target, &[], progress)?);
            continue;
        }
        // The lab's own processes have locked it, each its part.
        let holders = Holders::find(target, &ours)?;
        if !holders.found.is_empty() {
            bail!(
                Guarded,
                "{} is in use, and the tasks would overwrite it: {}",
                target.display(),
                holders.describe()
            );
        }
    }
    Ok(claims)
}
