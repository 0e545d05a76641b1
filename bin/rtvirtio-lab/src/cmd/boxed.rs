//! `rtvirtio-lab box`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_console::{Global, Ui, show};
use rtvirtio_testbed::boxed::{self, BoxCommand};
use rtvirtio_workflow::{Error, Progress as _};

use crate::args::BoxArgs;

/// Programs copied into the box, if they are built.
const PROGRAMS: [&str; 7] = [
    "rtvirtio",
    "rtvirtiod",
    "rtvirtio-iod",
    "rtvirtio-lab",
    "rtvirtio-bench",
    "rtvirtio-guest",
    "rtvirtio-guestload",
];

/// Runs a command in the box; returns the exit code of the command.
pub fn run(args: &BoxArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let this = std::env::current_exe()?;
    let dir = this.parent().context("this program lies in no directory")?;
    let programs: Vec<PathBuf> = PROGRAMS.iter().map(|name| dir.join(name)).filter(|p| p.exists()).collect();
    let step = |line: &str| ui.step(line);
    let image = boxed::ensure_kernel(&global.cache_dir, args.kernel.into(), &step).map_err(Error::from)?;
    let command = BoxCommand {
        words: &args.command,
        programs: &programs,
        results: &args.out,
        timeout: Duration::from_nanos(args.timeout.0),
        cancel: ui.cancel_flag(),
    };
    ui.step("the box boots");
    let out = boxed::run_command(&image, &command, &step).map_err(Error::from)?;
    let Some(code) = out.exit_code else {
        anyhow::bail!("the box died; its console ends with:\n{}", boxed::tail(&out.console));
    };
    let result = serde_json::json!({
        "exit_code": code,
        "kernel": image.host.release,
        "output": out.output,
        "out": args.out,
        "seconds": out.took.as_secs_f64(),
    });
    show(ui, &result, || {
        format!("exit status {code} on {}; what it left is in {}\n", image.host.release, args.out.display())
    })?;
    Ok(u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from))
}
