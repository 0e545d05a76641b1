//! Properties of systemd's units, as `systemctl` shows and sets them.
//!
//! `systemctl` is asked because it needs no message bus as root, and is wherever systemd is.

mod systemctl;

use std::io;

/// Properties that are read, each on a line of its own.
const PROPERTIES: &str = "LoadState,ControlGroup,CPUQuotaPerSecUSec,CPUQuotaPeriodUSec,CPUWeight,IODeviceWeight,\
                          IOAccounting,IODeviceLatencyTargetUSec";
/// Text of systemd for a time that is not set, and for no limit.
pub(crate) const INFINITY: &str = "infinity";
/// A second, in us.
pub(crate) const SECOND: u64 = 1_000_000;
/// 1 % of a CPU, in us per second: drop-in files of systemd 252 hold whole percents.
pub(crate) const PERCENT: u64 = 10_000;

/// Output of `systemctl show` for one unit.
pub(crate) struct Unit<'t> {
    text: &'t str,
}

impl<'t> Unit<'t> {
    /// Unit whose properties `systemctl show` has printed as `text`.
    pub(crate) fn new(text: &'t str) -> Self {
        Self { text }
    }

    /// The values of a property, which has a line for each.
    fn all(&self, name: &'static str) -> impl Iterator<Item = &'t str> {
        self.text.lines().filter_map(move |line| line.strip_prefix(name)?.strip_prefix('='))
    }

    /// The first value of a property.
    pub(crate) fn first(&self, name: &'static str) -> Option<&'t str> {
        self.all(name).next()
    }

    /// Whether systemd has the unit.
    pub(crate) fn is_loaded(&self) -> bool {
        self.first("LoadState") == Some("loaded")
    }

    /// Paths of devices with their weights.
    pub(crate) fn device_weights(&self) -> Option<Vec<(&'t str, u64)>> {
        let lines = self.all("IODeviceWeight").filter(|line| !line.is_empty());
        lines.map(|line| line.rsplit_once(' ').and_then(|(path, w)| Some((path, w.parse().ok()?)))).collect()
    }

    /// `CPUQuota=` and its period, both in us or `infinity`.
    pub(crate) fn quota(&self) -> Option<String> {
        let time = |name| time_us(self.first(name)?);
        Some(format!("{} {}", time("CPUQuotaPerSecUSec")?, time("CPUQuotaPeriodUSec")?))
    }

    /// Weight of a device, or `default`.
    pub(crate) fn device_weight(&self, path: &str) -> Option<String> {
        let weights = self.device_weights()?;
        let weight = weights.iter().rev().find(|(other, _)| *other == path);
        Some(weight.map_or_else(|| "default".to_owned(), |(_, weight)| weight.to_string()))
    }

    /// Whether it has a latency target for any device.
    pub(crate) fn has_latency_target(&self) -> bool {
        self.all("IODeviceLatencyTargetUSec").any(|target| !target.is_empty())
    }

    /// `IOAccounting=`: `yes` or `no`.
    pub(crate) fn accounting(&self) -> Option<String> {
        self.first("IOAccounting").filter(|v| ["yes", "no"].contains(v)).map(str::to_owned)
    }
}

/// Arguments of `systemctl set-property` for a quota as [`Unit::quota`] gives it, a line for each.
pub(crate) fn quota_assignments(value: &str) -> String {
    let (quota, period) = value.split_once(' ').unwrap_or((value, INFINITY));
    let quota = quota.parse().map_or_else(|_| String::new(), percent);
    let period = if period == INFINITY { String::new() } else { format!("{period}us") };
    format!("CPUQuota={quota}\nCPUQuotaPeriodSec={period}")
}

/// Arguments that set the weights of the other devices again, because one cannot be removed by
/// itself.
pub(crate) fn without_weight(path: &str, text: &str) -> Option<String> {
    let mut out = "IODeviceWeight=".to_owned();
    let weights = Unit::new(text).device_weights()?;
    for (other, weight) in weights.into_iter().filter(|(other, _)| *other != path) {
        out.push_str(&format!("\nIODeviceWeight={other} {weight}"));
    }
    Some(out)
}

/// `systemctl show` of the properties that matter here.
pub(crate) fn show(unit: &str) -> io::Result<String> {
    systemctl::run(&["show", "--property", PROPERTIES, "--", unit])
}

/// Sets properties until the unit ends or the host is restarted.
pub(crate) fn set(unit: &str, assignments: &str) -> io::Result<()> {
    let mut args = vec!["set-property", "--runtime", "--", unit];
    args.extend(assignments.lines());
    systemctl::run(&args).map(|_| ())
}

/// `CPUQuota=` of a time in each second.
fn percent(us: u64) -> String {
    let (whole, part) = (us / PERCENT, us % PERCENT / 100);
    if part == 0 { format!("{whole}%") } else { format!("{whole}.{part:02}%") }
}

/// A time as systemd shows it (`systemd.time(7)`), such as `1min 2.500s`, in us; `infinity` as it
/// is.
pub(crate) fn time_us(text: &str) -> Option<String> {
    if text == INFINITY {
        return Some(text.to_owned());
    }
    let mut sum: u64 = 0;
    for word in text.split(' ') {
        let end = word.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(word.len());
        let (number, unit) = word.split_at(end);
        let unit: u64 = match unit {
            "d" => 86_400_000_000,
            "h" => 3_600_000_000,
            "min" => 60_000_000,
            "s" => SECOND,
            "ms" => 1_000,
            "us" => 1,
            _ if word == "0" => 1,
            _ => return None,
        };
        let (whole, part) = number.split_once('.').unwrap_or((number, ""));
        sum = sum.checked_add(whole.parse::<u64>().ok()?.checked_mul(unit)?)?;
        if !part.is_empty() {
            let digits = u32::try_from(part.len()).ok()?;
            let scaled = part.parse::<u64>().ok()?.checked_mul(unit)?;
            sum = sum.checked_add(scaled / 10_u64.checked_pow(digits)?)?;
        }
    }
    Some(sum.to_string())
}
