//! `rtvirtio-lab demo`: the whole loop in a lab.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_console::{Global, Ui, exit_code, generated, need_root, show, style, write_file};
use rtvirtio_harness::demo_spec::{lower_percentiles, rates_kept, scale_rates};
use rtvirtio_harness::watched::Watched;
use rtvirtio_kernel::Root;
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile, Run, TaskResult, Verdict, VmKind};
use rtvirtio_model::{ModelKind, Profile};
use rtvirtio_planner::{CpuRoom, Placements, Plan, TaskOutlook, plan, scheme_name};
use rtvirtio_report::{ReportInput, cpu_room as cpu_room_text, html, tally, text};
use rtvirtio_spec::Spec;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::apply::{apply_plan, revert_all};
use rtvirtio_workflow::cpu_room::{CpuTime, CpuUse, CpuWatch, cpu_use};
use rtvirtio_workflow::inventory::Inventory;
use rtvirtio_workflow::model_choice::ModelChoice;
use rtvirtio_workflow::plan::{old_values, outlook};
use rtvirtio_workflow::profile::{Access, of_site};
use rtvirtio_workflow::run::measure;
use rtvirtio_workflow::site::Site;

use super::lab::{DEMO_DIR, lab_host};
use crate::args::DemoArgs;

/// Spec of the paper's Fig. 7 case.
const DEFAULT_SPEC: &str = include_str!("../../../../examples/fig7.toml");
/// Address of the service's live page, as in its guide.
const LISTEN: &str = "127.0.0.1:9465";
/// Part of the CPUs that is free on a machine where hardly another program runs.
const QUIET: f64 = 0.85;
/// Time for the device's profile: shorter than in `rtvirtio profile`, because the demo has ten
/// minutes.
const PROFILE_TIME: Duration = Duration::from_secs(24);

/// Runs the demo; the exit code is that of the run under the plan.
pub fn run(args: &DemoArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("rtvirtio-lab demo")?;
    let start = Instant::now();
    let (name, text) = match &args.spec {
        Some(path) => (
            path.display().to_string(),
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?,
        ),
        None => ("examples/fig7.toml (built in)".to_owned(), DEFAULT_SPEC.to_owned()),
    };
    let spec = rtvirtio_spec::parse(&name, &text)?;
    anyhow::ensure!(
        spec.lab_kind().is_some(),
        "{name}: the demo needs lab VMs; for existing ones use plan, apply, verify"
    );
    anyhow::ensure!(
        matches!(spec.device, rtvirtio_spec::Device::Twin { .. }),
        "{name}: the demo runs on a twin only; for a real device use `rtvirtio-lab up`, `plan`, `apply`, `verify`"
    );
    // The demo has a journal and a lab of its own, apart from the user's settings.
    let _lock = global.dirs().lock_vms()?;
    let labs = lab_host(global).below(DEMO_DIR);
    let stage = Stage { labs: &labs, ui };
    stage.clear()?;
    let lengths = Duration::from_nanos(args.length.0);
    let outcome = {
        // Cleared also on a panic.
        let _guard = ClearOnDrop(&stage);
        stage.run(&spec, &name, &text, args, lengths)
    };
    // Cleared once more, because only here an error can be reported; after the guard nothing is
    // left to remove.
    let cleared = stage.clear();
    let (code, page) = match outcome {
        Ok(demo) => demo.write(&args.out, ui)?,
        Err(e) => {
            cleared?;
            return Err(e);
        }
    };
    cleared?;
    ui.step(&format!("everything is reverted; {:.0} s in all", start.elapsed().as_secs_f64()));
    for line in last_lines(page.as_deref()) {
        ui.step(&line);
    }
    Ok(code)
}

/// Closing lines with the addresses of the saved page and of a live one.
fn last_lines(page: Option<&Path>) -> Vec<String> {
    let beside = std::env::current_exe().ok().map(|program| program.with_file_name("rtvirtiod"));
    let service = beside.filter(|path| path.exists()).unwrap_or_else(|| "rtvirtiod".into());
    let copy =
        page.map(|page| format!("the service's page, as it saw the run under the plan: {}", address(page)));
    let live = format!(
        "live, with VMs of your own: sudo {} --listen {LISTEN}, then http://{LISTEN}/",
        service.display()
    );
    [Some(live), copy].into_iter().flatten().collect()
}

/// URL of a file for a browser (RFC 8089).
fn address(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut out = "file://".to_owned();
    for &byte in path.as_os_str().as_encoded_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

/// Result of the demo.
struct DemoResult {
    file: ResultFile,
    plan: Plan,
    profile: Profile,
    /// Paragraphs before the figures, such as one on missing CPU time.
    first: Vec<String>,
    notes: Vec<String>,
    /// Page of the service during the run under the plan, as one file.
    page: Option<String>,
}

struct ClearOnDrop<'a>(&'a Stage<'a>);

impl Drop for ClearOnDrop<'_> {
    fn drop(&mut self) {
        // The next call of `clear` reports the error.
        let _ = self.0.clear();
    }
}

struct Stage<'a> {
    labs: &'a LabHost,
    ui: &'a Ui,
}

impl Stage<'_> {
    /// Reverts settings and removes the lab: those of a killed demo at the start, its own at the
    /// end.
    fn clear(&self) -> anyhow::Result<()> {
        if self.labs.remove()? {
            self.ui.step("the lab is removed");
        }
        Ok(())
    }

    fn run(
        &self,
        spec: &Spec,
        name: &str,
        text_of_spec: &str,
        args: &DemoArgs,
        length: Duration,
    ) -> anyhow::Result<DemoResult> {
        let ui = self.ui;
        self.labs.up(spec, (name, text_of_spec), args.accel.into(), None, ui)?;
        let dirs = &self.labs.dirs;
        let site = Site::find(spec.clone(), dirs)?;
        let profile = of_site(&site, Access::Reads, PROFILE_TIME, dirs, ui)?;
        print(&text::profile(&profile, &style()), ui);

        // The guests are up and idle.
        let free = cpu_use(&[], ui).map(|of| (of.cpus, of.free));
        let free = free.inspect_err(|e| ui.warn(&format!("free CPU time is not known: {e:#}"))).ok();
        let (spec, mut first) = adapt(spec, &profile, free, length, ui);
        let spec = &spec;
        let site = Site::find(spec.clone(), dirs)?;

        // A new device, with distributions' default for BFQ: nothing is tuned.
        site.stack.device.set_elevator(&Root::default(), "bfq")?;
        let config = site.config()?;
        let before = outlook(
            spec,
            &profile,
            &ModelChoice::formula(ModelKind::Slice),
            &config,
            &Placements::default(),
        )?;
        let room = free.and_then(|(cpus, free)| CpuRoom::sum([(spec, &profile)].into_iter(), cpus, free));
        let watch = CpuWatch::start(&site.lab.as_ref().map(Inventory::serving).unwrap_or_default());
        let default = measure(&site, "default-bfq", length, &latencies(&before), dirs, ui)?;
        let room = room.map(|room| seen_in(&room, &default, watch.and_then(|watch| watch.so_far()), ui));
        print(&text::run(&default, &style()), ui);

        let options = site.plan_options(config.clone(), &ModelChoice::formula(ModelKind::Slice))?;
        let mut plan = plan(spec, &profile, &options)?;
        let unknown = free.is_none().then(|| "free CPU time could not be read".to_owned());
        CpuTime { unknown, ..CpuTime::of_room(room) }.add_to(&mut plan.tasks, spec);
        print(&text::plan(&plan, &old_values(spec, &config, &plan), &style()), ui);
        let applied = apply_plan(&plan, &site, dirs, ui)?;
        ui.step(&format!("applied {applied} settings, journaled and read back"));
        // The service sets nothing, and the demo works without its page.
        let watched = Watched::start(dirs);
        let planned = measure(&site, &plan.scheme, length, &latencies(&plan.tasks), dirs, ui)?;
        let page = watched.and_then(|watched| watched.page());
        let page = page.inspect_err(|e| ui.warn(&format!("no page of the service: {e:#}"))).ok();
        print(&text::compare(&default, &planned, &style()), ui);
        let reverted = revert_all(dirs)?;
        ui.step(&format!("reverted {reverted} settings"));

        let file =
            ResultFile { schema: RESULT_SCHEMA.to_owned(), host: site.facts(), runs: vec![default, planned] };
        let notes = Self::notes(&file);
        first.extend(room.filter(CpuRoom::is_short).map(|room| cpu_room_text(&room)));
        Ok(DemoResult { file, plan, profile, first, notes, page })
    }

    fn notes(file: &ResultFile) -> Vec<String> {
        let mut notes = Vec::new();
        if file.runs.iter().any(|r| r.kind == VmKind::Qemu) && file.host.accelerator == "tcg" {
            notes.push(
                "The guests ran under TCG emulation because KVM does not run stock guests on this host: \
                 their CPU noise is part of every number."
                    .to_owned(),
            );
        }
        notes
    }
}

/// The CPU time for the requests as a run at their rates showed it.
fn seen_in(room: &CpuRoom, run: &Run, used: Result<CpuUse, rtvirtio_workflow::Error>, ui: &Ui) -> CpuRoom {
    match used {
        Ok(used) => room.as_seen(used.used, used.free, rates_kept(run)),
        Err(e) => {
            ui.warn(&format!("the run's CPU time is not known: {e:#}"));
            *room
        }
    }
}

/// The spec with rates that the free CPU time allows, and percentiles that a run of this length can
/// prove; with a sentence about each of both that was changed.
fn adapt(
    spec: &Spec,
    profile: &Profile,
    free: Option<(u32, f64)>,
    length: Duration,
    ui: &Ui,
) -> (Spec, Vec<String>) {
    let room = free.and_then(|(cpus, free)| CpuRoom::sum([(spec, profile)].into_iter(), cpus, free));
    let scaled = room.and_then(|room| Some((room, scale_rates(spec, &room)?)));
    let mut said = Vec::new();
    let mut spec = spec.clone();
    if let Some((room, scaled)) = scaled {
        said.push(format!(
            "{:.2} of {} CPUs are free, and the guests' requests may need {:.2} at the spec's rates: \
             all rates are lowered to {:.0} % of these. {}",
            room.free,
            room.cpus,
            room.needed * room.margin,
            scaled.factor * 100.0,
            if room.free < QUIET * f64::from(room.cpus) {
                "End other programs, and run the demo again for more of it"
            } else {
                "More of it takes more or faster CPUs"
            }
        ));
        spec = scaled.spec;
    }
    let lowered = lower_percentiles(&mut spec, length.as_secs_f64());
    if !lowered.is_empty() {
        said.push(format!(
            "{} s are too short to prove all targets, so these are for a lower percentile: {}",
            length.as_secs(),
            lowered.join(", ")
        ));
    }
    said.iter().for_each(|line| ui.step(line));
    (spec, said)
}

impl DemoResult {
    /// Writes the files; returns the exit code, and the path of the service's page.
    fn write(&self, dir: &Path, ui: &Ui) -> anyhow::Result<(ExitCode, Option<PathBuf>)> {
        let report = ReportInput {
            title: "rtvirtio-lab demo",
            result: &self.file,
            plan: Some(&self.plan),
            profile: Some(&self.profile),
            first: &self.first,
            notes: &self.notes,
            generated: &generated(),
        };
        let (report_file, data) = (dir.join("report.html"), dir.join("result.json"));
        write_file(&report_file, html(&report).as_bytes())?;
        let page = self.page.as_ref().map(|page| (dir.join("page.html"), page));
        if let Some((file, page)) = &page {
            write_file(file, page.as_bytes())?;
        }
        let json = serde_json::to_vec_pretty(&self.file)?;
        write_file(&data, &json)?;
        write_file(&dir.join("plan.json"), &serde_json::to_vec_pretty(&self.plan)?)?;
        if ui.json {
            show(ui, &self.file, String::new)?;
        }
        for first in &self.first {
            ui.warn(first);
        }
        for run in &self.file.runs {
            ui.step(&format!("{}: {}", scheme_name(&run.scheme), tally(run).sentence()));
        }
        if let [before, after] = self.file.runs.as_slice() {
            print(&text::before_after(before, after, &style()), ui);
        }
        ui.step(&format!("wrote {} and {}", report_file.display(), data.display()));
        Ok((last_code(&self.file.runs, &self.plan.tasks), page.map(|(file, _)| file)))
    }
}

/// A demo succeeds when no target is missed that the plan said would hold.
fn last_code(runs: &[Run], promised: &[TaskOutlook]) -> ExitCode {
    let Some(run) = runs.last() else { return ExitCode::SUCCESS };
    let holds = |task: &TaskResult| {
        promised.iter().any(|outlook| {
            (&outlook.vm, &outlook.task) == (&task.vm, &task.task)
                && outlook.percentile == task.percentile
                && outlook.holds()
        })
    };
    let mut broken = run.clone();
    broken.tasks.retain(|task| task.verdict == Some(Verdict::Missed) && holds(task));
    exit_code(&broken)
}

fn latencies(tasks: &[TaskOutlook]) -> Vec<Option<Nanos>> {
    tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect()
}

/// Prints a text of the demo: to standard output, or to standard error when that has JSON.
fn print(text: &str, ui: &Ui) {
    // A closed output must not end the demo before it has reverted everything.
    if ui.json {
        let _ = writeln!(std::io::stderr(), "{text}");
    } else {
        let _ = writeln!(std::io::stdout(), "{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_with_the_address_of_the_page() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let page = dir.path().join("a page ü.html");
        std::fs::write(&page, "").unwrap();
        let lines = last_lines(Some(&page));
        assert!(
            lines[0].contains("rtvirtiod --listen 127.0.0.1:9465, then http://127.0.0.1:9465/"),
            "{lines:?}"
        );
        let real = dir.path().canonicalize().unwrap();
        let expected = format!("file://{}/a%20page%20%C3%BC.html", real.display());
        assert!(lines.last().unwrap().ends_with(&expected), "{lines:?}");
        assert_eq!(last_lines(None).len(), 1);
    }
}
