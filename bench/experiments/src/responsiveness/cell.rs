//! The cells of the matrix: application, loads, schedulers, plane.

use std::fmt;
use std::str::FromStr;

use anyhow::{bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

/// Bytes of each VM's disk.
pub const DISK: u64 = crate::iod_startup::DISK;
/// Bytes of the part that each reader or writer cycles through.
pub const PART: u64 = 48 << 20;
/// Most readers and writers of a load.
pub const MAX_STREAMS: u64 = 5;
/// Offset of these parts on the guest's disk: the applications' file system is before.
pub const LOAD_FROM: u64 = DISK - MAX_STREAMS * PART;
/// Bytes of a sequential request: a file read in order is read by read-ahead of 128 KiB.
const IN_ORDER: &str = "128k";
/// Bytes of a random request.
const RANDOM: &str = "4k";

/// An application, as the paper has three of different sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct App {
    /// Name in results and options.
    pub name: &'static str,
    /// A program of this host that ends by itself once it has started.
    pub command: &'static [&'static str],
}

/// In the order of the size of the program with its libraries: 4, 15 and 51 MB on Debian 12.
pub const APPS: [App; 3] = [
    App { name: "small", command: &["bash", "-c", "true"] },
    App { name: "medium", command: &["qemu-img", "--version"] },
    App { name: "large", command: &["qemu-system-x86_64", "--version"] },
];

/// The load in a guest, by the paper's names (section V-A), or of the host.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Number of reading processes.
    pub readers: u64,
    /// Number of writing processes.
    pub writers: u64,
    /// Whether positions are random; else sequential.
    pub random: bool,
    /// Offset on the disk of the part of the first process.
    from: u64,
}

/// Names of all guest loads.
pub const GUEST_LOADS: [&str; 7] =
    ["none", "1r-seq", "5r-seq", "1r-rand", "5r-rand", "2r2w-seq", "2r2w-rand"];
/// Names of all host loads.
pub const HOST_LOADS: [&str; 3] = ["none", "1r", "5r"];
/// I/O schedulers of Linux. CFQ, which the paper has, left the kernel in 5.0.
pub const SCHEDULERS: [&str; 4] = ["bfq", "mq-deadline", "kyber", "none"];

impl Load {
    /// The load of a name of [`GUEST_LOADS`].
    fn of_guest(name: &str) -> Option<Self> {
        let (readers, writers) = match name.split('-').next()? {
            "none" => (0, 0),
            "1r" => (1, 0),
            "5r" => (5, 0),
            "2r2w" => (2, 2),
            _ => return None,
        };
        let random = name.ends_with("-rand");
        GUEST_LOADS.contains(&name).then_some(Self { readers, writers, random, from: LOAD_FROM })
    }

    /// The sequential readers of a name of [`HOST_LOADS`].
    #[must_use]
    pub fn of_host(name: &str) -> Option<Self> {
        let place = HOST_LOADS.iter().position(|known| *known == name)?;
        Some(Self { readers: [0, 1, MAX_STREAMS][place], writers: 0, random: false, from: DISK })
    }

    /// fio's arguments, bypassing the page cache: processes, each with an I/O context of its own;
    /// empty without load.
    #[must_use]
    pub fn fio(&self, disk: &str) -> Vec<String> {
        let Self { readers, writers, random, from } = *self;
        if readers + writers == 0 {
            return Vec::new();
        }
        let block = if random { RANDOM } else { IN_ORDER };
        let mut args: Vec<String> =
            ["fio", "--direct=1", "--ioengine=psync", "--time_based", "--runtime=24h"]
                .map(str::to_owned)
                .to_vec();
        args.extend([format!("--filename={disk}"), format!("--bs={block}"), format!("--size={PART}")]);
        for i in 0..readers + writers {
            let kind = if i < readers { "read" } else { "write" };
            let rw = if random { format!("rand{kind}") } else { kind.to_owned() };
            let at = from + i * PART;
            args.extend([format!("--name={kind}{i}"), format!("--rw={rw}"), format!("--offset={at}")]);
        }
        args
    }
}

/// Way in which the host serves and favours the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Plane {
    /// No favouring: QEMU and the host's readers are queues of one group, as in the paper.
    Default,
    /// No favouring, with QEMU in a cgroup of its own, as libvirt starts it.
    Grouped,
    /// Cgroups of `Grouped`, with the VM's weight raised while its guest reports a start.
    Kernel,
    /// The I/O domain serves the disk, and the guest's requests of the start are real-time. The
    /// host's readers are another disk of the I/O domain, which cannot order reads that bypass it.
    Domain,
}

impl Plane {
    /// All planes, in the order of the figures.
    pub const ALL: [Self; 4] = [Self::Default, Self::Grouped, Self::Kernel, Self::Domain];

    /// Name in options and results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Grouped => "grouped",
            Self::Kernel => "kernel",
            Self::Domain => "domain",
        }
    }
}

impl fmt::Display for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Plane {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|p| p.name() == text).ok_or(format!("no plane `{text}`: there is {known}"))
    }
}

/// Conditions under which the planes are compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cell {
    /// The device, such as `microsd`.
    pub device: String,
    /// Name of the application ([`App::name`]).
    pub app: String,
    /// Name of the guest's load, one of [`GUEST_LOADS`].
    pub guest_load: String,
    /// Name of the host's load, one of [`HOST_LOADS`].
    pub host_load: String,
    /// I/O scheduler in the guest.
    pub guest_scheduler: String,
    /// I/O scheduler of the host; under [`Plane::Domain`] it is `none` instead.
    pub host_scheduler: String,
}

impl Cell {
    /// Load in the guest; `None` for an unknown name.
    #[must_use]
    pub fn guest(&self) -> Option<Load> {
        Load::of_guest(&self.guest_load)
    }

    /// Load of the host; `None` for an unknown name.
    #[must_use]
    pub fn host(&self) -> Option<Load> {
        Load::of_host(&self.host_load)
    }

    /// The cell without load.
    #[must_use]
    pub fn idle(&self) -> Self {
        Self { guest_load: "none".to_owned(), host_load: "none".to_owned(), ..self.clone() }
    }

    /// Names of the loads, as in the figures.
    #[must_use]
    pub fn loads(&self) -> String {
        format!("{}, host {}", self.guest_load, self.host_load)
    }
}

/// Cells and planes that are measured.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Applications: small (bash), medium (qemu-img), large (qemu-system-x86_64).
    #[arg(long, value_delimiter = ',', value_name = "APPS", default_value = "medium")]
    pub apps: Vec<String>,
    /// Loads in the guest: readers and writers in order or at random positions.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LOADS",
        default_value = "none,1r-seq,5r-seq,1r-rand,5r-rand,2r2w-seq,2r2w-rand"
    )]
    pub guest_loads: Vec<String>,
    /// Loads of the host: readers in order.
    #[arg(long, value_delimiter = ',', value_name = "LOADS", default_value = "none,1r,5r")]
    pub host_loads: Vec<String>,
    /// I/O schedulers in the guest: bfq, mq-deadline, kyber, none (CFQ left the kernel in 5.0).
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_value = "bfq")]
    pub guest_schedulers: Vec<String>,
    /// I/O schedulers of the host, the same ones; `kernel` is measured under bfq only.
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_value = "bfq")]
    pub host_schedulers: Vec<String>,
    /// default: as in the paper; grouped: the VM in a cgroup of its own; kernel: its weight raised
    /// while something starts; domain: the I/O domain.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "PLANES",
        default_value = "default,grouped,kernel,domain"
    )]
    pub planes: Vec<Plane>,
}

impl Choice {
    /// Refuses unknown names.
    ///
    /// # Errors
    /// Names the known ones.
    pub fn check(&self) -> anyhow::Result<()> {
        let apps = APPS.map(|app| app.name);
        let lists: [(&str, &[String], &[&str]); 5] = [
            ("application", &self.apps, &apps),
            ("guest load", &self.guest_loads, &GUEST_LOADS),
            ("host load", &self.host_loads, &HOST_LOADS),
            ("guest scheduler", &self.guest_schedulers, &SCHEDULERS),
            ("host scheduler", &self.host_schedulers, &SCHEDULERS),
        ];
        for (what, names, known) in lists {
            if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
                bail!("no {what} `{unknown}`: there is {}", known.join(", "));
            }
        }
        let runs = self.cells("").iter().map(|(_, planes)| planes.len()).sum::<usize>();
        ensure!(runs > 0, "nothing is left to measure: `kernel` needs `bfq` among the host schedulers");
        Ok(())
    }

    /// The cells of a device, each with its planes. Only BFQ has weights, so the kernel's plane is
    /// under BFQ alone; the I/O domain has no scheduler of the host below it, and comes once.
    #[must_use]
    pub fn cells(&self, device: &str) -> Vec<(Cell, Vec<Plane>)> {
        let mut all = Vec::new();
        for app in &self.apps {
            for guest_scheduler in &self.guest_schedulers {
                for (i, host_scheduler) in self.host_schedulers.iter().enumerate() {
                    for guest_load in &self.guest_loads {
                        for host_load in &self.host_loads {
                            let fits = |plane: &Plane| match plane {
                                Plane::Kernel => host_scheduler == "bfq",
                                Plane::Domain => i == 0,
                                Plane::Default | Plane::Grouped => true,
                            };
                            let planes = self.planes.iter().copied().filter(fits).collect();
                            let cell = Cell {
                                device: device.to_owned(),
                                app: app.clone(),
                                guest_load: guest_load.clone(),
                                host_load: host_load.clone(),
                                guest_scheduler: guest_scheduler.clone(),
                                host_scheduler: host_scheduler.clone(),
                            };
                            all.push((cell, planes));
                        }
                    }
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn choice() -> Choice {
        Choice {
            apps: names(&["small", "large"]),
            guest_loads: names(&GUEST_LOADS),
            host_loads: names(&HOST_LOADS),
            guest_schedulers: names(&["bfq"]),
            host_schedulers: names(&["bfq", "none"]),
            planes: Plane::ALL.to_vec(),
        }
    }

    #[test]
    fn every_name_is_a_load_of_its_size() {
        for name in GUEST_LOADS {
            let load = Load::of_guest(name).unwrap();
            let args = load.fio("/dev/vda");
            let jobs = args.iter().filter(|a| a.starts_with("--name=")).count() as u64;
            assert_eq!(jobs, load.readers + load.writers, "{name}");
            assert_eq!(args.iter().any(|a| a.starts_with("--rw=rand")), load.random, "{name}");
            let writes =
                args.iter().filter(|a| a.starts_with("--rw=") && a.ends_with("write")).count() as u64;
            assert_eq!(writes, load.writers, "{name}");
            // All parts are on the guest's disk, behind the applications.
            let offsets = args.iter().filter_map(|a| a.strip_prefix("--offset=")?.parse::<u64>().ok());
            assert!(offsets.clone().all(|at| at >= LOAD_FROM && at + PART <= DISK), "{name}");
        }
        assert_eq!(HOST_LOADS.map(|name| Load::of_host(name).unwrap().readers), [0, 1, 5]);
        let args = Load::of_host("5r").unwrap().fio("/dev/loop0");
        let offsets = args.iter().filter_map(|a| a.strip_prefix("--offset=")?.parse::<u64>().ok());
        assert!(offsets.clone().all(|at| at >= DISK && at + PART <= 2 * DISK), "behind the guest's disk");
        assert!(Load::of_host("2r").is_none() && Load::of_guest("1r").is_none());
    }

    #[test]
    fn planes_are_measured_where_they_are_something() {
        let cells = choice().cells("microsd");
        assert_eq!(cells.len(), 2 * 7 * 3 * 2);
        for (cell, planes) in &cells {
            let bfq = cell.host_scheduler == "bfq";
            assert_eq!(planes.contains(&Plane::Kernel), bfq);
            assert_eq!(planes.contains(&Plane::Domain), bfq, "once");
            assert!(planes.contains(&Plane::Default));
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        choice().check().unwrap();
        let wrong = Choice { host_schedulers: names(&["cfq"]), ..choice() };
        assert!(wrong.check().unwrap_err().to_string().contains("bfq, mq-deadline, kyber, none"));
        let nothing = Choice { planes: vec![Plane::Kernel], host_schedulers: names(&["none"]), ..choice() };
        assert!(nothing.check().unwrap_err().to_string().contains("bfq"));
        assert!("cgroup".parse::<Plane>().unwrap_err().contains("default, grouped, kernel, domain"));
        assert_eq!(Plane::ALL.map(|p| p.name().parse::<Plane>().unwrap()), Plane::ALL);
    }
}
