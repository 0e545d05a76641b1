//! The plan as the I/O domain's configuration file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rtvirtio_domain_config::{File, FileError};
use rtvirtio_sched::Config;
use rtvirtio_units::Bytes;

use crate::network_text::network_text;
use crate::plan::{DomainPlan, VmPlan};
use crate::promise::TaskPromise;
use crate::toml_text::{format_exact, one_line, toml_string};

/// Default depth of a disk.
const DEFAULT_DEPTH: u32 = 256;

/// Comment in a file without a socket group.
const NO_GROUP: &str = "# Sockets are for root only. Where QEMU runs as another user, as under libvirt, give every disk and port its group, such\n\
                        # as socket_group = \"kvm\", or plan with --socket-group kvm.\n";

/// Socket and backing of a VM's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskPlace {
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// File or block device.
    pub path: PathBuf,
    /// Offset and size of the disk; the whole backing when `None`.
    pub part: Option<(Bytes, Bytes)>,
    /// Whether the backing was checked, and is raw.
    pub is_raw: bool,
}

impl DomainPlan {
    /// Tasks that are promised nothing for reasons of their own, once each, with the reason.
    pub fn unpromised(&self) -> impl Iterator<Item = (&TaskPromise, &str)> {
        let first =
            |i: usize, t: &TaskPromise| !self.tasks[..i].iter().any(|o| (&o.vm, &o.task) == (&t.vm, &t.task));
        let tasks = self.tasks.iter().enumerate().filter(move |(i, t)| first(*i, t));
        tasks.filter_map(|(_, t)| Some((t, t.unpromised.as_deref()?)))
    }

    /// The scheduler's configuration as an I/O domain reads it from the file, for any disk places.
    pub fn sched(&self) -> Result<Config, FileError> {
        let place = |i: usize| DiskPlace {
            socket: format!("/{i}").into(),
            path: "/device".into(),
            part: None,
            is_raw: true,
        };
        let places: Vec<DiskPlace> = (0..self.vms.len()).map(place).collect();
        let file = File::parse(Path::new("the plan"), &self.text("plan", Path::new("/control"), &places))?;
        // The text has one device.
        Ok(file.devices[0].sched())
    }

    /// The configuration file, with reasons as comments. `places` are in the order of the spec's
    /// VMs.
    #[must_use]
    pub fn text(&self, spec_name: &str, control: &Path, places: &[DiskPlace]) -> String {
        let mut s = String::new();
        let cost = &self.device.cost;
        // Writing to a String cannot fail.
        let _ = writeln!(
            s,
            "# Made by `rtvirtio plan --domain` from {}; docs/reference/iod-toml.md explains the keys.\n{}control = {}\n\n[[device]]\nname = {}\npolicy = \"edf\"\nquantum = \"{}\"",
            one_line(spec_name),
            if self.socket_group.is_some() { "" } else { NO_GROUP },
            toml_string(&control.display().to_string()),
            toml_string(&self.device.name),
            self.quantum,
        );
        if self.window < self.full_window {
            let _ = writeln!(
                s,
                "# A window of {} keeps the device busy; this one costs throughput, and the shortest target needs it.",
                self.full_window
            );
        }
        let _ = writeln!(
            s,
            "window = {}\n# Device time of requests, pieces served at once, longest stall.\n\
             cost = {{ read = {{ base = \"{}\", per_mib = \"{}\" }}, write = {{ base = \"{}\", per_mib = \"{}\" }}, flush = \"{}\", discard = \"{}\" }}\nparallel = {}\nstall = \"{}\"",
            self.window,
            format_exact(cost.read.base_ns),
            format_exact(cost.read.per_mib_ns),
            format_exact(cost.write.base_ns),
            format_exact(cost.write.per_mib_ns),
            format_exact(cost.flush_ns),
            format_exact(cost.discard_ns),
            self.device.parallel,
            format_exact(self.device.latency.0),
        );
        for (vm, place) in self.vms.iter().zip(places) {
            self.disk(&mut s, vm, place);
        }
        for network in &self.networks {
            s.push_str(&network_text(network));
        }
        s
    }

    fn disk(&self, s: &mut String, vm: &VmPlan, place: &DiskPlace) {
        s.push('\n');
        match (&vm.reserve, &vm.refused) {
            (Some(_), _) => {
                let promised = self.tasks.iter().filter(|t| t.vm == vm.vm);
                for t in promised {
                    if let (Some(target), Some(bound)) = (t.target, t.bound) {
                        let _ = writeln!(
                            s,
                            "# {}: no request takes longer than {bound} from its submission; the target is {} at {}.",
                            t.task, target.latency, target.percentile
                        );
                    }
                }
            }
            (None, Some(why)) => {
                let _ = writeln!(s, "# NO RESERVATION: {}.", one_line(why));
            }
            (None, None) => {
                s.push_str("# No targets that can be promised: this VM shares the unreserved device time.\n")
            }
        }
        for (t, why) in self.unpromised().filter(|(t, _)| t.vm == vm.vm) {
            let _ = writeln!(s, "# {}: NO PROMISE: {}.", t.task, one_line(why));
        }
        let _ = writeln!(
            s,
            "[[device.disk]]\nname = {}\nsocket = {}\npath = {}",
            toml_string(&vm.vm),
            toml_string(&place.socket.display().to_string()),
            toml_string(&place.path.display().to_string())
        );
        if let Some(group) = &self.socket_group {
            let _ = writeln!(s, "socket_group = {}", toml_string(group));
        }
        if place.is_raw {
            // Otherwise a guest that writes an image's signature prevents the next start.
            s.push_str("format = \"raw\"\n");
        }
        if let Some((offset, size)) = place.part {
            let _ = writeln!(s, "offset = \"{offset}\"\nsize = \"{size}\"");
        }
        if vm.depth > DEFAULT_DEPTH {
            let _ = writeln!(
                s,
                "# Most outstanding requests; QEMU's device needs a queue-size= of at least this.\ndepth = {}",
                vm.depth
            );
        }
        for cap in &vm.caps {
            let _ = writeln!(s, "{cap}");
        }
        for why in &vm.uncapped {
            let _ = writeln!(s, "# NO CAP: {}.", one_line(why));
        }
        let Some(r) = vm.reserve else { return };
        let reserve = format!(
            "{{ share = \"{:.7}%\", burst = \"{}\", deadline = \"{}\" }}",
            r.share.0 * 100.0,
            format_exact(r.burst.0),
            format_exact(r.deadline.0)
        );
        if vm.urgent_only {
            let _ = writeln!(
                s,
                "# Tasks that are promised nothing would use up this VM's reservation, so it covers real-time requests only.\n\
                 # Run the others under `ionice -c1` in the guest.\n\
                 guest_priority = {{ ceiling = \"real-time\" }}\nurgent = {reserve}"
            );
        } else {
            let _ = writeln!(s, "reserve = {reserve}");
        }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_twin::TwinProfile;

    use super::*;
    use crate::testing::{spec, task_of, with};
    use crate::{DeviceModel, Options, plan};

    #[test]
    fn the_domain_parses_the_plan() {
        let mixed = "write_share = \"30%\"\nrate = \"700/s\"\ntarget = { percentile = \"p99.99\", latency = \"30ms\" }";
        let flood = task_of("flood", "read", "128KiB", "depth = 32");
        let spec =
            spec(&[("a", &task_of("t", "mixed", "4KiB", mixed)), ("b", &(with(100, "50ms") + &flood))]);
        let device =
            DeviceModel::declared("qlc \"x\"", &TwinProfile::built_in("qlc-nvme").unwrap(), Bytes(1 << 30));
        let plan = plan(&spec, &device, &Options::default());
        assert!(plan.feasible, "{plan:?}");
        let place = |i: u64| DiskPlace {
            socket: format!("/run/x/{i}.sock").into(),
            path: "/dev/loop0".into(),
            part: Some((Bytes(i << 29), Bytes(1 << 29))),
            is_raw: i == 0,
        };
        let text = plan.text("spec\n[[device]].toml", Path::new("/run/x/control"), &[place(0), place(1)]);
        let file = File::parse(Path::new("iod.toml"), &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let sched = file.devices[0].sched();
        assert_eq!(sched.cost, plan.device.cost);
        assert_eq!(sched.window.start, plan.window);
        let (a, b) = (plan.vms[0].reserve.unwrap(), plan.vms[1].reserve.unwrap());
        let normal = sched.vms[0].normal.unwrap();
        assert_eq!((normal.burst, normal.deadline), (a.burst.0, a.deadline));
        // The scheduler has what was admitted, and no less than the tasks need.
        assert_eq!(normal.rate as f64 / 1e9, a.share.0);
        // The second VM has a target and a flood: only its real-time requests have the reservation.
        assert_eq!(sched.vms[1].normal, None);
        assert_eq!(sched.vms[1].urgent.unwrap().deadline, b.deadline);
        assert!(sched.vms[1].priority.read && !sched.vms[0].priority.read);
        assert_eq!(file.devices[0].disks[1].offset, Bytes(1 << 29));
        assert_eq!(file.devices[0].disks[0].format, Some(rtvirtio_domain_config::Format::Raw));
        assert_eq!(file.devices[0].disks[1].format, None);
        assert!(text.contains("--socket-group kvm"), "{text}");
        let of_kvm = plan.with_socket_group(Some("kvm"));
        let text = of_kvm.text("spec", Path::new("/run/x/control"), &[place(0), place(1)]);
        let file = File::parse(Path::new("iod.toml"), &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let groups: Vec<_> = file.devices[0].disks.iter().map(|disk| disk.socket_group.as_deref()).collect();
        assert_eq!(groups, [Some("kvm"); 2]);
        assert!(!text.contains("--socket-group"), "{text}");
    }
}
