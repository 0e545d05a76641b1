//! Service times of a device that declares none, for the I/O domain's cost model.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use rtvirtio_units::{Bytes, Nanos};
use serde_json::Value;

use crate::iod_startup::Tuning;

/// Sizes of the two measurements that determine the line.
const SMALL: u64 = 4 << 10;
const LARGE: u64 = 1 << 20;

/// Measures random reads and writes one at a time, a second each. Data on the device are lost.
pub fn measure(
    device: &Path,
    (quantum, urgent_quantum, window): (Bytes, Bytes, u32),
) -> anyhow::Result<Tuning> {
    let of = |rw: &str| -> anyhow::Result<(Nanos, Nanos)> {
        Ok(line(mean(device, rw, SMALL)?, mean(device, rw, LARGE)?))
    };
    let (read, write) = (of("randread")?, of("randwrite")?);
    Ok(Tuning { quantum, urgent_quantum, window, read, write, stall: Nanos(0) })
}

/// Base and time per MiB from the times of both sizes.
fn line(small: f64, large: f64) -> (Nanos, Nanos) {
    let per_byte = (large - small).max(0.0) / (LARGE - SMALL) as f64;
    let ns = |v: f64| Nanos(v.max(0.0).round() as u64);
    (ns(small - per_byte * SMALL as f64), ns(per_byte * LARGE as f64))
}

/// Mean completion latency at depth 1, ns.
fn mean(device: &Path, rw: &str, block: u64) -> anyhow::Result<f64> {
    let output = Command::new("fio")
        .args(["--name=service", "--direct=1", "--ioengine=psync", "--time_based", "--runtime=1"])
        .arg(format!("--filename={}", device.display()))
        .args([format!("--rw={rw}"), format!("--bs={block}"), "--output-format=json".to_owned()])
        .stdin(Stdio::null())
        .output()
        .context("fio cannot be run")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "fio on {}: {}", device.display(), error.trim());
    parse(&output.stdout, rw).with_context(|| format!("fio on {} printed no latency", device.display()))
}

fn parse(json: &[u8], rw: &str) -> Option<f64> {
    let direction = rw.strip_prefix("rand")?;
    let value: Value = serde_json::from_slice(json).ok()?;
    value.pointer(&format!("/jobs/0/{direction}/clat_ns/mean"))?.as_f64().filter(|mean| *mean > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_goes_through_both_sizes() {
        // 100 us and 2 ns a byte.
        let (base, per_mib) = line(108_192.0, 2_197_152.0);
        assert_eq!((base, per_mib), (Nanos(100_000), Nanos(2_097_152)));
        assert_eq!(line(5.0, 3.0), (Nanos(5), Nanos(0)), "noise is no speed");
        let json =
            br#"{"jobs": [{"read": {"clat_ns": {"mean": 123.5}}, "write": {"clat_ns": {"mean": 0.0}}}]}"#;
        assert_eq!(parse(json, "randread"), Some(123.5));
        assert_eq!((parse(json, "randwrite"), parse(b"x", "randread")), (None, None));
    }
}
