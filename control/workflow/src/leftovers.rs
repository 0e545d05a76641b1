//! Leftovers of rtvirtio on this host whose process is gone: named by `check`, removed by `revert`,
//! those of the laboratory by the laboratory.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{JOURNAL_FILE, Machine, NoGuests};
use rtvirtio_kernel::leftovers::{self, KnownBy, OurGroup};
use rtvirtio_kernel::mounts::mounts;
use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_kernel::{Finding, HostError, Root, cgroup};

use crate::acting::{self, Acting, Journal};
use crate::dirs::Dirs;
use crate::error::{Kind, Result};
use crate::inventory::Inventory;

/// Name of a lab's state in its run directory.
pub const LAB_FILE: &str = "lab.json";
/// Source of a twin's mount.
pub const TWIN_SOURCE: &str = "rtvirtio-twin";

const GROUPS: &str = "leftovers.cgroups";
const JOURNAL: &str = "leftovers.journal";
const LAB: &str = "leftovers.lab";
const ACTING: &str = "leftovers.settings";
const ACTING_WHY: &str = "`status` and `revert` know nothing of them, and they change what is measured";
const TWINS: &str = "leftovers.twins";
const GROUPS_WHY: &str = "a budget or weight that nothing knows of any more is taken from everything else, and is put back by nothing";
const JOURNAL_WHY: &str =
    "what it put in force ended with the restart, and no plan can be applied next to it";
const LAB_WHY: &str =
    "its devices, cgroups and guests stay until it is removed, and no other lab can be made";

/// Looks for leftovers. Changes nothing and never fails: what cannot be read is a finding.
#[must_use]
pub fn findings(root: &Root, dirs: &Dirs) -> Vec<Finding> {
    let mut found = Vec::new();
    match leftovers::groups(root).and_then(|groups| left(root, groups)) {
        Ok(groups) => found.extend(groups.iter().map(of_group)),
        Err(e) => found.push(unknown(GROUPS, &e, GROUPS_WHY)),
    }
    found.extend(journal(root, dirs));
    found.extend(elsewhere(dirs));
    found.extend(labs(root, dirs));
    found.extend(twins(root));
    if found.is_empty() {
        found.push(Finding::ok("leftovers", "none", GROUPS_WHY));
    }
    found
}

/// Removes the cgroups of CPU contracts that no journal knows any more and in which nothing runs.
/// Returns their directories.
///
/// # Errors
/// When the cgroups cannot be read, or one cannot be removed.
pub fn remove_contracts(root: &Root) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for group in left(root, leftovers::groups(root)?)? {
        if is_known_by(&group, JOURNAL_FILE) && group.pids.is_empty() {
            // The kernel counts a removed group's budget for some milliseconds more, unless it was
            // given back before.
            let budget = group.dir.join("cpu.rt_runtime_us");
            if root.exists(&budget)? {
                root.write(&budget, "0")?;
            }
            cgroup::remove_dir(root, &group.dir)?;
            removed.push(group.dir);
        }
    }
    Ok(removed)
}

/// The cgroups of labs whose state is gone.
pub fn lab_groups(root: &Root) -> Result<Vec<OurGroup>> {
    let all = left(root, leftovers::groups(root)?)?;
    Ok(all.into_iter().filter(is_of_a_lab).collect())
}

/// Mount points of twins whose lab's state is gone.
pub fn lab_twins(root: &Root) -> Result<Vec<PathBuf>> {
    let mut left = Vec::new();
    for mount in mounts(root)?.into_iter().filter(|m| m.source == TWIN_SOURCE) {
        if let Some(run_dir) = mount.point.parent() {
            if !root.exists(run_dir.join(LAB_FILE))? {
                left.push(mount.point);
            }
        }
    }
    Ok(left)
}

fn left(root: &Root, groups: Vec<OurGroup>) -> std::result::Result<Vec<OurGroup>, HostError> {
    let mut left = Vec::new();
    for group in groups {
        if group.is_left(root)? {
            left.push(group);
        }
    }
    Ok(left)
}

/// Whether a cgroup is of a lab, or of an experiment.
fn is_of_a_lab(group: &OurGroup) -> bool {
    let name = group.dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    is_known_by(group, LAB_FILE) || name.starts_with("rtvirtio-bench-")
}

fn is_known_by(group: &OurGroup, file: &str) -> bool {
    matches!(&group.known_by, KnownBy::File(path) if path.ends_with(file))
}

/// Settings that act, and that no journal here has.
fn elsewhere(dirs: &Dirs) -> Vec<Finding> {
    let remedy = "as described; until then no plan can be applied here";
    let one = |of: &Acting| match of.journal {
        Journal::Lost => Finding::fail(ACTING, of.to_string(), ACTING_WHY, remedy),
        Journal::There | Journal::Unknown { .. } => {
            Finding::warn(ACTING, of.to_string(), ACTING_WHY, "see which state directory is meant")
        }
    };
    match acting::elsewhere(dirs) {
        Ok(all) => all.iter().map(one).collect(),
        Err(e) => vec![Finding::warn(
            ACTING,
            format!("not known: {e:#}"),
            ACTING_WHY,
            "run it with sudo, or look at the directory",
        )],
    }
}

fn of_group(group: &OurGroup) -> Finding {
    let dir = group.dir.display();
    let remedy = if is_of_a_lab(group) {
        "`rtvirtio-lab down` removes it with what runs in it".to_owned()
    } else if group.pids.is_empty() || matches!(group.known_by, KnownBy::Process(..)) {
        "`rtvirtio revert` removes it".to_owned()
    } else {
        let pids: Vec<String> = group.pids.iter().map(u32::to_string).collect();
        format!("end process {}, and `rtvirtio revert` removes it", pids.join(", "))
    };
    let maker = match &group.known_by {
        KnownBy::File(path) => format!("{} is gone", path.display()),
        KnownBy::Process(pid, _) => format!("process {pid} is gone"),
        KnownBy::Unknown => "nothing knows of it".to_owned(),
    };
    Finding::warn(GROUPS, format!("cgroup {dir}: {maker}"), GROUPS_WHY, remedy)
}

fn journal(root: &Root, dirs: &Dirs) -> Option<Finding> {
    match rtvirtio_apply::status(&dirs.state, &Machine::new(root, &NoGuests)) {
        Ok(Some(status)) if status.rebooted => {
            let what =
                format!("{}: of another boot, applied by process {}", path(dirs, JOURNAL_FILE), status.pid);
            Some(Finding::warn(JOURNAL, what, JOURNAL_WHY, "`rtvirtio revert` forgets it"))
        }
        Ok(_) => None,
        Err(e) => Some(unknown(JOURNAL, &e, JOURNAL_WHY)),
    }
}

fn path(dirs: &Dirs, file: &str) -> String {
    dirs.state.join(file).display().to_string()
}

/// The lab of the run directory, and those that a command makes for itself below it.
fn labs(root: &Root, dirs: &Dirs) -> Vec<Finding> {
    let remedy = "`rtvirtio-lab down` removes it";
    let mut found = Vec::new();
    match Inventory::load(&dirs.run) {
        Ok(list) => {
            let dead = dead_parts(root, &list);
            if !dead.is_empty() {
                let what = format!("lab from {}: {}", list.spec_name, dead.join(", "));
                found.push(Finding::warn(LAB, what, LAB_WHY, remedy));
            }
        }
        Err(e) if e.kind() == Kind::NotRunning => {
            if dirs.run.join(LAB_FILE).exists() {
                let what = format!("{}: a lab that did not come up, or is coming up now", dirs.run.display());
                found.push(Finding::warn(LAB, what, LAB_WHY, remedy));
            }
        }
        Err(e) => found.push(unknown(LAB, &e, LAB_WHY)),
    }
    let entries = match std::fs::read_dir(&dirs.run) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return found,
        Err(e) => return [found, vec![unknown(LAB, &e, LAB_WHY)]].concat(),
    };
    for dir in entries.flatten().map(|e| e.path()).filter(|dir| dir.join(LAB_FILE).exists()) {
        if let Some(pid) = maker(&dir).filter(|pid| !root.at(format!("/proc/{pid}")).exists()) {
            let what = format!("{}: a lab of process {pid}, which is gone", dir.display());
            found.push(Finding::warn(LAB, what, LAB_WHY, remedy));
        }
    }
    found
}

/// Parts of a lab that are gone although it is up.
fn dead_parts(root: &Root, list: &Inventory) -> Vec<String> {
    let mut dead = Vec::new();
    for vm in &list.vms {
        if let Some(guest) = vm.guest.as_ref().filter(|guest| !guest.process.is_alive()) {
            dead.push(format!("QEMU of {} (process {}) has ended", vm.name, guest.process.pid));
        }
    }
    if let Some(domain) = list.domain.as_ref().filter(|domain| !domain.is_alive()) {
        dead.push(format!("its I/O domain (process {}) has ended", domain.pid));
    }
    if let Some(name) = list.device.file_name() {
        if !root.at(Path::new("/sys/block").join(name)).join("size").exists() {
            dead.push(format!("{} is gone", list.device.display()));
        } else if name.to_str().is_some_and(|name| name.starts_with("loop"))
            && !root.at(Path::new("/sys/block").join(name)).join("loop/backing_file").exists()
        {
            dead.push(format!("{} has no file", list.device.display()));
        }
    }
    dead
}

/// The process that made a lab: its cgroup is named after it.
fn maker(run_dir: &Path) -> Option<u32> {
    let text = rtvirtio_kernel::trusted::read_config_text(run_dir.join(LAB_FILE), CONFIG_LIMIT).ok()?;
    let state: serde_json::Value = serde_json::from_str(&text).ok()?;
    state["cgroups"][0].as_str()?.rsplit_once('-')?.1.parse().ok()
}

fn twins(root: &Root) -> Vec<Finding> {
    let left = match lab_twins(root) {
        Ok(left) => left,
        Err(e) => return vec![unknown(TWINS, &e, LAB_WHY)],
    };
    let one = |point: &PathBuf| {
        let loops = leftovers::loops_below(root, point).unwrap_or_default();
        let loops: Vec<String> = loops.iter().map(|device| device.display().to_string()).collect();
        let on = if loops.is_empty() { String::new() } else { format!(" with {}", loops.join(", ")) };
        let what = format!("an emulated device in {}{on}, of a lab that is gone", point.display());
        Finding::warn(TWINS, what, LAB_WHY, "`rtvirtio-lab down` removes it")
    };
    left.iter().map(one).collect()
}

fn unknown(id: &str, error: &dyn std::fmt::Display, why: &str) -> Finding {
    Finding::warn(id, format!("not known: {error}"), why, "run as root on the host itself")
}

#[cfg(test)]
mod tests;
