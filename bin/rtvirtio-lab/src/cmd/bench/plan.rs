//! `rtvirtio-lab bench plan`: how long planning takes, and how near it comes to the best.

use std::path::Path;
use std::process::ExitCode;

use rtvirtio_bench::planning::{Planning, measure};
use rtvirtio_measure::HostFacts;

use super::found::{Found, read, save};
use super::page;
use crate::args::BenchPlanArgs;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_workflow::model_choice;
use rtvirtio_workflow::site::{cpus, kernel_release};

/// Where the result lies in a directory of results.
pub const FILE: &str = "planning.json";

/// `rtvirtio-lab bench plan`.
pub fn run(args: &BenchPlanArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        let learned = model_choice::read_if(args.model.as_deref())?;
        let host = HostFacts {
            kernel: kernel_release(),
            cpus: cpus(),
            vmm: "none".to_owned(),
            accelerator: "none".to_owned(),
            device: "profile of the flash twin, built in".to_owned(),
        };
        let model = args.model.as_deref().and_then(Path::file_name);
        let model = model.map_or(String::new(), |name| format!(" --model {}", name.to_string_lossy()));
        let command = format!("rtvirtio-lab bench plan --repeat {}{model}", args.repeat);
        let planning = measure(args.repeat.max(1), learned.as_ref(), host, (command, generated()))?;
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir)?;
        }
        save(&path, &planning, ui)?;
    }
    found(&path)?.tell("rtvirtio: planning", args.result.html.as_deref(), ui)
}

/// What a result shows.
pub fn found(path: &Path) -> anyhow::Result<Found> {
    let data: Planning = read(path)?;
    let claims = data.claims();
    let lead = vec![format!(
        "Planning on Linux {} with {} CPUs; {}, {}.",
        data.host.kernel, data.host.cpus, data.command, data.generated
    )];
    // What was planned are built-in specs, and no run of VMs stands behind it.
    Ok(Found {
        text: page::table(&claims),
        sections: Vec::new(),
        runs: Vec::new(),
        data: vec![serde_json::to_value(&data)?],
        host: data.host,
        claims,
        lead,
    })
}
