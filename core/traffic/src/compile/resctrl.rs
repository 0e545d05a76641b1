//! Schemata of resctrl: memory bandwidth and ways of a cache for a group of threads.
//!
//! Source: `Documentation/filesystems/resctrl.rst`. Memory bandwidth is that of CPUs: DMA of
//! devices is not tagged and not limited, so of a VM's I/O only the copies made by its threads
//! count. Accuracy of Intel's throttle: Sohal et al., A Closer Look at Intel RDT (RTNS 2022).

use rtvirtio_text::shell_word;
use rtvirtio_units::Enforcement;
use serde::Serialize;

use super::bytes_only;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Part, Setting};
use crate::tspec::{Direction, Tspec};

/// Unit of AMD's memory bandwidth, in bytes per second: 1/8 GB/s.
const EIGHTH_GB: f64 = 125e6;
/// Unit of `mba_MBps`, in bytes per second: 1 MiB/s.
const MIB: f64 = 1_048_576.0;

/// Form of `MB:` on a host.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "form", rename_all = "snake_case")]
pub enum MemoryControl {
    /// Percent of the bandwidth of a resctrl domain: Intel, and MPAM.
    Percent {
        /// Smallest percentage (`info/MB/min_bandwidth`).
        least: u32,
        /// Step of percentages (`info/MB/bandwidth_gran`).
        step: u32,
        /// Bytes per second at 100 %, as measured; `None` when it is not known.
        full: Option<f64>,
        /// Whether the control is MPAM's, which limits bytes, instead of Intel's, which delays
        /// requests.
        mpam: bool,
    },
    /// Multiples of 1/8 GB per second: AMD.
    EighthGb {
        /// Largest multiple that is accepted.
        most: u32,
    },
    /// MiB per second, by the kernel's own control loop (`mba_MBps`).
    MibPerSecond,
}

/// Ways of a cache for a resctrl group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cache {
    /// `cbm_mask`: bitmap of all ways.
    pub all: u64,
    /// `min_cbm_bits`: least number of ways.
    pub least: u32,
    /// `shareable_bits`: bitmap of ways that devices write to.
    pub shareable: u64,
    /// Number of ways for the group.
    pub ways: u32,
}

impl Cache {
    /// Bitmap of as many adjacent ways as asked, from the top, without ways that devices write to
    /// if enough remain; `None` when the cache has too few.
    #[must_use]
    pub fn mask(&self) -> Option<u64> {
        let ways = self.ways.max(self.least).max(1);
        let fits = |from: u64| {
            let mask = 1u64.checked_shl(ways).map_or(u64::MAX, |bit| bit - 1);
            let places = (0..=64u32.checked_sub(ways)?).rev();
            places.map(|shift| mask << shift).find(|mask| mask & !from == 0)
        };
        fits(self.all & !self.shareable).or_else(|| fits(self.all))
    }
}

/// A group of resctrl, with the host's controls.
#[derive(Clone, Debug, PartialEq)]
pub struct ResctrlPlace {
    /// Directory of the group, such as `/sys/fs/resctrl/vm0`.
    pub group: String,
    /// Ids of the memory bandwidth domains, such as one for each L3 cache.
    pub memory_domains: Vec<u32>,
    /// Form of `MB:`; `None` when the host has no memory bandwidth control.
    pub memory: Option<MemoryControl>,
    /// Ids of the L3 cache's domains.
    pub cache_domains: Vec<u32>,
    /// Ways of the L3 cache for the group; `None` leaves them unchanged.
    pub cache: Option<Cache>,
    /// Ids of the threads to put into the group.
    pub tasks: Vec<u32>,
}

fn line(resource: &str, domains: &[u32], value: &str) -> String {
    let all: Vec<String> = domains.iter().map(|domain| format!("{domain}={value}")).collect();
    format!("{resource}:{}", all.join(";"))
}

impl MemoryControl {
    /// Value for `MB:`, its bytes per second, and its enforcement.
    ///
    /// # Errors
    /// [`CompileError::Range`] for a rate that the control cannot have,
    /// [`CompileError::Missing`] where 100 % are not known.
    pub fn value(self, rate: u64) -> Result<(String, f64, Enforcement), CompileError> {
        let actuator = Actuator::Resctrl;
        let rate = rate as f64;
        let range = |least: f64, most: f64, remedy| CompileError::Range {
            actuator,
            what: "a rate in bytes",
            value: rate,
            least,
            most,
            remedy,
        };
        match self {
            Self::Percent { least, step, full: Some(full), mpam } if full > 0.0 => {
                let step = step.max(1);
                let percent = ((rate / full * 100.0) as u32).min(100) / step * step;
                if percent < least {
                    let remedy = "this is the least that the CPU can be held to; limit the I/O instead";
                    return Err(range(full * f64::from(least) / 100.0, full, remedy));
                }
                let worth = if mpam { Enforcement::Cap } else { Enforcement::Hint };
                Ok((percent.to_string(), full * f64::from(percent) / 100.0, worth))
            }
            Self::Percent { .. } => Err(CompileError::Missing {
                actuator,
                what: "the memory bandwidth at 100 % is not known here: give what you measured, --full-bandwidth 12GB/s"
                    .to_owned(),
            }),
            Self::EighthGb { most } => {
                let units = (rate / EIGHTH_GB) as u32;
                if units == 0 || units > most {
                    let remedy = "AMD's unit is 125 MB/s; limit the I/O instead";
                    return Err(range(EIGHTH_GB, f64::from(most) * EIGHTH_GB, remedy));
                }
                Ok((units.to_string(), f64::from(units) * EIGHTH_GB, Enforcement::Cap))
            }
            Self::MibPerSecond => {
                let mib = (rate / MIB) as u64;
                if mib == 0 {
                    return Err(range(MIB, u32::MAX.into(), "the unit is 1 MiB/s; limit the I/O instead"));
                }
                Ok((mib.to_string(), mib as f64 * MIB, Enforcement::Hint))
            }
        }
    }
}

pub(super) fn schemata(
    tspec: &Tspec,
    direction: Direction,
    place: &ResctrlPlace,
) -> Result<Compiled, CompileError> {
    let actuator = Actuator::Resctrl;
    bytes_only(actuator, tspec, "use io-domain, io-max or qemu, which count requests")?;
    let Some(control) = &place.memory else {
        let what =
            "this host's resctrl has no memory bandwidth control (info/MB): use an actuator of the I/O";
        return Err(CompileError::Missing { actuator, what: what.to_owned() });
    };
    let (value, rate, worth) = control.value(tspec.rate)?;
    // The manuals do not bound the windows over which the hardware counts: the rate is known, the
    // burst not.
    let mut compiled = Compiled::new(actuator, direction, tspec, None, worth);
    compiled.rate = Part::new(Some(tspec.rate as f64), Some(rate));
    compiled = match control {
        MemoryControl::MibPerSecond => {
            compiled.note("a control loop of the kernel follows the rate about once a second")
        }
        MemoryControl::Percent { mpam: false, .. } => {
            compiled.note("Intel delays a core's requests in steps: what passes depends on the program")
        }
        _ => compiled,
    };
    let path = format!("{}/schemata", place.group);
    compiled = compiled
        .set(Setting::Command { line: format!("mkdir -p {}", shell_word(&place.group)) })
        .set(Setting::File { path: path.clone(), text: line("MB", &place.memory_domains, &value) });
    if let Some(cache) = place.cache {
        let Some(mask) = cache.mask() else {
            return Err(CompileError::Range {
                actuator,
                what: "a number of ways",
                value: cache.ways.into(),
                least: cache.least.into(),
                most: cache.all.count_ones().into(),
                remedy: "ask for fewer ways",
            });
        };
        let text = line("L3", &place.cache_domains, &format!("{mask:x}"));
        compiled = compiled.set(Setting::File { path, text });
        if mask & cache.shareable != 0 {
            compiled = compiled
                .note("the ways include those into which devices write: DMA may evict what is in them");
        }
    }
    let tasks = format!("{}/tasks", place.group);
    for tid in &place.tasks {
        compiled = compiled.set(Setting::File { path: tasks.clone(), text: tid.to_string() });
    }
    let both = "reads and writes of memory count together, of CPUs only: DMA of devices is not limited";
    Ok(compiled.note(both).note("burst and peak have no field: nothing bounds what passes in a short time"))
}
