//! The configuration of the service: `/etc/rtvirtio/rtvirtiod.toml`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_placement::PlacementConfig;
use rtvirtio_planner::replan::{Policy, Timing};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::error::DaemonError;
use crate::observed::{Drift, KnobClass};

/// The configuration that the packages' service reads.
pub const CONFIG_FILE: &str = "/etc/rtvirtio/rtvirtiod.toml";

/// Autonomy of the service: what it sets without being asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Sets nothing, and shows what would be set.
    Observe,
    /// A new or changed contract waits until it is accepted; what was accepted is kept.
    Ask,
    /// Sets what the contracts ask for.
    #[default]
    Auto,
}

/// Reaction to a setting in force that another program has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriftPolicy {
    /// Reported, and left as it is.
    Report,
    /// Set again; after 3 restores within an hour it is reported and left.
    #[default]
    Restore,
    /// Left to the other program for good.
    Yield,
}

/// Plan of the contracts' disks that the service makes and keeps in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlanConfig {
    /// Whether plans are applied; the service's own mode where it is absent.
    pub mode: Option<Mode>,
    /// Least time between two changes of plan for observed reasons.
    #[serde(with = "rtvirtio_units::as_text")]
    pub every: Nanos,
    /// Time for which more load than declared, or a slower device, must last; twice as long for a
    /// missed target, which is judged over windows of five minutes.
    #[serde(with = "rtvirtio_units::as_text")]
    pub confirm: Nanos,
    /// Time without more load, a slower device or a miss until the plan no longer allows for them.
    #[serde(with = "rtvirtio_units::as_text")]
    pub horizon: Nanos,
}

impl Default for PlanConfig {
    fn default() -> Self {
        let Timing { every, confirm, horizon, .. } = Timing::default();
        let [every, confirm, horizon] = [every, confirm, horizon].map(Nanos::from_millis);
        Self { mode: None, every, confirm, horizon }
    }
}

impl PlanConfig {
    /// Time constants in milliseconds, as the planner takes them.
    #[must_use]
    pub fn timing(&self) -> Timing {
        let ms = |time: Nanos| time.0 / 1_000_000;
        let confirm = ms(self.confirm);
        Timing {
            every: ms(self.every),
            confirm,
            confirm_miss: confirm.saturating_mul(2),
            horizon: ms(self.horizon),
        }
    }
}

/// Reaction to a device that is slower than its profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Correction {
    /// Reported: what was predicted from the profile is said to hold no longer.
    #[default]
    Alarm,
    /// Reported, and planned for.
    Follow,
}

/// Profiles of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileConfig {
    /// Reaction to a device that is slower than its profile.
    pub correct: Correction,
}

/// Contents of `rtvirtiod.toml`, with defaults for absent keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Autonomy of the service.
    pub mode: Mode,
    /// Further spec files with contracts, besides those of the directory.
    pub specs: Vec<PathBuf>,
    /// Plan that the service makes and keeps in force; `None` makes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanConfig>,
    /// Profiles of devices.
    pub profile: ProfileConfig,
    /// Reaction to changed settings by kind; `restore` for an absent kind.
    pub drift: BTreeMap<KnobClass, DriftPolicy>,
    /// Reaction by name of a setting as `status` shows it, such as `weight of plc`; before `drift`.
    pub drift_of: BTreeMap<String, DriftPolicy>,
    /// Interval of scans for threads, contract files and VMs.
    #[serde(with = "rtvirtio_units::as_text")]
    pub scan: Nanos,
    /// Interval of comparisons of every setting with its journal.
    #[serde(with = "rtvirtio_units::as_text")]
    pub compare: Nanos,
    /// Interval of readings of QEMU's counters and the kernel's.
    #[serde(with = "rtvirtio_units::as_text")]
    pub observe: Nanos,
    /// Whether QEMU's counters of libvirt's VMs are read too: libvirt marks such a VM as tainted
    /// (`custom-monitor`) until it ends.
    pub monitor_of_libvirt: bool,
    /// OpenStack Placement to which the host's capacity is published; `None` publishes nothing.
    #[serde(skip_serializing)]
    pub placement: Option<PlacementConfig>,
    /// URI of the libvirt daemon whose VMs may carry contracts in their metadata; `None` asks none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            specs: Vec::new(),
            plan: None,
            profile: ProfileConfig::default(),
            drift: BTreeMap::new(),
            drift_of: BTreeMap::new(),
            scan: Nanos::from_millis(200),
            compare: Nanos::from_millis(5_000),
            observe: Nanos::from_millis(10_000),
            monitor_of_libvirt: false,
            placement: None,
            libvirt: None,
        }
    }
}

impl Config {
    /// Age from which a look at the host tells nothing of the present, as two comparisons are
    /// missing; at least 10 s, as a busy host is late.
    #[must_use]
    pub fn stale_after(&self) -> std::time::Duration {
        let twice = self.compare.0.max(self.scan.0).saturating_mul(2);
        std::time::Duration::from_nanos(twice.max(Self::SHORTEST_STALE.0))
    }

    /// Age from which observations of VMs are stale: two intervals of `observe`, at least 10 s.
    #[must_use]
    pub fn unobserved_after(&self) -> std::time::Duration {
        let twice = self.observe.0.saturating_mul(2);
        std::time::Duration::from_nanos(twice.max(Self::SHORTEST_STALE.0))
    }

    const SHORTEST_STALE: Nanos = Nanos::from_millis(10_000);
    /// Shortest `scan`, `compare` and `observe`: more would themselves be a load.
    const SHORTEST: Nanos = Nanos::from_millis(10);

    /// Reads a configuration; the default where there is no file.
    ///
    /// # Errors
    /// [`DaemonError::Config`] with the mistake.
    pub fn load(path: &Path) -> Result<Self, DaemonError> {
        let text = match rtvirtio_kernel::trusted::read_config_text(path, CONFIG_LIMIT) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(DaemonError::Io { action: "read", path: path.to_owned(), source }),
        };
        let wrong = |why: String| DaemonError::Config { path: path.to_owned(), why };
        let mut config: Self = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        if let Some(placement) = config.placement.take() {
            placement.auth().map_err(wrong)?;
            config.placement = Some(placement.below(path.parent().unwrap_or(Path::new(""))));
        }
        for (key, value) in [("scan", config.scan), ("compare", config.compare), ("observe", config.observe)]
        {
            if value < Self::SHORTEST {
                return Err(wrong(format!("`{key}` is {value}: at least {}", Self::SHORTEST)));
            }
        }
        if let Some(name) = config.drift_of.keys().find(|name| !is_setting(name)) {
            let known = SETTINGS.join("`, `");
            return Err(wrong(format!(
                "`drift_of`: there is no setting `{name}`: write its name as `rtvirtio status` shows it, such as `weight of plc`; names begin \
                 with `{known}`"
            )));
        }
        if config.plan.is_none() && config.profile.correct == Correction::Follow {
            return Err(wrong(
                "`profile.correct` is \"follow\": plans are made with `[plan]` only".to_owned(),
            ));
        }
        if let Some(plan) = config.plan.as_ref().filter(|plan| plan.horizon < plan.confirm) {
            let (horizon, confirm) = (plan.horizon, plan.confirm);
            return Err(wrong(format!("`plan.horizon` is {horizon}: at least `confirm`, {confirm}")));
        }
        Ok(config)
    }

    /// Policy of applying plans; `None` without `[plan]`.
    #[must_use]
    pub fn policy(&self) -> Option<Policy> {
        let mode = self.plan.as_ref()?.mode.unwrap_or(self.mode);
        // A service that only observes applies no plan either.
        Some(match (self.mode, mode) {
            (Mode::Observe, _) | (_, Mode::Observe) => Policy::Observe,
            (_, Mode::Ask) => Policy::Ask,
            (_, Mode::Auto) => Policy::Auto,
        })
    }

    /// Reaction to a changed setting: its own, else that of its kind, else `restore`.
    #[must_use]
    pub fn drift_policy(&self, drift: &Drift) -> DriftPolicy {
        let own = self.drift_of.get(&drift.knob);
        own.or_else(|| self.drift.get(&drift.class)).copied().unwrap_or_default()
    }

    /// Whether a revert may replace values that another program has set: when the policy of each
    /// that was seen is to restore. A journal that was cut off is not compared with the host, so
    /// where none was seen every policy must be to restore.
    #[must_use]
    pub fn puts_back_over(&self, seen: &[Drift]) -> bool {
        match seen {
            [] => self.drift.values().chain(self.drift_of.values()).all(|of| *of == DriftPolicy::Restore),
            seen => seen.iter().all(|drift| self.drift_policy(drift) == DriftPolicy::Restore),
        }
    }
}

/// Prefixes of the names of settings.
const SETTINGS: [&str; 25] = [
    "weight of ",
    "rbps limit of ",
    "wbps limit of ",
    "riops limit of ",
    "wiops limit of ",
    "I/O control for ",
    "elevator of ",
    "slice_idle of ",
    "timeout_sync of ",
    "low_latency of ",
    "max_budget of ",
    "strict_guarantees of ",
    "cgroup of ",
    "policy of ",
    "cpu.rt_runtime_us of ",
    "cpu.rt_period_us of ",
    "cpu.cfs_quota_us of ",
    "cpu.cfs_period_us of ",
    "cpu.rt.max of ",
    "cpu.max of ",
    "cpu.shares of ",
    "cpu.weight of ",
    "CPUQuota of ",
    "IODeviceWeight of ",
    "IOAccounting of ",
];

/// Whether a setting may have this name. VMs and devices need not exist yet.
fn is_setting(name: &str) -> bool {
    SETTINGS.iter().any(|begin| name.len() > begin.len() && name.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_is_the_default_and_a_mistake_is_named() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("rtvirtiod.toml");
        assert_eq!(Config::load(&path).unwrap(), Config::default());
        let text = "mode = \"ask\"\nscan = \"100ms\"\n[drift]\nweight = \"yield\"\n[drift_of]\n\"weight of plc\" = \"report\"\n";
        std::fs::write(&path, text).unwrap();
        let config = Config::load(&path).unwrap();
        assert_eq!((config.mode, config.scan), (Mode::Ask, Nanos::from_millis(100)));
        let policy = |class, knob: &str| {
            let (path, wanted, found) = (String::new(), String::new(), String::new());
            config.drift_policy(&Drift { knob: knob.to_owned(), path, class, wanted, found })
        };
        assert_eq!(policy(KnobClass::Weight, "weight of hist"), DriftPolicy::Yield);
        assert_eq!(policy(KnobClass::Weight, "weight of plc"), DriftPolicy::Report);
        assert_eq!(policy(KnobClass::Thread, "t"), DriftPolicy::Restore);
        std::fs::write(&path, "mode = \"ask\"\n[plan]\nmode = \"auto\"\nevery = \"2h\"\n").unwrap();
        let config = Config::load(&path).unwrap();
        assert_eq!(config.policy(), Some(Policy::Auto));
        let timing = Timing { every: 7_200_000, ..Timing::default() };
        assert_eq!(config.plan.as_ref().unwrap().timing(), timing);
        assert_eq!(Config { mode: Mode::Observe, ..config }.policy(), Some(Policy::Observe));
        assert_eq!(Config::default().policy(), None);
        std::fs::write(&path, "[plan]\n[profile]\ncorrect = \"follow\"\n").unwrap();
        assert_eq!(Config::load(&path).unwrap().profile.correct, Correction::Follow);
        assert_eq!(Config::default().profile.correct, Correction::Alarm);
        let text = "[placement]\nurl = \"http://h\"\nprovider = \"n\"\nfleet = \"site.toml\"\n";
        std::fs::write(&path, text).unwrap();
        let placement = Config::load(&path).unwrap().placement.unwrap();
        assert_eq!(
            (placement.fleet, placement.every),
            (dir.path().join("site.toml"), Nanos::from_millis(60_000))
        );
        for bad in [
            "[plan]\nhorizon = \"1s\"",
            "[plan]\nevry = \"1h\"",
            "[profile]\ncorrect = \"follow\"",
            "[plan]\n[profile]\ncorrect = \"widen\"",
            "[placement]\nurl = \"http://h\"\nprovider = \"n\"",
            "[placement]\nurl = \"h\"\nprovider = \"n\"\nfleet = \"f\"",
            "mode = \"autom\"",
            "scam = \"100ms\"",
            "scan = \"1ms\"",
            "[drift]\nwait = \"report\"",
            "[drift_of]\n\"wieght of p1\" = \"report\"",
            "[drift_of]\n\"weight\" = \"report\"",
        ] {
            std::fs::write(&path, bad).unwrap();
            assert!(matches!(Config::load(&path), Err(DaemonError::Config { .. })), "{bad}");
        }
    }
}
