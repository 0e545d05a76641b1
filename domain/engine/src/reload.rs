//! Reload: changes the scheduling of a running domain. Disks and sockets stay as they are.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::{Device, Disk, File, FileError};
use crate::engine::{Command, EngineHandle, ReconfigureError};

/// Why a configuration is refused. Nothing is changed then, except for [`ReloadError::Engine`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The file is invalid.
    #[error("nothing is changed: {0}")]
    File(#[from] FileError),
    /// Changes that guests would notice, or that need new files.
    #[error("nothing is changed: {} needs a restart of the I/O domain (guests wait and lose nothing)", list.join(", "))]
    Restart {
        /// The changes, each with its place.
        list: Vec<String>,
    },
    /// An engine refuses; devices before it in the file have the new configuration.
    #[error("device \"{device}\": {source}")]
    Engine {
        /// Which.
        device: String,
        /// Why.
        source: ReconfigureError,
    },
}

#[derive(Debug)]
struct Shared {
    /// The configuration of the start, which determines table sizes.
    started: File,
    current: Mutex<File>,
    engines: Vec<(String, EngineHandle)>,
}

/// Reloads running engines; shared by several threads.
#[derive(Clone, Debug)]
pub struct Reloader(Arc<Shared>);

impl Reloader {
    pub(crate) fn new(file: File, engines: Vec<(String, EngineHandle)>) -> Self {
        Self(Arc::new(Shared { started: file.clone(), current: Mutex::new(file), engines }))
    }

    /// Reads the file again, validates it including admission, and applies it. Returns the changes,
    /// each with its place.
    ///
    /// Live: `policy`, `window` (up to the largest of the start), `aging`, `poll`, `parallel`,
    /// `stall`; of a disk `weight`, `reserve`, `urgent`, `read_cap`, `write_cap`, `guest_priority`.
    /// The buckets of a changed disk start full; all others continue.
    ///
    /// # Errors
    /// [`ReloadError`].
    pub fn reload(&self, path: &Path) -> Result<Vec<String>, ReloadError> {
        let shared = &*self.0;
        // Poisoned by a panic before the last statement: it still holds the configuration in force.
        let mut current = shared.current.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock: the later reload has the later file.
        let new = File::load(path)?;
        let list = needs_restart(&shared.started, &new);
        if !list.is_empty() {
            return Err(ReloadError::Restart { list });
        }
        let mut changes = Vec::new();
        for (((device, handle), old), new) in shared.engines.iter().zip(&current.devices).zip(&new.devices) {
            let before = changes.len();
            device_changes(old, new, &mut changes);
            let mut vms = Vec::new();
            for (vm, (old, new)) in old.disks.iter().zip(&new.disks).enumerate() {
                let before = changes.len();
                disk_changes(old, new, &mut changes);
                if changes.len() > before {
                    vms.push(vm);
                }
            }
            if changes.len() == before {
                continue;
            }
            let config = Box::new(new.sched());
            let reconfigured = handle
                .ask(|reply| Command::Reconfigure { config, vms, poll: new.poll, reply })
                .map_err(ReconfigureError::from)
                .and_then(|done| done);
            reconfigured.map_err(|source| ReloadError::Engine { device: device.clone(), source })?;
        }
        *current = new;
        Ok(changes)
    }
}

/// Names the fields in which two values differ.
macro_rules! push_differences {
    ($list:expr, $place:expr, $old:expr, $new:expr, $($field:ident),+ $(,)?) => {
        $(if $old.$field != $new.$field { $list.push(format!("{}{}", $place, stringify!($field))); })+
    };
}

fn device_changes(old: &Device, new: &Device, list: &mut Vec<String>) {
    let place = format!("device \"{}\": ", new.name);
    push_differences!(list, place, old, new, policy, window, aging, poll, parallel, stall, discard_share);
}

fn disk_changes(old: &Disk, new: &Disk, list: &mut Vec<String>) {
    let place = format!("disk \"{}\": ", new.name);
    push_differences!(list, place, old, new, weight, reserve, urgent, read_cap, write_cap, guest_priority);
}

/// The changes that need a restart, each with its place.
fn needs_restart(old: &File, new: &File) -> Vec<String> {
    let mut list = Vec::new();
    let File { control: _, control_group: _, sandbox: _, devices: _ } = new;
    push_differences!(list, "", old, new, control, control_group, sandbox);
    if !same_names(&old.devices, &new.devices, |d| &d.name) {
        list.push("another list of devices".into());
        return list;
    }
    for (old, new) in old.devices.iter().zip(&new.devices) {
        let place = format!("device \"{}\": ", new.name);
        // All fields by name: a new one must be classified.
        let Device {
            name: _,
            quantum: _,
            cost: _,
            cpus: _,
            fifo: _,
            pass_priority: _,
            disks: _,
            // Live.
            policy: _,
            window: _,
            aging: _,
            poll: _,
            parallel: _,
            stall: _,
            discard_share: _,
        } = new;
        push_differences!(list, place, old, new, quantum, cost, cpus, fifo, pass_priority);
        let most = |d: &Device| d.sched().window.most.max(d.sched().window.start);
        if most(new) > most(old) {
            list.push(format!("{place}a window of more than {}", most(old)));
        }
        if !same_names(&old.disks, &new.disks, |d| &d.name) {
            list.push(format!("{place}another list of disks"));
            continue;
        }
        for (old, new) in old.disks.iter().zip(&new.disks) {
            disk_needs_restart(old, new, &mut list);
        }
    }
    list
}

fn disk_needs_restart(old: &Disk, new: &Disk, list: &mut Vec<String>) {
    let place = format!("disk \"{}\": ", new.name);
    let Disk {
        name: _,
        socket: _,
        socket_group: _,
        path: _,
        format: _,
        offset: _,
        size: _,
        read_only: _,
        cached: _,
        shared: _,
        hugepages: _,
        discard: _,
        serial: _,
        queues: _,
        depth: _,
        urgent_quantum: _,
        // Live.
        weight: _,
        reserve: _,
        urgent: _,
        read_cap: _,
        write_cap: _,
        guest_priority: _,
    } = new;
    push_differences!(
        list, place, old, new, socket, path, offset, size, read_only, cached, shared, hugepages
    );
    push_differences!(
        list,
        place,
        old,
        new,
        socket_group,
        format,
        serial,
        queues,
        depth,
        urgent_quantum,
        discard
    );
}

fn same_names<T>(old: &[T], new: &[T], name: impl Fn(&T) -> &String) -> bool {
    old.len() == new.len() && old.iter().zip(new).all(|(a, b)| name(a) == name(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[[device]]
name = "d"
window = 2
[[device.disk]]
name = "a"
socket = "/run/a"
path = "/dev/a"
[[device.disk]]
name = "b"
socket = "/run/b"
path = "/dev/b"
weight = 200
"#;

    fn file(from: &str, to: &str) -> File {
        assert!(TEXT.contains(from));
        File::parse(Path::new("x"), &TEXT.replace(from, to)).unwrap()
    }

    #[test]
    fn changes_that_need_a_restart_are_all_named() {
        let old = file("\"d\"", "\"d\"");
        let of = |from, to| needs_restart(&old, &file(from, to));
        assert_eq!(of("/dev/b\"", "/dev/c\"\ndepth = 7"), ["disk \"b\": path", "disk \"b\": depth"]);
        assert_eq!(of("window = 2", "window = 2\nquantum = \"4KiB\""), ["device \"d\": quantum"]);
        assert_eq!(of("window = 2", "window = 3"), ["device \"d\": a window of more than 2"]);
        assert_eq!(of("\"a\"\nsocket", "\"c\"\nsocket"), ["device \"d\": another list of disks"]);
        assert_eq!(of("\"d\"", "\"e\""), ["another list of devices"]);
        assert_eq!(of("[[device]]", "sandbox = \"off\"\n[[device]]"), ["sandbox"]);
        assert!(of("weight = 200", "weight = 300\nread_cap = { requests = \"5/s\" }").is_empty());
        assert!(of("window = 2", "window = 1\npolicy = \"drr\"\naging = \"2s\"").is_empty());
    }

    /// Every field is either live or needs a restart; live changes are reported.
    #[test]
    fn live_changes_are_reported() {
        let (old, new) = (
            file("\"d\"", "\"d\""),
            file("weight = 200", "urgent = { share = \"1%\", burst = \"1ms\", deadline = \"1s\" }"),
        );
        let mut list = Vec::new();
        disk_changes(&old.devices[0].disks[1], &new.devices[0].disks[1], &mut list);
        assert_eq!(list, ["disk \"b\": weight", "disk \"b\": urgent"]);
        let mut list = Vec::new();
        device_changes(
            &old.devices[0],
            &file("window = 2", "window = 1\nstall = \"1ms\"").devices[0],
            &mut list,
        );
        assert_eq!(list, ["device \"d\": window", "device \"d\": stall"]);
    }
}
