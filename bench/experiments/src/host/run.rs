//! The choice of parts for this host, and their run: each is a process of this program, so that a
//! failed part ends no other.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_kernel::Root;
use rtvirtio_measure::{ResultFile, Run, Verdict};
use rtvirtio_testbed::image::find_program;
use rtvirtio_workflow::discover::discover;
use rtvirtio_workflow::{Progress, is_there};
use serde::{Deserialize, Serialize};

use super::bundle::{Bundle, FILE, Outcome, PartResult};
use super::facts::MachineFacts;
use super::part::{Choice, DEVICE, OUT, PARTS, Part, choose};
use super::scrub::Scrub;
use crate::child::{self, Ended};
use crate::claims::Claim;
use crate::report::{read, write};
use crate::saved::Saved;

/// The emulated drive of parts that can use another one.
const TWIN: &str = "twin:qlc-nvme";
/// Program of the laboratory.
const LAB: &str = "rtvirtio-lab";
/// File on the drive under test.
const FILE_ON_DRIVE: &str = "rtvirtio-bench.img";
/// Factor of the expected duration after which a part is stopped.
const STOP_FACTOR: u32 = 6;
/// Options of `rtvirtio-bench host`.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// A directory on the drive under test; without it the drive is emulated.
    pub drive: Option<PathBuf>,
    /// Time for all parts.
    pub budget: Duration,
    /// Only parts of these names; all when empty.
    pub only: Vec<String>,
    /// Directory of the bundle.
    pub out: PathBuf,
    /// Whether virtual machines that run here may be slowed.
    pub under_vms: bool,
    /// `rtvirtio-bench`, with `rtvirtio-lab` next to it.
    pub program: PathBuf,
    /// Options for each of its commands.
    pub global: Vec<String>,
}

/// Parts to be measured, and earlier results.
#[derive(Debug)]
pub struct Work {
    /// Results of earlier runs.
    bundle: Bundle,
    /// Every requested part with its size, or the reason for leaving it out.
    parts: Vec<(&'static Part, Result<Choice, String>)>,
}

/// Chooses the parts to measure. Changes nothing.
///
/// # Errors
/// An unknown part or a missing drive; a bundle of another host in the directory.
pub fn prepare(options: &HostOptions) -> anyhow::Result<Work> {
    let is_known = |name: &&String| PARTS.iter().any(|part| part.name == **name);
    if let Some(unknown) = options.only.iter().find(|name| !is_known(name)) {
        let all: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
        bail!("no part is called `{unknown}`: there is {}", all.join(", "));
    }
    if let Some(drive) = &options.drive {
        anyhow::ensure!(
            drive.is_dir(),
            "{}: name a directory on a file system of the drive; a file is made there, and removed at the end",
            drive.display()
        );
    }
    let root = Root::default();
    let machine = MachineFacts::read(&root);
    let path = options.out.join(FILE);
    let own_drive = options.drive.is_some();
    let bundle = if is_there(&path)? {
        let bundle: Bundle = read(&path)?;
        anyhow::ensure!(
            bundle.machine.is_same(&machine) && bundle.own_drive == own_drive,
            "{} is of another host, kernel or drive: choose another directory by --out",
            path.display()
        );
        bundle
    } else {
        let (schema, generated) = (Bundle::SCHEMA.to_owned(), rtvirtio_workflow::generated());
        Bundle { schema, generated, machine, own_drive, parts: Vec::new() }
    };
    let asked = |part: &Part| options.only.is_empty() || options.only.iter().any(|name| name == part.name);
    let lacking = |part: &Part| part.needs.iter().find(|program| find_program(program).is_none());
    let usable: Vec<&Part> = PARTS.iter().filter(|part| asked(part) && lacking(part).is_none()).collect();
    let choices = choose(&usable, options.budget, &|name| bundle.measured(name));
    let of_part = |part: &'static Part| {
        if let Some(program) = lacking(part) {
            return Err(format!("{program} is not installed (`make deps`)"));
        }
        let chosen = choices.iter().find(|choice| choice.part.name == part.name);
        chosen.copied().ok_or_else(|| format!("it takes about {} s", part.sizes[0].seconds))
    };
    let parts = PARTS.iter().filter(|part| asked(part)).map(|part| (part, of_part(part))).collect();
    Ok(Work { bundle, parts })
}

/// Announcement of a part before the run.
#[derive(Debug, Serialize)]
pub struct PlannedPart {
    pub name: &'static str,
    /// Subject of the part.
    pub shows: &'static str,
    /// Objects that it makes and settings that it changes on the host.
    pub touches: &'static str,
    /// Approximate duration, s; 0 for a part that is measured already or left out.
    pub seconds: u64,
    pub command: String,
    /// Reason for not measuring the part; `None` where it is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
}

impl Work {
    /// Effects and duration of each part, for a user who decides whether to start.
    #[must_use]
    pub fn planned(&self, options: &HostOptions) -> Vec<PlannedPart> {
        let of_part = |(part, choice): &(&'static Part, Result<Choice, String>)| {
            let (seconds, left_out) = match choice {
                Ok(choice) if self.bundle.measured(part.name) == Some(choice.size) => {
                    (0, Some("measured already".to_owned()))
                }
                Ok(choice) => (choice.time().as_secs(), None),
                Err(why) => (0, Some(why.clone())),
            };
            let choice = choice.as_ref().map_or(Choice { part, size: 0 }, |choice| *choice);
            let (name, shows, touches) = (part.name, part.shows, part.touches);
            PlannedPart { name, shows, touches, seconds, command: shown_command(choice, options), left_out }
        };
        self.parts.iter().map(of_part).collect()
    }

    /// [`Work::planned`] as text.
    #[must_use]
    pub fn describe(&self, options: &HostOptions) -> String {
        let planned = self.planned(options);
        let one = |part: &PlannedPart| match &part.left_out {
            Some(why) => format!("{}: left out: {why}\n", part.name),
            None => format!(
                "{}: {}\n  about {} s; touches {}\n  {}\n",
                part.name, part.shows, part.seconds, part.touches, part.command
            ),
        };
        let text: String = planned.iter().map(one).collect();
        let time: u64 = planned.iter().map(|part| part.seconds).sum();
        let minutes = time.div_ceil(60);
        text + &format!(
            "about {minutes} min in all; everything that is made is removed, everything that is changed is put back\n"
        )
    }
}

/// Measures, and saves the bundle after each part.
///
/// # Errors
/// VMs that run here; a bundle that cannot be written; Ctrl-C, after the running part has restored
/// all settings.
pub fn measure(work: Work, options: &HostOptions, progress: &dyn Progress) -> anyhow::Result<PathBuf> {
    let root = Root::default();
    if !options.under_vms {
        let vms = discover(&root, None)?.vms;
        let names: Vec<String> = vms.into_iter().map(|vm| vm.name).collect();
        anyhow::ensure!(
            names.is_empty(),
            "VMs run here ({}): the measurements take CPU time, memory and disk from them. Move them away, or give --yes",
            names.join(", ")
        );
    }
    let scrub = Scrub::for_host(&root);
    let path = options.out.join(FILE);
    let begin = Instant::now();
    let (mut bundle, total) = (work.bundle, work.parts.len());
    for (i, (part, choice)) in work.parts.into_iter().enumerate() {
        let choice = match choice {
            Ok(choice) if bundle.measured(part.name) == Some(choice.size) => continue,
            Ok(choice) => choice,
            Err(reason) => {
                let choice = Choice { part, size: 0 };
                bundle.put(result(choice, options, Outcome::LeftOut { reason }, &scrub));
                continue;
            }
        };
        let left = options.budget.saturating_sub(begin.elapsed());
        let outcome = if i > 0 && left < choice.time() / 2 {
            let reason = format!("{} s were left", left.as_secs());
            progress.step(&format!("{}: left out: {reason}", part.name));
            Outcome::LeftOut { reason }
        } else {
            progress.step(&format!(
                "part {} of {total}, {}: about {} s",
                i + 1,
                part.name,
                choice.time().as_secs()
            ));
            run_part(choice, options, &scrub, progress)?
        };
        bundle.put(result(choice, options, outcome, &scrub));
        bundle.generated = rtvirtio_workflow::generated();
        write(&path, &bundle)?;
    }
    write(&path, &bundle)?;
    Ok(path)
}

fn result(choice: Choice, options: &HostOptions, outcome: Outcome, scrub: &Scrub) -> PartResult {
    let command = scrub.text(&shown_command(choice, options));
    PartResult { name: choice.part.name.to_owned(), command, size: choice.size, outcome }
}

fn run_part(
    choice: Choice,
    options: &HostOptions,
    scrub: &Scrub,
    progress: &dyn Progress,
) -> anyhow::Result<Outcome> {
    let out = options.out.join("parts").join(choice.part.name);
    // A longer measurement begins anew.
    if is_there(&out)? {
        std::fs::remove_dir_all(&out).with_context(|| out.display().to_string())?;
    }
    std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let mut args = arguments(choice, options, &out.display().to_string());
    args.push("--json".to_owned());
    args.extend(options.global.iter().cloned());
    let begin = Instant::now();
    let program = if is_demo(choice) { options.program.with_file_name(LAB) } else { options.program.clone() };
    let of = (choice.part.name, choice.time() * STOP_FACTOR);
    let ended = child::run(&program, &args, of, progress)?;
    progress.check_cancelled()?;
    Ok(match ended {
        Ended::Result(text, _) => match figures(&text) {
            Ok((accelerator, claims)) => {
                Outcome::Measured { seconds: begin.elapsed().as_secs(), accelerator, claims }
            }
            Err(e) => Outcome::Failed { reason: scrub.text(&format!("its result is not readable: {e:#}")) },
        },
        Ended::Failed(reason) => {
            progress.warn(&format!("{} failed: {reason}", choice.part.name));
            Outcome::Failed { reason: scrub.text(&reason) }
        }
    })
}

/// Command line as a user would type it.
fn shown_command(choice: Choice, options: &HostOptions) -> String {
    let program = if is_demo(choice) { LAB } else { "rtvirtio-bench" };
    format!("{program} {}", arguments(choice, options, "DIR").join(" "))
}

/// Whether `rtvirtio-lab` runs the part.
fn is_demo(choice: Choice) -> bool {
    choice.part.sizes[choice.size].args.first() == Some(&"demo")
}

fn arguments(choice: Choice, options: &HostOptions, out: &str) -> Vec<String> {
    let device = match &options.drive {
        Some(dir) => format!("file:{}", dir.join(FILE_ON_DRIVE).display()),
        None => TWIN.to_owned(),
    };
    let one = |word: &&str| match *word {
        OUT => out.to_owned(),
        DEVICE => device.clone(),
        word => word.to_owned(),
    };
    choice.part.sizes[choice.size].args.iter().map(one).collect()
}

/// Accelerator and figures of a result: those of an experiment, or of the demo's two runs.
fn figures(text: &str) -> anyhow::Result<(String, Vec<Claim>)> {
    #[derive(Deserialize)]
    struct WithClaims {
        host: rtvirtio_measure::HostFacts,
        claims: Vec<Claim>,
    }
    if let Ok(file) = serde_json::from_str::<WithClaims>(text) {
        return Ok((file.host.accelerator, file.claims));
    }
    let file: ResultFile = serde_json::from_str(text)?;
    let claims = file.runs.iter().flat_map(claims_of_run).collect();
    Ok((file.host.accelerator, claims))
}

fn claims_of_run(run: &Run) -> Vec<Claim> {
    let with_target = run.tasks.iter().filter(|task| task.verdict.is_some()).count();
    let of = |verdict| run.tasks.iter().filter(|task| task.verdict == Some(verdict)).count();
    let longest = run.tasks.iter().filter(|task| task.verdict.is_some()).map(|task| task.p99_ns.0).max();
    let claim = |name: &str, what: &str, value: f64, unit: &str| {
        Claim::new(
            format!("demo.{}.{name}", run.scheme),
            format!("{what} under {}", run.scheme),
            value,
            unit,
            with_target,
        )
    };
    vec![
        claim("missed", "targets missed", of(Verdict::Missed) as f64, "targets"),
        claim("met", "targets met", of(Verdict::Met) as f64, "targets"),
        claim(
            "slowest_p99_ms",
            "p99 of the slowest task with a target",
            longest.unwrap_or(0) as f64 / 1e6,
            "ms",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_experiments_and_of_the_demo() {
        let claim = serde_json::to_value(Claim::new("a", "b", 1.0, "ms", 3)).unwrap();
        let file = serde_json::json!({
            "schema": "x", "runs": [], "claims": [claim],
            "host": { "kernel": "6", "cpus": 2, "vmm": "QEMU", "accelerator": "tcg", "device": "d" }
        });
        let (accelerator, claims) = figures(&file.to_string()).unwrap();
        assert_eq!((accelerator.as_str(), claims.len()), ("tcg", 1));
        assert!(figures("{}").is_err());
    }
}
