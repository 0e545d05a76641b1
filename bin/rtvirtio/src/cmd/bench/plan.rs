//! `rtvirtio bench plan`: how long planning takes, and how near it comes to the best.

use std::process::ExitCode;

use rtvirtio_bench::claims::BenchFile;
use rtvirtio_bench::planning::measure;
use rtvirtio_measure::HostFacts;

use crate::args::BenchPlanArgs;
use crate::cmd::show;
use crate::model_choice;
use crate::site::{cpus, kernel_release};
use crate::ui::Ui;

/// `rtvirtio bench plan`.
pub fn run(args: &BenchPlanArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let learned = model_choice::read_if(args.model.as_deref())?;
    let planning = measure(args.repeat.max(1), learned.as_ref())?;
    let claims = planning.claims();
    let met = claims.iter().all(|c| c.met);
    let text: String = claims
        .iter()
        .map(|c| {
            let limit = c.at_most.map_or(String::new(), |l| format!(" (at most {l})"));
            format!("{:<24} {:.4} {}{limit}  n {}  {}\n", c.id, c.value, c.unit, c.n, c.what)
        })
        .collect();
    let host = HostFacts {
        kernel: kernel_release(),
        cpus: cpus(),
        vmm: "none".to_owned(),
        accelerator: "none".to_owned(),
        device: "profile of the flash twin, built in".to_owned(),
    };
    show(ui, &BenchFile::new(host, Vec::new(), claims), || text)?;
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::from(2) })
}
