//! Limits for the VMs without a target, from the saved profile or a measured curve.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use rtvirtio_planner::neighbours::{AskedService, NeighbourOptions, NeighbourPlan, neighbours};
use rtvirtio_spec::Spec;
use rtvirtio_traffic::{Actuator, ServiceTarget, VictimCurve};
use rtvirtio_units::{Iops, Nanos};

use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail, ensure};
use crate::plan::load_profile;
use crate::progress::Progress;

/// Largest file of a curve.
const MOST_BYTES: u64 = 4 << 20;

/// What to choose limits from and for.
#[derive(Clone, Debug)]
pub struct LimitOptions {
    /// A profile file instead of the one saved for the device.
    pub profile: Option<PathBuf>,
    /// A curve file in place of a profile.
    pub curve: Option<PathBuf>,
    /// `VM=RATE,TIME` of VMs that must get an alpha and a Delta.
    pub asked: Vec<String>,
    /// The regulator that will hold the limits.
    pub actuator: Actuator,
}

/// Chooses the limits of a spec's VMs without a target.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) where no limit is small enough, with what the
/// smallest one leaves; [`Kind::NotMeasured`](crate::Kind::NotMeasured) without a profile or curve,
/// and [`Kind::File`](crate::Kind::File) for one that cannot be used.
pub fn choose(
    spec: &Spec,
    options: &LimitOptions,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<NeighbourPlan> {
    let asked = options.asked.iter().map(|text| asked(text)).collect::<Result<Vec<_>>>()?;
    let curve = options.curve.as_deref().map(load_curve).transpose()?;
    let profile = match &curve {
        Some(_) => None,
        None => Some(load_profile(spec, options.profile.as_deref(), dirs)?),
    };
    if let Some(doubt) = profile.as_ref().and_then(|profile| profile.doubts.first()) {
        progress.warn(&format!("the profile is in doubt: {doubt}"));
    }
    let options = NeighbourOptions { asked: &asked, curve: curve.as_ref(), actuator: options.actuator };
    Ok(neighbours(spec, profile.as_ref(), &options)?)
}

/// `plc=500/s,5ms`.
fn asked(text: &str) -> Result<AskedService> {
    let parts = text.split_once('=').and_then(|(vm, of)| Some((vm, of.split_once(',')?)));
    let parsed = parts.and_then(|(vm, (rate, time))| {
        Some((vm, rate.trim().parse::<Iops>().ok()?, time.trim().parse::<Nanos>().ok()?))
    });
    match parsed {
        Some((vm, rate, time)) if rate.0 > 0.0 && time.0 > 0 => Ok(AskedService {
            vm: vm.trim().to_owned(),
            service: ServiceTarget { alpha: rate.0, delta: time.as_secs_f64() },
        }),
        _ => bail!(Argument, "--alpha-delta {text}: write VM=RATE,TIME, such as plc=500/s,5ms"),
    }
}

/// A curve file.
///
/// # Errors
/// When it cannot be read or used.
pub fn load_curve(path: &Path) -> Result<VictimCurve> {
    let name = path.display();
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text))
        .with_context(|| format!("cannot read {name}"))?;
    ensure!(text.len() as u64 <= MOST_BYTES, File, "{name} is larger than {} MiB", MOST_BYTES >> 20);
    let curve: VictimCurve = match serde_json::from_str(&text) {
        Ok(curve) => curve,
        Err(e) => bail!(File, "{name} is no curve: {e}"),
    };
    match curve.fault() {
        None => Ok(curve),
        Some(fault) => bail!(File, "{name}: {fault}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_service_is_a_vm_a_rate_and_a_time() {
        let one = asked("plc=500/s,5ms").unwrap();
        assert_eq!((one.vm.as_str(), one.service.alpha, one.service.delta), ("plc", 500.0, 0.005));
        for bad in ["plc", "plc=500/s", "plc=5ms,500/s", "plc=0/s,5ms", "plc=500/s,0ms"] {
            assert_eq!(asked(bad).unwrap_err().kind(), Kind::Argument, "{bad}");
        }
    }

    #[test]
    fn a_file_that_is_no_curve_is_refused() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("curve.json");
        assert!(load_curve(&path).is_err());
        for bad in ["", "{}", "{\"schema\": \"rtvirtio.curve.v1\"}"] {
            std::fs::write(&path, bad).unwrap();
            assert_eq!(load_curve(&path).unwrap_err().kind(), Kind::File, "{bad}");
        }
    }
}
