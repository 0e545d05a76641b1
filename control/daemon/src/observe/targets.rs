//! An observation as clients read it: targets with verdicts, and the tails behind them.

use std::collections::BTreeMap;

use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

use super::TargetObservation;

/// Part of `/v1/observation` that is about targets.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ObservedTargets {
    /// Targets and tails of VMs, by name.
    pub vms: BTreeMap<String, ObservedVmTargets>,
}

/// Targets and disk tails of one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ObservedVmTargets {
    /// Age of the sample, in seconds.
    #[serde(default)]
    pub looked_s: Option<f64>,
    /// Reason why disks could not be read.
    #[serde(default)]
    pub disks_unseen: Option<String>,
    /// Verdicts, one for each target.
    #[serde(default)]
    pub targets: Vec<TargetObservation>,
    #[serde(default)]
    pub disks: Vec<DiskTails>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskTails {
    /// Device id in QEMU, or device and disk of the I/O domain.
    pub id: String,
    /// Tails of reads, writes and flushes.
    pub directions: Vec<DirectionTails>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DirectionTails {
    /// `read`, `write` or `flush`.
    pub direction: String,
    /// Requests in the window.
    pub n: u64,
    /// Tails, one for each percentile.
    pub tails: Vec<TailOf>,
}

/// Latency at one percentile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TailOf {
    /// Percentile of completion latency.
    pub percentile: Percentile,
    /// Latency at that percentile.
    pub latency_ns: Nanos,
}

impl ObservedVmTargets {
    /// Lines for people, one for each target: verdict, reason, and the tail of each disk at its
    /// percentile.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.targets.iter().map(|target| self.line(target)).collect()
    }

    fn line(&self, target: &TargetObservation) -> String {
        let tails = self.disks.iter().flat_map(|disk| &disk.directions).filter_map(|of| {
            let tail = of.tails.iter().find(|tail| tail.percentile == target.percentile)?;
            Some(format!(", {}s {}", of.direction, tail.latency_ns))
        });
        let tails: String = tails.collect();
        let verdict = crate::word(&target.verdict);
        let causes = target.causes.as_ref().map_or_else(String::new, |causes| {
            format!("; {}", rtvirtio_blame::describe(causes, &target.causes_unread))
        });
        format!(
            "{} {} <= {}: {verdict} ({}; {} of {} later{tails}{causes})",
            target.task, target.percentile, target.latency_ns, target.why, target.exceedances, target.n
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_verdict_reason_and_tail() {
        let json = r#"{ "looked_s": 1.5, "targets": [{ "task": "cycle", "percentile": 99.0, "latency_ns": 10000000,
            "verdict": "missed", "why": "2 % late", "n": 100, "exceedances": 2, "rate": 50.0, "seconds": 60.0 }],
            "disks": [{ "id": "d", "directions": [
                { "direction": "read", "n": 100, "tails": [{ "percentile": 50.0, "latency_ns": 1 }, { "percentile": 99.0, "latency_ns": 12000000 }] },
                { "direction": "write", "n": 0, "tails": [] }] }] }"#;
        let seen: ObservedVmTargets = serde_json::from_str(json).unwrap();
        assert_eq!(seen.lines(), ["cycle p99 <= 10ms: missed (2 % late; 2 of 100 later, reads 12ms)"]);
        let json = json.replace(
            "\"n\": 100, \"exc",
            "\"causes\": [], \"causes_unread\": [\"steal\"], \"n\": 100, \"exc",
        );
        let seen: ObservedVmTargets = serde_json::from_str(&json).unwrap();
        assert!(seen.lines()[0].ends_with("reads 12ms; cause not seen: not known are steal)"), "{seen:?}");
        assert_eq!(ObservedVmTargets::default().lines(), Vec::<String>::new());
    }
}
