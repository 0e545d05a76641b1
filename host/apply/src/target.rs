//! File or thread of a knob, and the meaning of its text.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::irq::{self, Vector};
use rtvirtio_kernel::resctrl;
use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::text;
use rtvirtio_planner::IoCostFile;
use rtvirtio_vmm::AgentAddress;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::systemd::{self, Unit};

/// Location of a file: host, guest or thread.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// In the host's file system.
    Host,
    /// In a guest's file system, reached through its agent.
    Guest {
        vm: String,
        /// Address of its guest agent.
        agent: AgentAddress,
    },
    /// A thread of the host.
    Thread {
        /// Process that the thread belongs to.
        pid: u32,
        /// Thread id, as in `/proc/PID/task/TID`.
        tid: u32,
        /// Start of the thread, in 1/100 s since boot: thread ids are reused.
        start: u64,
    },
}

/// Way to read, write and compare the text of a knob's file. A *value* below is one canonical word.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// The text itself, without surrounding white space.
    Plain,
    /// `none [bfq]`: the value is the name in brackets.
    Elevator,
    /// Milliseconds that the kernel rounds up to its tick.
    Jiffies,
    /// A device's line in a BFQ weight file: the value is the weight, or `default` without a line.
    ///
    /// The per-device line is used, not the group's default, because it leaves the VM's other disks
    /// alone and because writing the default erases the lines of all devices
    /// (`bfq_io_set_weight_legacy()`).
    DeviceWeight {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
    },
    /// A device's line in a v1 `blkio.throttle.*_device` file: the value is the limit, or `max`
    /// without a line.
    Throttle {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
    },
    /// A key of a device's line in v2 `io.max`: the value is the limit, or `max`.
    IoMax {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
        /// `rbps`, `wbps`, `riops` or `wiops`.
        key: String,
    },
    /// A device's line in `io.cost.model`: the value is the setting without what the kernel chose
    /// by itself, as [`IoCostFile::canonical`] prints it. The kernel keeps a line for a device once
    /// it had one, so none and one with the kernel's own choice are one value.
    IoCostModel {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
    },
    /// A device's line in `io.cost.qos`, in the same way.
    IoCostQos {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
    },
    /// A device's line in `io.weight` of io.cost: the value is the weight, or `default` without a
    /// line. Unlike BFQ's the kernel takes `default` for what it says (`ioc_weight_write()`).
    IoWeight {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
    },
    /// A device's line in `io.latency`: the value is the target in us, or `max` without a line.
    IoLatency {
        /// `MAJ:MIN`, as in `/sys/block/*/dev`.
        dev: String,
    },
    /// Whether `io` stands in a v2 `cgroup.subtree_control`: the value is `+io` or `-io`.
    IoEnabled,
    /// Whether `cpuset` stands in a v2 `cgroup.subtree_control`: the value is `+cpuset` or
    /// `-cpuset`.
    CpusetEnabled,
    /// List of CPUs in a file of a cpuset: the value is the kernel's list, empty without CPUs.
    CpuList,
    /// `cpuset.cpus.partition`: the value is `member`, `root` or `isolated`, for a partition that
    /// is not valid with ` invalid` and the kernel's reason after it.
    Partition,
    /// Policy and parameters of a thread: the value is the text of [`Attr`].
    Scheduling,
    /// CPUs that a thread may use: the value is the kernel's list, such as `0-3,6`.
    Affinity,
    /// CPUs that an interrupt of a device may come to: the value is the kernel's list.
    Interrupt {
        /// File of the vector in its device's directory.
        vector: PathBuf,
        /// Inode of that file: numbers of interrupts are given out again.
        inode: u64,
    },
    /// The cgroup of a thread in one v1 hierarchy: the value is the path below its root.
    ThreadCgroup {
        /// Controller of the hierarchy, such as `cpu`.
        controller: String,
        /// Mount point of its root.
        mount: PathBuf,
    },
    /// Whether a v1 cgroup is there: the value is `present` or `absent`. Threads that were started
    /// in it meanwhile and so are in no journal go to `home` before it is removed.
    Group {
        /// Directory of another cgroup.
        home: PathBuf,
        /// Scheduling for these threads: the text of [`Attr`].
        scheduling: String,
    },
    /// Whether a group of resctrl is there: the value is `present` or `absent`. It is removed only
    /// while no thread of another process than these is in it; the kernel moves what is left in it
    /// to the group above.
    ResctrlGroup {
        /// Processes of the VM.
        processes: Vec<u32>,
    },
    /// The group of a thread in resctrl: the value is the path below the mount point, `/` for the
    /// default group.
    ResctrlTask {
        /// Mount point of resctrl.
        mount: PathBuf,
    },
    /// A resource's line in a group's `schemata`: the value is `0=7ff;1=7ff`, by domain.
    Schemata {
        /// Name of the line, such as `L3` or `MB`.
        resource: String,
    },
    /// Whether devices have ways of the cache of their own (`io_alloc` of resctrl): the value is
    /// `enabled` or `disabled`.
    IoAlloc,
    /// These ways (`io_alloc_cbm`), as of a `schemata` line; there is no value while devices have
    /// none.
    IoAllocWays,
    /// `CPUQuota=` and `CPUQuotaPeriodSec=` of a unit of systemd: the value is both in us, of one
    /// second and of the period, each a number or `infinity`.
    UnitQuota {
        /// Name of the unit, with its suffix.
        unit: String,
    },
    /// A device's `IODeviceWeight=` of a unit of systemd: the value is systemd's weight, or
    /// `default` without one.
    UnitDeviceWeight {
        /// Name of the unit, with its suffix.
        unit: String,
        /// Number of the device, `MAJ:MIN`.
        dev: String,
        /// Path of the device in the unit's properties.
        path: String,
    },
    /// `IOAccounting=` of a unit of systemd, which keeps the I/O controller in its group: the value
    /// is `yes` or `no`.
    UnitIo {
        /// Name of the unit, with its suffix.
        unit: String,
    },
}

/// File or thread of a knob.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Target {
    /// Location of the file.
    pub place: Place,
    /// Absolute path at that location.
    pub path: PathBuf,
    /// Meaning of its text.
    pub form: Form,
}

/// Values of a device that io.cost was never set up for.
const MODEL_UNSET: &str = "ctrl=auto";
const QOS_UNSET: &str = "enable=0 ctrl=auto";

/// Setting of a device in a file of io.cost.
fn io_cost(of: IoCostFile, file: &str, dev: &str) -> Option<String> {
    match text::device_line(file, dev) {
        Some(line) => of.canonical(line).ok(),
        None if of == IoCostFile::Model => Some(MODEL_UNSET.to_owned()),
        None => Some(QOS_UNSET.to_owned()),
    }
}

impl Form {
    /// The value that a text holds; `None` when the text has another form.
    #[must_use]
    pub fn value(&self, file: &str) -> Option<String> {
        let or = |limit: Option<u64>| limit.map_or_else(|| "max".to_owned(), |v| v.to_string());
        Some(match self {
            Self::Plain | Self::Jiffies | Self::Partition => file.trim().to_owned(),
            Self::Elevator => text::elevators(file)?.current,
            Self::DeviceWeight { dev } | Self::IoWeight { dev } => {
                match text::weights(file)?.devices.get(dev) {
                    Some(weight) => weight.to_string(),
                    None => "default".to_owned(),
                }
            }
            Self::Throttle { dev } => or(text::throttle_value(file, dev)?),
            Self::IoMax { dev, key } => or(text::io_max_value(file, dev, key)?),
            Self::IoLatency { dev } => or(text::io_max_value(file, dev, "target")?),
            Self::IoCostModel { dev } => io_cost(IoCostFile::Model, file, dev)?,
            Self::IoCostQos { dev } => io_cost(IoCostFile::Qos, file, dev)?,
            Self::IoEnabled => (if text::has_word(file, "io") { "+io" } else { "-io" }).to_owned(),
            Self::CpusetEnabled => {
                (if text::has_word(file, "cpuset") { "+cpuset" } else { "-cpuset" }).to_owned()
            }
            Self::CpuList => text::cpu_ranges(&text::cpu_list(file.trim())?),
            Self::Scheduling => file.trim().parse::<Attr>().ok()?.to_string(),
            Self::Affinity => {
                let list = file.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
                text::cpu_ranges(&text::cpu_list(list).filter(|cpus| !cpus.is_empty())?)
            }
            Self::Interrupt { .. } => {
                text::cpu_ranges(&text::cpu_list(file.trim()).filter(|cpus| !cpus.is_empty())?)
            }
            Self::ThreadCgroup { controller, .. } => {
                let fits = |line: &&str| {
                    line.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == controller))
                };
                file.lines().find(fits)?.splitn(3, ':').nth(2)?.to_owned()
            }
            Self::Group { .. } | Self::ResctrlGroup { .. } | Self::IoAlloc => file.trim().to_owned(),
            Self::ResctrlTask { .. } => resctrl::task_group(file)?,
            Self::Schemata { resource } => resctrl::line_values(file, resource)?,
            Self::IoAllocWays => resctrl::line_values(file, "")?,
            Self::UnitQuota { .. } => Unit::new(file).quota()?,
            Self::UnitDeviceWeight { path, .. } => Unit::new(file).device_weight(path)?,
            Self::UnitIo { .. } => Unit::new(file).accounting()?,
        })
    }

    /// Text to write for a value. A weight of `default` cannot be written as such: see `restore`.
    #[must_use]
    pub fn text(&self, value: &str) -> String {
        match self {
            // Nothing at all would be no write.
            Self::CpuList if value.is_empty() => "\n".to_owned(),
            Self::Plain
            | Self::Elevator
            | Self::Jiffies
            | Self::IoEnabled
            | Self::CpusetEnabled
            | Self::CpuList
            | Self::Partition
            | Self::Scheduling
            | Self::Affinity
            | Self::Interrupt { .. }
            | Self::ThreadCgroup { .. }
            | Self::Group { .. }
            | Self::ResctrlGroup { .. }
            | Self::ResctrlTask { .. } => value.to_owned(),
            // Both are refused without a line feed (`rdtgroup_schemata_write()`).
            Self::Schemata { resource } => format!("{resource}:{value}\n"),
            Self::IoAllocWays => format!("{value}\n"),
            Self::IoAlloc => (if value == "enabled" { "1" } else { "0" }).to_owned(),
            Self::DeviceWeight { dev }
            | Self::IoWeight { dev }
            | Self::IoCostModel { dev }
            | Self::IoCostQos { dev } => format!("{dev} {value}"),
            // v1 takes 0 for "no limit" and knows no `max`.
            Self::Throttle { dev } => format!("{dev} {}", if value == "max" { "0" } else { value }),
            Self::IoMax { dev, key } => format!("{dev} {key}={value}"),
            Self::IoLatency { dev } => format!("{dev} target={value}"),
            Self::UnitQuota { .. } => systemd::quota_assignments(value),
            Self::UnitDeviceWeight { path, .. } => format!("IODeviceWeight={path} {value}"),
            Self::UnitIo { .. } => format!("IOAccounting={value}"),
        }
    }

    /// The value of a line, or of a cpuset's file, that is not there; `None` for forms that always
    /// have a value.
    #[must_use]
    pub fn unset(&self) -> Option<&'static str> {
        match self {
            Self::DeviceWeight { .. } | Self::IoWeight { .. } | Self::UnitDeviceWeight { .. } => {
                Some("default")
            }
            Self::IoCostModel { .. } => Some(MODEL_UNSET),
            Self::IoCostQos { .. } => Some(QOS_UNSET),
            Self::Throttle { .. } | Self::IoMax { .. } | Self::IoLatency { .. } => Some("max"),
            Self::CpuList => Some(""),
            Self::Partition => Some("member"),
            _ => None,
        }
    }

    /// Whether a directory is meant, which a write makes or removes.
    #[must_use]
    pub(crate) fn is_group(&self) -> bool {
        matches!(self, Self::Group { .. } | Self::ResctrlGroup { .. })
    }

    /// The unit of systemd whose property it is.
    #[must_use]
    pub fn unit(&self) -> Option<&str> {
        match self {
            Self::UnitQuota { unit } | Self::UnitDeviceWeight { unit, .. } | Self::UnitIo { unit } => {
                Some(unit)
            }
            _ => None,
        }
    }

    /// Value as shown to a user.
    #[must_use]
    pub fn shown(&self, value: &str) -> String {
        match self {
            Self::Throttle { dev } => format!("{dev} {value}"),
            Self::CpuList if value.is_empty() => "none".to_owned(),
            Self::IoAlloc => value.to_owned(),
            Self::Schemata { .. } | Self::IoAllocWays => self.text(value).trim_end().to_owned(),
            _ if self.unit().is_some() => self.text(value).replace('\n', " "),
            _ => self.text(value),
        }
    }

    /// Whether a value that was read is what the kernel shows after `written` was written.
    #[must_use]
    pub fn is(&self, found: &str, written: &str) -> bool {
        if found == written {
            return true;
        }
        if *self == Self::Scheduling {
            let parsed = found.parse::<Attr>().ok().zip(written.parse::<Attr>().ok());
            return parsed.is_some_and(|(found, written)| found.is(&written));
        }
        match (self, found.parse::<u64>(), written.parse::<u64>()) {
            (Self::Jiffies, Ok(found), Ok(written)) => text::jiffies_readbacks(written).contains(&found),
            // "008" and "8" are one number.
            (_, Ok(found), Ok(written)) => found == written,
            _ => false,
        }
    }

    /// Whether a value that was read is what the kernel left of `old`: a thread's CPUs are cut to
    /// those of its cpuset that are online, an interrupt's to those that its chip can send it to,
    /// and a partition that it no longer keeps is invalid.
    pub(crate) fn is_left_of(&self, found: &str, old: &str) -> bool {
        if *self == Self::Partition {
            return found.strip_prefix(old).is_some_and(|reason| reason.starts_with(" invalid"));
        }
        let cpus = |list: &str| text::cpu_list(list).filter(|cpus| !cpus.is_empty());
        matches!(self, Self::Affinity | Self::Interrupt { .. })
            && cpus(found).zip(cpus(old)).is_some_and(|(found, old)| found.is_subset(&old))
    }
}

impl Target {
    /// Target in the host's file system.
    #[must_use]
    pub fn host(path: impl Into<PathBuf>, form: Form) -> Self {
        Self { place: Place::Host, path: path.into(), form }
    }

    /// A file of the same place in the same directory.
    #[must_use]
    pub(crate) fn sibling(&self, name: &str) -> Self {
        Self { place: self.place.clone(), path: self.path.with_file_name(name), form: Form::Plain }
    }

    /// Policy and parameters of a thread that started at `start`.
    #[must_use]
    pub fn scheduling(pid: u32, tid: u32, start: u64) -> Self {
        let path = format!("/proc/{pid}/task/{tid}/sched");
        Self { place: Place::Thread { pid, tid, start }, path: path.into(), form: Form::Scheduling }
    }

    /// CPUs that a thread that started at `start` may use.
    #[must_use]
    pub fn affinity(pid: u32, tid: u32, start: u64) -> Self {
        let path = format!("/proc/{pid}/task/{tid}/status");
        Self { place: Place::Thread { pid, tid, start }, path: path.into(), form: Form::Affinity }
    }

    /// CPUs that an interrupt may come to.
    #[must_use]
    pub fn interrupt(vector: &Vector) -> Self {
        let form = Form::Interrupt { vector: vector.file.clone(), inode: vector.inode };
        Self::host(irq::affinity_file(vector.number), form)
    }

    /// The cgroup of a thread in the v1 hierarchy of `controller` at `mount`.
    #[must_use]
    pub fn thread_cgroup(pid: u32, tid: u32, start: u64, controller: &str, mount: &Path) -> Self {
        let path = format!("/proc/{pid}/task/{tid}/cgroup");
        let form = Form::ThreadCgroup { controller: controller.to_owned(), mount: mount.to_owned() };
        Self { place: Place::Thread { pid, tid, start }, path: path.into(), form }
    }

    /// The group of a thread in the resctrl at `mount`.
    #[must_use]
    pub fn resctrl_task(pid: u32, tid: u32, start: u64, mount: &Path) -> Self {
        let path = format!("/proc/{pid}/task/{tid}/cpu_resctrl_groups");
        let form = Form::ResctrlTask { mount: mount.to_owned() };
        Self { place: Place::Thread { pid, tid, start }, path: path.into(), form }
    }

    /// Whether a value that was read is the old one, to the byte; except that a policy without a
    /// time slice equals the one that the kernel shows with its default slice.
    pub(crate) fn is_old(&self, found: &str, old: &str) -> bool {
        found == old || (self.form == Form::Scheduling && self.form.is(found, old))
    }

    /// Whether the CPUs of an interrupt are meant.
    pub(crate) fn is_interrupt(&self) -> bool {
        matches!(self.form, Form::Interrupt { .. })
    }

    /// Whether a thread or an interrupt is meant, which may end at any time, and takes its settings
    /// with it.
    pub(crate) fn may_end(&self) -> bool {
        matches!(self.place, Place::Thread { .. }) || self.is_interrupt()
    }

    /// Whether an error of a write is the kernel's way to say that no program may set this: it
    /// manages the interrupt itself (`write_irq_affinity()`; `EIO` before Linux 6.9).
    pub(crate) fn is_fixed(&self, error: &io::Error) -> bool {
        let code = error.raw_os_error().map(Errno::from_raw_os_error);
        self.is_interrupt() && matches!(code, Some(Errno::IO | Errno::PERM))
    }

    /// Whether the file is of the host's debugfs, which may be unmounted while the kernel keeps
    /// what was written there.
    pub(crate) fn in_debugfs(&self) -> bool {
        self.place == Place::Host && self.path.starts_with("/sys/kernel/debug")
    }

    /// Whether the file belongs to a cgroup of the host.
    pub(crate) fn in_cgroup(&self) -> bool {
        let in_sys = |dir| self.path.starts_with(Path::new(dir));
        let other = self.form.is_group() || self.is_interrupt() || self.in_debugfs();
        self.place == Place::Host && !other && !in_sys("/sys/block") && !in_sys("/sys/devices")
    }

    /// Device number of the line that is meant, if the file has one line per device.
    pub(crate) fn dev(&self) -> Option<&str> {
        match &self.form {
            Form::DeviceWeight { dev }
            | Form::IoWeight { dev }
            | Form::IoCostModel { dev }
            | Form::IoCostQos { dev }
            | Form::Throttle { dev }
            | Form::IoMax { dev, .. }
            | Form::IoLatency { dev }
            | Form::UnitDeviceWeight { dev, .. } => Some(dev),
            _ => None,
        }
    }
}

impl fmt::Display for Target {
    /// `/sys/block/sda/queue/scheduler`, or `vm0:/sys/block/vda/queue/scheduler` inside a guest. A
    /// unit's property is no file: `/sys/fs/cgroup/plc.scope: CPUQuota`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(_), Some(dir), Some(name)) =
            (self.form.unit(), self.path.parent(), self.path.file_name())
        {
            return write!(f, "{}: {}", dir.display(), name.to_string_lossy());
        }
        if let Place::Guest { vm, .. } = &self.place {
            write!(f, "{vm}:")?;
        }
        write!(f, "{}", self.path.display())
    }
}

#[cfg(test)]
mod tests;
