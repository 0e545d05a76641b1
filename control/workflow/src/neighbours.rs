//! Limits for the VMs without a target, from the saved profile or a measured curve.

mod text;

use std::path::{Path, PathBuf};

use rtvirtio_planner::neighbours::{
    AskedService, NeighbourError, NeighbourOptions, NeighbourPlan, neighbours,
};
use rtvirtio_spec::HostSpec;
use rtvirtio_traffic::{Actuator, ServiceTarget, VictimCurve};
use rtvirtio_units::{Iops, Nanos};
use serde::Serialize;

use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail, ensure};
use crate::plan::load_profile;
use crate::progress::Progress;

pub use text::{as_toml, with_limits};

/// Largest file of a curve.
const MOST_BYTES: u64 = 4 << 20;

/// Inputs of the choice of limits.
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

/// Limits chosen on one device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceLimits {
    /// Name in the spec; `None` where a spec of one device gives none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The limits, and what each target has with them.
    #[serde(flatten)]
    pub plan: NeighbourPlan,
}

/// Chooses the limits of a spec's VMs without a target, on each device that has both such VMs and
/// targets; at least one.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) where no limit is small enough, with what the
/// smallest one leaves; [`Kind::NotMeasured`](crate::Kind::NotMeasured) without a profile or curve,
/// and [`Kind::File`](crate::Kind::File) for one that cannot be used;
/// [`Kind::Argument`](crate::Kind::Argument) for a VM on several devices.
pub fn choose(
    host: &HostSpec,
    options: &LimitOptions,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Vec<DeviceLimits>> {
    let asked = options.asked.iter().map(|text| asked(text)).collect::<Result<Vec<_>>>()?;
    if let Some(one) = asked.iter().find(|one| host.vms().iter().all(|vm| vm.name != one.vm)) {
        return Err(NeighbourError::NoSuchVm { vm: one.vm.clone() }.into());
    }
    let several = host.parts().len() > 1;
    ensure!(
        !several || (options.profile.is_none() && options.curve.is_none()),
        Argument,
        "--profile and --curve are of one device, and the spec has {}: measure each with `rtvirtio profile`, and leave them out",
        host.parts().len()
    );
    let curve = options.curve.as_deref().map(load_curve).transpose()?;
    let mut found = Vec::new();
    let mut nothing = NeighbourError::NoVictim;
    for part in host.parts() {
        let here: Vec<AskedService> =
            asked.iter().filter(|one| part.spec.vm(&one.vm).is_some()).cloned().collect();
        let needs = NeighbourOptions { asked: &here, curve: curve.as_ref(), actuator: options.actuator };
        // Only what is to be chosen for needs a measured device.
        let profile = match neighbours(&part.spec, None, &needs) {
            Err(NeighbourError::NoBasis) => Some(load_profile(&part.spec, options.profile.as_deref(), dirs)?),
            Err(e @ (NeighbourError::NoVictim | NeighbourError::NoNeighbour)) if several => {
                nothing = e;
                continue;
            }
            _ => None,
        };
        if let Some(doubt) = profile.as_ref().and_then(|profile| profile.doubts.first()) {
            progress.warn(&format!("the profile is in doubt: {doubt}"));
        }
        let plan = neighbours(&part.spec, profile.as_ref(), &needs)?;
        found.push(DeviceLimits { device: part.name.clone(), plan });
    }
    ensure_on_one_device(host, &found)?;
    if host.vms().iter().any(|vm| !vm.nics.is_empty()) {
        progress.warn(
            "no limits for networks are chosen, and targets of flows are not considered: `rtvirtio plan SPEC --domain` has their bounds with the `traffic.rx` and `traffic.tx` that you give",
        );
    }
    if found.is_empty() { Err(nothing.into()) } else { Ok(found) }
}

/// Refuses a chosen limit of a VM on several devices: it would act on each of them, and what one of
/// them can bear says nothing of the others.
fn ensure_on_one_device(host: &HostSpec, found: &[DeviceLimits]) -> Result<()> {
    let devices = |vm: &str| host.parts().iter().filter(|part| part.spec.vm(vm).is_some()).count();
    let chosen = found.iter().flat_map(|of| &of.plan.limits).filter(|limit| !limit.given);
    for limit in chosen {
        let count = devices(&limit.vm);
        ensure!(
            count == 1,
            Argument,
            "vm {}: it has tasks on {count} devices, and its limit would hold on each of them: give it `traffic` of your own, and limits of the others are chosen",
            limit.vm
        );
    }
    Ok(())
}

/// Parses `VM=RATE,TIME`, such as `plc=500/s,5ms`.
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

/// Reads a curve file.
pub fn load_curve(path: &Path) -> Result<VictimCurve> {
    let name = path.display();
    let text = rtvirtio_kernel::trusted::read_named_text(path, MOST_BYTES)
        .with_context(|| format!("cannot read {name}"))?;
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
