//! Measurement of the day, twice.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use jiff::Timestamp;
use rtvirtio_daemon::{EventKind, HISTORY_FILE, PLAN, PlanState, VmState, read_history};
use rtvirtio_kernel::sched::{self, Policy};
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_measure::{Run, Verdict};
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Iops;
use rtvirtio_workflow::run::measure_loads;
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{Dirs, Progress, generated};
use serde_json::json;

use super::setup::{DaySetup, VMS};
use super::{Course, DAY, DayData, Fault, Reaction, Said, Window, rounded};
use crate::daemon::measure::TestService;
use crate::experiment::host_facts;
use crate::saved::Saved as _;

/// Indices in [`VMS`]: the most critical VM, the flooding one, and the least critical.
const PLC: usize = 0;
const HIST: usize = 1;
const BATCH: usize = 2;
/// Rate of the flood over the declared rate.
const FLOOD: f64 = 12.0;
/// Longest wait until a fault is corrected that needs no new plan.
const CORRECTION_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval of polls for the correction.
const LOOK: Duration = Duration::from_millis(10);
/// The service plans anew as soon as it may: the day is short.
const CONFIG: &str =
    "observe = \"2s\"\n[plan]\nmode = \"auto\"\nevery = \"20s\"\nconfirm = \"10s\"\nhorizon = \"90s\"\n";

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct DayOptions {
    /// The service's program; `rtvirtio` is next to it.
    pub service: PathBuf,
    pub window: Duration,
    /// Windows of an hour.
    pub windows: usize,
}

/// Measures the day twice.
///
/// # Errors
/// A plan that cannot be applied, a guest or a service that does not start, and cancellation.
pub fn measure(options: &DayOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<DayData> {
    let _lock = labs.dirs.lock_vms()?;
    let rigs = [TestService::new(&options.service)?, TestService::new(&options.service)?];
    let mut plant = DaySetup::new(labs, &[rigs[0].dirs(), rigs[1].dirs()], progress)?;
    let mut courses = Vec::new();
    for (rig, service) in rigs.into_iter().zip([false, true]) {
        // As distributions set it up: nothing is tuned.
        BlockDevice::find(&Root::default(), &plant.device)?.set_elevator(&Root::default(), "bfq")?;
        plant.slow(false)?;
        let mut day =
            Day { plant: &mut plant, rig, service, options, progress, begin: Instant::now(), planned: None };
        courses.push(day.course()?);
    }
    let host = host_facts(("qemu", "tcg"), "twin emmc");
    plant.remove()?;
    Ok(DayData {
        schema: DayData::SCHEMA.to_owned(),
        host,
        command: format!(
            "rtvirtio-bench daemon-day --window {}s --windows {}",
            options.window.as_secs(),
            options.windows
        ),
        generated: generated(),
        window_s: options.window.as_secs_f64(),
        courses,
    })
}

struct Day<'a> {
    plant: &'a mut DaySetup,
    rig: TestService,
    service: bool,
    options: &'a DayOptions,
    progress: &'a dyn Progress,
    begin: Instant,
    /// Limit of the least critical VM by the first plan.
    planned: Option<u64>,
}

impl Day<'_> {
    fn course(&mut self) -> anyhow::Result<Course> {
        self.set_up()?;
        self.planned = self.plant.limit(BATCH)?;
        ensure!(self.planned.is_some(), "the plan limits nobody: there is nothing to take away");
        self.begin = Instant::now();
        let began = Timestamp::now();
        let mut course =
            Course { service: self.service, windows: Vec::new(), reactions: Vec::new(), said: Vec::new() };
        let mut last = Fault::Nothing;
        for (hour, mishap) in DAY.into_iter().enumerate() {
            self.progress.check_cancelled()?;
            let at = self.begin.elapsed();
            let set = self.mishap(mishap, last)?;
            for _ in 0..self.options.windows {
                course.windows.push(self.window(hour, mishap)?);
            }
            if !matches!(mishap, Fault::Nothing | Fault::Over) {
                let set = if self.service && set.is_none() {
                    new_plan(&self.history_since(began)?, at)
                } else {
                    set
                };
                course.reactions.push(reaction(hour, at, set, &course.windows));
            }
            last = mishap;
        }
        course.said = self.history_since(began)?;
        self.put_back()?;
        Ok(course)
    }

    fn dirs(&self) -> &Dirs {
        self.rig.dirs()
    }

    /// Runs the `rtvirtio` command.
    fn rtvirtio(&self, args: &[&str]) -> anyhow::Result<()> {
        let out = Command::new(self.options.service.with_file_name("rtvirtio"))
            .args(args)
            .env("RTVIRTIO_RUN_DIR", &self.dirs().run)
            .env("RTVIRTIO_STATE_DIR", &self.dirs().state)
            .stdin(Stdio::null())
            .output()
            .context("rtvirtio: build it first")?;
        let words = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "rtvirtio {}: {}: {words}", args.join(" "), out.status);
        Ok(())
    }

    fn set_up(&mut self) -> anyhow::Result<()> {
        let text = self.plant.spec_text()?;
        if !self.service {
            self.progress.step("a day under a static plan");
            let spec = self.rig.path().join("day.toml");
            fs::write(&spec, text)?;
            return self.rtvirtio(&["apply", &spec.display().to_string()]);
        }
        self.progress.step("the same day under the service");
        fs::write(self.rig.path().join("rtvirtiod.toml"), CONFIG)?;
        fs::write(self.rig.path().join("contracts.d/day.toml"), text)?;
        self.rig.start()?;
        let begin = Instant::now();
        loop {
            let status = self.rig.status()?;
            let is_set = status.plan.as_ref().is_some_and(|plan| plan.state == PlanState::InForce);
            if is_set && self.rig.state(VMS[PLC]) == Some(VmState::InForce) {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < 4 * CORRECTION_TIMEOUT,
                "the service does not hold the contracts: {status:?}"
            );
            std::thread::sleep(LOOK);
        }
    }

    /// Name of the thread that is added.
    fn thread(&self) -> &'static str {
        if self.service { "added-service" } else { "added-static" }
    }

    fn put_back(&mut self) -> anyhow::Result<()> {
        self.rig.kill();
        let id = self.thread();
        self.plant.guest(PLC)?.qmp()?.execute("object-del", Some(json!({ "id": id })))?;
        // The slow device and the flood are over; the rest of the plan is reverted too.
        self.rtvirtio(&["revert", "--force"])
    }

    /// Causes a fault. Returns the time until the settings were correct again, where it is awaited.
    fn mishap(&mut self, mishap: Fault, last: Fault) -> anyhow::Result<Option<Duration>> {
        match mishap {
            Fault::Nothing | Fault::Flood => Ok(None),
            Fault::Over => {
                self.plant.slow(false)?;
                ensure!(matches!(last, Fault::Flood | Fault::Slow), "nothing to end");
                Ok(None)
            }
            Fault::Slow => self.plant.slow(true).map(|()| None),
            Fault::Restart => {
                let before = self.planned;
                self.plant.restart(BATCH)?;
                self.wait(Instant::now(), |day| Ok(day.plant.limit(BATCH)? == before))
            }
            Fault::Thread => {
                let begin = Instant::now();
                let mut qmp = self.plant.guest(PLC)?.qmp()?;
                let id = self.thread();
                qmp.execute("object-add", Some(json!({ "qom-type": "iothread", "id": id })))?;
                let all = qmp.query_iothreads()?;
                drop(qmp);
                let thread = all.iter().find(|t| t.id == id).context("the added thread")?;
                let tid = thread.thread_id.unsigned_abs();
                self.wait(begin, |_| Ok(sched::get(tid)?.policy == Policy::Fifo))
            }
            Fault::Limit => {
                self.plant.lift_limit(BATCH)?;
                let before = self.planned;
                self.wait(Instant::now(), |day| Ok(day.plant.limit(BATCH)? == before))
            }
        }
    }

    fn wait(
        &mut self,
        begin: Instant,
        mut is_so: impl FnMut(&mut Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Option<Duration>> {
        while begin.elapsed() < CORRECTION_TIMEOUT {
            if is_so(self)? {
                return Ok(Some(begin.elapsed()));
            }
            self.progress.check_cancelled()?;
            std::thread::sleep(LOOK);
        }
        Ok(None)
    }

    fn window(&mut self, hour: usize, mishap: Fault) -> anyhow::Result<Window> {
        let site = Site::find(self.plant.spec()?, self.dirs())?;
        let mut loads = site.loads(&[])?;
        let floods = mishap == Fault::Flood;
        if floods {
            for task in &mut loads.get_mut(HIST).context("a load")?.vm.tasks {
                task.rate = task.rate.map(|rate| Iops(rate.0 * FLOOD));
            }
        }
        let run = measure_loads(
            &site,
            loads,
            mishap.description(),
            self.options.window,
            self.dirs(),
            self.progress,
        )?;
        let window = judged(&run, hour, self.begin.elapsed(), floods);
        self.progress.step(&format!(
            "{:.0} s, {}: p99 {:.1} ms, missed {}, met {}",
            window.at_s,
            mishap.description(),
            window.p99_ms,
            window.missed,
            window.met
        ));
        Ok(window)
    }

    fn history_since(&self, began: Timestamp) -> anyhow::Result<Vec<Said>> {
        if !self.service {
            return Ok(Vec::new());
        }
        let mut out = Vec::new();
        for event in read_history(&self.dirs().state.join(HISTORY_FILE))? {
            let time: Timestamp = event.time.parse()?;
            let at_s = time.duration_since(began).as_secs_f64();
            if event.kind != EventKind::Note {
                out.push(Said {
                    at_s,
                    text: event.vm.map_or(String::new(), |vm| format!("{vm}: ")) + &event.text,
                });
            }
        }
        Ok(out)
    }
}

/// Time from a moment of the day to the next plan put in force; `None` without one.
fn new_plan(said: &[Said], at: Duration) -> Option<Duration> {
    let begins = format!("{PLAN}: plan put in force");
    let plan = said.iter().find(|s| s.at_s > at.as_secs_f64() && s.text.starts_with(&begins))?;
    Some(Duration::from_secs_f64(plan.at_s).saturating_sub(at))
}

/// Verdicts of a run. The target of a VM that sends more than it declares does not count.
fn judged(run: &Run, hour: usize, at: Duration, floods: bool) -> Window {
    let tasks = || run.tasks.iter().filter(|t| !(floods && t.vm == VMS[HIST]));
    let count = |verdict: Verdict| tasks().filter(|t| t.verdict == Some(verdict)).count();
    let p99 = run.tasks.iter().filter(|t| t.vm == VMS[PLC]).map(|t| t.p99_ns).max().unwrap_or_default();
    Window {
        hour,
        at_s: rounded(at),
        missed: count(Verdict::Missed),
        met: count(Verdict::Met),
        unproven: count(Verdict::Unproven),
        p99_ms: p99.as_millis_f64(),
    }
}

fn reaction(hour: usize, at: Duration, set: Option<Duration>, windows: &[Window]) -> Reaction {
    let from = (at + set.unwrap_or_default()).as_secs_f64();
    // A window that began before has the old settings.
    let of_hour: Vec<&Window> = windows.iter().filter(|w| w.hour == hour).collect();
    let begins = |i: usize| i.checked_sub(1).map_or(at.as_secs_f64(), |before| of_hour[before].at_s);
    let verified = (0..of_hour.len()).find(|i| begins(*i) >= from - 1e-3 && of_hour[*i].missed == 0);
    Reaction {
        hour,
        set_s: set.map(rounded),
        verified_s: verified.map(|i| rounded(Duration::from_secs_f64(of_hour[i].at_s).saturating_sub(at))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_plan_is_found_among_what_the_service_says() {
        let said = |at_s: f64, text: &str| Said { at_s, text: text.to_owned() };
        // As a day's saved result has them.
        let all = [
            said(-0.5, "(plan): plan put in force: contracts are to be held"),
            said(29.2, "plc: taken in: new threads"),
            said(60.0, "(plan): plan put in force: more load than declared"),
        ];
        assert_eq!(new_plan(&all, Duration::from_secs(20)), Some(Duration::from_secs(40)));
        assert_eq!(new_plan(&all, Duration::from_secs(61)), None);
    }

    #[test]
    fn a_reaction_is_verified_by_a_window_that_began_after_it() {
        let window = |at_s: f64, missed| Window { hour: 4, at_s, missed, met: 1, unproven: 0, p99_ms: 1.0 };
        let windows = [window(120.0, 1), window(140.0, 0), window(160.0, 1), window(180.0, 0)];
        let of =
            |set: Option<u64>| reaction(4, Duration::from_secs(100), set.map(Duration::from_secs), &windows);
        assert_eq!(of(None).verified_s, Some(40.0));
        assert_eq!(of(Some(20)).verified_s, Some(40.0));
        assert_eq!(of(Some(21)).verified_s, Some(80.0), "the second window began before");
        assert_eq!(of(Some(100)).verified_s, None);
    }
}
