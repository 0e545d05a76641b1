//! Shell commands that put one value back.

use std::path::{Component, Path};

use rtvirtio_kernel::sched::{Attr, Policy};
use rtvirtio_kernel::{irq, text};

use super::{guest, is_hidden};
use crate::machine::{ABSENT, TASKS};
use crate::target::{Form, Place, Target};

/// Commands, each on its own line; comment lines begin with `#`.
pub(super) fn restore(target: &Target, old: Option<&str>, created: bool) -> Result<Vec<String>, String> {
    let Some(old) = old.or(target.form.unset()) else {
        if !created {
            return Err("its old value cannot be read".to_owned());
        }
        return Ok(vec!["# its file did not exist, and goes with the setting that made it".to_owned()]);
    };
    if let Some((vm, agent)) = guest(target) {
        let (vm, agent) = (quoted(vm)?, quoted(&agent.to_string())?);
        let line = echo(&target.form.text(old), &target.path)?;
        return Ok(vec![format!("# in the guest {vm} (agent {agent}): {line}")]);
    }
    match (&target.form, &target.place) {
        (Form::Scheduling, Place::Thread { pid, tid, start }) => {
            let attr: Attr = old.parse().map_err(|e| format!("{e}"))?;
            Ok(vec![format!("{} && {}", same_thread(*pid, *tid, *start), chrt(*tid, &attr)?)])
        }
        (Form::Affinity, Place::Thread { pid, tid, start }) => {
            let cpus = text::cpu_list(old).ok_or("its old value is no list of CPUs")?;
            let list = text::cpu_ranges(&cpus);
            Ok(vec![format!("{} && taskset --cpu-list --pid {list} {tid}", same_thread(*pid, *tid, *start))])
        }
        (Form::Interrupt { vector, inode }, Place::Host) => {
            let cpus = text::cpu_list(old).ok_or("its old value is no list of CPUs")?;
            let (list, file) = (text::cpu_ranges(&cpus), interrupt_file(&target.path)?);
            let vector = kernel_file(vector)?;
            Ok(vec![format!("test \"$(stat -c %i {vector})\" = {inode} && echo {list} > {file}")])
        }
        (
            Form::ThreadCgroup { mount, .. } | Form::ResctrlTask { mount },
            Place::Thread { pid, tid, start },
        ) => {
            let tasks = below(mount, old)?.join(TASKS);
            let line = echo(&tid.to_string(), &tasks)?;
            Ok(vec![format!("{} && {line}", same_thread(*pid, *tid, *start))])
        }
        (Form::Group { home, .. }, Place::Host) if old == ABSENT => {
            let (group, from, to) = (
                kernel_file(&target.path)?,
                kernel_file(&target.path.join(TASKS))?,
                kernel_file(&home.join(TASKS))?,
            );
            Ok(vec![
                format!("for thread in $(cat {from}); do echo \"$thread\" > {to}; done"),
                format!("rmdir {group}"),
            ])
        }
        (Form::ResctrlGroup { .. }, Place::Host) if old == ABSENT => {
            Ok(vec![format!("rmdir {}", kernel_file(&target.path)?)])
        }
        (_, Place::Thread { .. })
        | (
            Form::Group { .. }
            | Form::ResctrlGroup { .. }
            | Form::ResctrlTask { .. }
            | Form::Scheduling
            | Form::Affinity
            | Form::Interrupt { .. }
            | Form::ThreadCgroup { .. },
            _,
        ) => Err("its place and its form do not fit together".to_owned()),
        (Form::DeviceWeight { dev }, Place::Host) if old == "default" => {
            dev_number(dev)?;
            let file = kernel_file(&target.path)?;
            // `MAJ:MIN default` would hide the line and leave the weight in effect.
            Ok(vec![
                format!("# this erases the lines of all devices in {file}: write those of others again"),
                format!(
                    "weight=$(awk '$1 == \"default\" {{ print $2 }}' {file}) && echo \"$weight\" > {file}"
                ),
            ])
        }
        (form, Place::Host) if form.unit().is_some() => unit(form, old),
        (form, Place::Host) => {
            if let Some(dev) = target.dev() {
                dev_number(dev)?;
            }
            // `echo` ends even an empty list with the line feed that the kernel needs.
            Ok(vec![echo(form.text(old).trim_end(), &target.path)?])
        }
        (_, Place::Guest { .. }) => Err("it is inside a guest".to_owned()),
    }
}

/// Properties of a unit of systemd.
fn unit(form: &Form, old: &str) -> Result<Vec<String>, String> {
    let unit = quoted(form.unit().unwrap_or_default())?;
    if let (Form::UnitDeviceWeight { path, .. }, "default") = (form, old) {
        return Ok(vec![
            format!(
                "# `IODeviceWeight=` erases the weights of all devices: set those but {} again",
                quoted(path)?
            ),
            format!("systemctl set-property --runtime -- {unit} IODeviceWeight="),
        ]);
    }
    let assignments: Result<Vec<String>, String> = form.text(old).lines().map(quoted).collect();
    Ok(vec![format!("systemctl set-property --runtime -- {unit} {}", assignments?.join(" "))])
}

fn echo(value: &str, file: &Path) -> Result<String, String> {
    let file = kernel_file(file)?;
    // Values that `echo` of some shells takes for an option or an escape.
    let option = value.strip_prefix('-').is_some_and(|letters| letters.chars().all(|c| "neE".contains(c)));
    let print = if option || value.contains('\\') { "printf '%s\\n'" } else { "echo" };
    Ok(format!("{print} {} > {file}", quoted(value)?))
}

/// Condition that thread `tid` started at the time in the journal: thread ids are reused.
fn same_thread(pid: u32, tid: u32, start: u64) -> String {
    // Field 22 of `stat`; the name, in parentheses, may hold anything.
    format!("test \"$(sed 's/.*) //' /proc/{pid}/task/{tid}/stat | cut -d' ' -f20)\" = {start}")
}

fn chrt(tid: u32, attr: &Attr) -> Result<String, String> {
    let reset = if attr.reset_on_fork { "--reset-on-fork " } else { "" };
    let name = attr.policy.name();
    let nice = format!(" && renice -n {} -p {tid}", attr.nice);
    Ok(match (attr.policy, attr.reservation) {
        (Policy::Fifo | Policy::Rr, _) => format!("chrt {reset}--{name} --pid {} {tid}", attr.priority),
        (Policy::Deadline, Some(r)) => format!(
            "chrt {reset}--deadline --sched-runtime {} --sched-deadline {} --sched-period {} --pid 0 {tid}",
            r.runtime, r.deadline, r.period
        ),
        (Policy::Other | Policy::Batch | Policy::Idle, _) => {
            format!("chrt {reset}--{name} --pid 0 {tid}{nice}")
        }
        _ => return Err(format!("chrt cannot set the policy `{attr}`")),
    })
}

/// Directory of a cgroup below the mount of its hierarchy.
fn below(mount: &Path, cgroup: &str) -> Result<std::path::PathBuf, String> {
    let path = mount.join(cgroup.trim_start_matches('/'));
    if path.starts_with(mount) { Ok(path) } else { Err("it is not a cgroup's path".to_owned()) }
}

fn dev_number(dev: &str) -> Result<(), String> {
    if text::is_dev(dev) { Ok(()) } else { Err("it has no device number".to_owned()) }
}

/// Quoted path, if it lies below `/sys` without `..`.
fn kernel_file(path: &Path) -> Result<String, String> {
    let direct = path.components().skip(1).all(|c| matches!(c, Component::Normal(_)));
    if !direct || !path.starts_with("/sys") {
        return Err("its path does not lie below /sys".to_owned());
    }
    quoted(&path.to_string_lossy())
}

/// Path of an interrupt's CPUs.
fn interrupt_file(path: &Path) -> Result<String, String> {
    irq::number_in(&path.to_string_lossy())
        .map(|n| irq::affinity_file(n).display().to_string())
        .ok_or("its path is no interrupt's".to_owned())
}

/// Text as a single word of a shell, in single quotes.
fn quoted(text: &str) -> Result<String, String> {
    if text.chars().any(is_hidden) {
        return Err("it holds control characters".to_owned());
    }
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}
