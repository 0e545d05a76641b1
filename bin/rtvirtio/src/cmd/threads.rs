//! `rtvirtio threads`: threads of a VM with the settings that control them.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_console::{Global, Ui, show, style};
use rtvirtio_cpu::{Control, control};
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_planner::Enforcement;
use rtvirtio_report::text::{Cell, Column, Paint, Table};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::threads::{discover, main_loop_without_vcpus};
use rtvirtio_vmm::{Thread, Watcher};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::find::{HostVm, find};
use rtvirtio_workflow::keep::UrgencyStatus;
use serde::Serialize;
use serde_json::Value;

use crate::args::ThreadsArgs;

/// Interval of checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Shortest interval: a shorter one would itself be a load.
const LEAST: Duration = Duration::from_millis(10);

/// A thread with the settings that control it.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    thread: Thread,
    control: Control,
}

/// Threads of one VM.
#[derive(Serialize)]
struct VmThreads {
    vm: String,
    threads: Vec<Line>,
    /// State of the vCPUs' urgency, as last written by `keep`.
    #[serde(skip_serializing_if = "Option::is_none")]
    urgency: Option<Value>,
}

pub fn run(args: &ThreadsArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let root = Root::default();
    let vms = find(args.target.as_deref(), args.vm.as_deref(), &global.dirs())?;
    let cpu = Cgroups::detect_cpu(&root);
    if let Err(e) = &cpu {
        ui.warn(&e.to_string());
    }
    let cpu = cpu.ok();
    if args.watch {
        watch(args, &root, cpu.as_ref(), &vms, ui)?;
        return Ok(ExitCode::SUCCESS);
    }
    let urgency = UrgencyStatus::read(&global.dirs())?;
    let mut all = Vec::new();
    for vm in vms {
        let threads =
            discover(&root, &vm.handle(ui)?).with_context(|| format!("{}: is it running?", vm.name))?;
        if threads.is_empty() {
            bail!("{}: none of its processes is there: is it running?", vm.name);
        }
        if let Some(main) = main_loop_without_vcpus(&threads) {
            ui.warn(&format!(
                "{}: which threads of process {} run its vCPUs is not known, so no contract can limit them: name the VM by `qmp` or `domain`, or start QEMU \
                 with `-name NAME,debug-threads=on`",
                vm.name, main.pid
            ));
        }
        let lines = threads.into_iter().map(|t| line(&root, cpu.as_ref(), t));
        let urgency = urgency.as_ref().and_then(|u| u.of_vm(&vm.name)).cloned();
        all.push(VmThreads { vm: vm.name, threads: lines.collect::<anyhow::Result<_>>()?, urgency });
    }
    show(ui, &all, || all.iter().map(|vm| table(vm, cpu.as_ref())).collect::<Vec<_>>().join("\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn line(root: &Root, cpu: Option<&Cgroups>, thread: Thread) -> anyhow::Result<Line> {
    Ok(Line { control: control(root, cpu, &thread)?, thread })
}

fn held(control: &Control) -> (&'static str, Paint) {
    match control.strength {
        Some(kind @ Enforcement::Guarantee) => (kind.name(), Paint::Good),
        Some(kind @ (Enforcement::Cap | Enforcement::Hint)) => (kind.name(), Paint::Open),
        None => ("not under control", Paint::Bad),
    }
}

fn table(vm: &VmThreads, cpu: Option<&Cgroups>) -> String {
    let mut table = Table::new(vec![
        Column::number("tid"),
        Column::word("role"),
        Column::name("name"),
        Column::word("policy"),
        Column::word("CPUs"),
        Column::name("cgroup"),
        Column::number("CPU time"),
        Column::word("held"),
        Column::word("by"),
    ]);
    for Line { thread: t, control } in &vm.threads {
        let (word, paint) = held(control);
        let by = control.by.map_or_else(|| control.what.clone(), |b| format!("{b} {}", control.what));
        let cgroup =
            cpu.and_then(|c| c.of_thread(&t.cgroups)).map_or_else(String::new, |p| p.display().to_string());
        table.row(vec![
            t.tid.to_string().into(),
            t.role.to_string().into(),
            t.name.clone().into(),
            t.scheduling().into(),
            t.affinity.clone().into(),
            cgroup.into(),
            nanos(t.cpu_time).to_string().into(),
            Cell::painted(word, Some(paint)),
            by.into(),
        ]);
    }
    let free = vm.threads.iter().filter(|l| l.control.by.is_none()).count();
    let sum: Duration = vm.threads.iter().map(|l| l.thread.cpu_time).sum();
    format!(
        "{}: {} threads, {free} not under control, {} of CPU time\n{}{}",
        vm.vm,
        vm.threads.len(),
        nanos(sum),
        table.draw(&style()),
        vm.urgency.as_ref().map(urgency_lines).unwrap_or_default()
    )
}

/// Lines for the vCPUs whose priority the guest moves.
fn urgency_lines(vm: &Value) -> String {
    let line = |v: &Value| {
        let unknown = || "unknown".to_owned();
        let count = |key: &str| v[key].as_u64().map_or_else(unknown, |n| n.to_string());
        let time = |key: &str| v[key].as_u64().map_or_else(unknown, |ns| Nanos(ns).to_string());
        let level = match v["level"]["priority"].as_u64() {
            Some(0) => "ordinary".to_owned(),
            Some(priority) => format!("priority {priority}"),
            None => "level unknown".to_owned(),
        };
        format!(
            "urgency of vcpu {}: {level} ({}), {} above the floor in {} promotions, {} left in this second\n",
            count("vcpu"),
            v["reason"].as_str().unwrap_or("unknown"),
            time("boosted"),
            count("promotions"),
            time("task_left")
        )
    };
    let weight = vm["weight"].as_f64().map(|weight| {
        format!(
            "weight at the floor: {:.0} % of its own, the rest is taken by what is urgent\n",
            weight * 100.0
        )
    });
    vm["vcpus"].as_array().into_iter().flatten().map(line).chain(weight).collect()
}

fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Appearance or end of a thread; with `--json` one object a line.
#[derive(Serialize)]
struct Event<'a> {
    event: &'static str,
    vm: &'a str,
    /// Upper bound of the thread's age when it was noticed, in ns.
    late_ns: u64,
    thread: &'a Thread,
    control: Control,
}

fn watch(
    args: &ThreadsArgs,
    root: &Root,
    cpu: Option<&Cgroups>,
    vms: &[HostVm],
    ui: &Ui,
) -> anyhow::Result<()> {
    let every = Duration::from_nanos(args.every.0).max(LEAST);
    let mut watchers: Vec<(String, Watcher, Option<String>)> = Vec::new();
    for vm in vms {
        watchers.push((vm.name.clone(), Watcher::new(vm.handle(ui)?), None));
    }
    let mut next = Instant::now();
    while !ui.is_cancelled() {
        for (vm, watcher, failed) in &mut watchers {
            let changes = match watcher.poll(root, Instant::now()) {
                Ok(changes) => changes,
                Err(e) if !watcher.has_polled() => return Err(e.into()),
                // An error for one VM, such as a lack of file descriptors, does not end the watch
                // of the others.
                Err(e) => {
                    let why = e.to_string();
                    if failed.as_ref() != Some(&why) {
                        ui.warn(&format!("{vm}: not inspected: {why}"));
                    }
                    *failed = Some(why);
                    continue;
                }
            };
            *failed = None;
            for new in &changes.appeared {
                let late_ns = nanos(new.late).0;
                event(
                    &Event {
                        event: "appeared",
                        vm,
                        late_ns,
                        thread: &new.thread,
                        control: control(root, cpu, &new.thread).unwrap_or_else(|e| Control {
                            by: None,
                            strength: None,
                            what: format!("not known: {e}"),
                        }),
                    },
                    ui,
                )?;
            }
            for old in &changes.gone {
                // The settings of an ended thread cannot be read any more.
                let control = Control { by: None, strength: None, what: "ended".to_owned() };
                event(&Event { event: "ended", vm, late_ns: 0, thread: old, control }, ui)?;
            }
        }
        if watchers.iter().all(|(_, w, failed)| failed.is_none() && w.threads().next().is_none()) {
            ui.step("no thread is left: the VMs have ended");
            return Ok(());
        }
        next += every;
        while !ui.is_cancelled() && Instant::now() < next {
            std::thread::sleep(POLL_INTERVAL.min(next.saturating_duration_since(Instant::now())));
        }
    }
    Ok(())
}

fn event(event: &Event<'_>, ui: &Ui) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let (t, c) = (event.thread, &event.control);
    let result = if ui.json {
        writeln!(out, "{}", serde_json::to_string(event)?)
    } else {
        let late =
            if event.late_ns > 0 { format!(", at most {} ago", Nanos(event.late_ns)) } else { String::new() };
        let what = if event.event == "ended" {
            format!("after {} of CPU time", nanos(t.cpu_time))
        } else {
            format!("{}; {}: {}{late}", t.scheduling(), held(c).0, c.what)
        };
        // With the names of a thread, of a role that QEMU tells, and of a cgroup perhaps.
        let line = format!("{} {} {} {} ({}): {what}", event.event, event.vm, t.tid, t.role, t.name);
        writeln!(out, "{}", rtvirtio_report::terminal(&line, false))
    };
    match result.and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_urgency_file_does_not_say_is_unknown() {
        let mut vm = json!({ "vcpus": [{ "vcpu": 1, "level": { "priority": 0 }, "reason": "floor", "boosted": 2_000,
            "promotions": 3, "task_left": 0 }] });
        let whole = "urgency of vcpu 1: ordinary (floor), 2us above the floor in 3 promotions, 0ns left in this second\n";
        assert_eq!(urgency_lines(&vm), whole);
        for key in ["level", "boosted", "promotions", "task_left", "reason"] {
            let known = vm["vcpus"][0][key].take();
            assert_eq!(urgency_lines(&vm).matches("unknown").count(), 1, "{key}: {}", urgency_lines(&vm));
            vm["vcpus"][0][key] = known;
        }
    }
}
