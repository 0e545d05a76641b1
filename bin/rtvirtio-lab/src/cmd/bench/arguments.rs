//! What is refused before anything is made or measured: a measurement may take hours.

use anyhow::{Context as _, ensure};
use rtvirtio_bench::cases::{CaseOptions, cases};
use rtvirtio_bench::contention::setups;
use rtvirtio_bench::schemes;
use rtvirtio_console::check_writable;
use rtvirtio_spec::Device;
use rtvirtio_testbed::twin::TwinProfile;
use rtvirtio_workflow::model_choice::read_if;

use super::bed::spec_device;
use super::cases::{TUNED, tiers};
use super::runs::profile;
use crate::args::{BenchCasesArgs, BenchContentionArgs, BenchResult, BenchRuns};

/// The device as a spec has it, if there is such a twin.
pub fn device(text: &str) -> anyhow::Result<Device> {
    let device = spec_device(text)?;
    if let Device::Twin { profile, .. } = &device {
        TwinProfile::load(profile)?;
    }
    Ok(device)
}

/// Where a result goes.
pub fn result(result: &BenchResult) -> anyhow::Result<()> {
    check_writable(&result.out.join("result")).with_context(|| format!("--out {}", result.out.display()))?;
    result.html.as_deref().map_or(Ok(()), check_writable).context("--html")
}

/// Device, model and profile of runs, and where they go.
fn runs(runs: &BenchRuns) -> anyhow::Result<()> {
    let device = device(&runs.device)?;
    profile(runs, read_if(runs.model.as_deref())?.as_deref(), &device)?;
    check_writable(&runs.out.join("runs")).with_context(|| format!("--out {}", runs.out.display()))?;
    runs.html.as_deref().map_or(Ok(()), check_writable).context("--html")
}

/// `bench cases`.
pub fn of_cases(args: &BenchCasesArgs) -> anyhow::Result<()> {
    let all: Vec<&str> = schemes::all().iter().map(|s| s.name()).chain([TUNED]).collect();
    if let Some(name) = args.schemes.iter().find(|name| !all.contains(&name.as_str())) {
        anyhow::bail!("--schemes: there is no scheme {name}; there are {}", all.join(", "));
    }
    // A case's name does not depend on its load.
    let options = CaseOptions { writes: 0.0, third_of: None };
    let wanted = |name: &str| args.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    let any = tiers(args).into_iter().flat_map(|t| cases(t, &options)).any(|case| wanted(&case.name));
    ensure!(any, "--only: no case is named like that; `--write DIR` lists them");
    runs(&args.runs)
}

/// `bench contention`.
pub fn of_contention(args: &BenchContentionArgs) -> anyhow::Result<()> {
    let wanted = |id: &str| args.only.as_ref().is_none_or(|only| id.contains(only.as_str()));
    ensure!(
        setups().iter().any(|s| wanted(&s.id(0))),
        "--only: no set-up is named like that: names begin with fig2, fig5a, fig5b, fig5c"
    );
    runs(&args.runs)
}
