//! Weights of other devices, in files whose default must be rewritten: that erases the lines of all
//! devices.

use std::collections::BTreeMap;

use rtvirtio_kernel::text;

use crate::journal::{Journal, OtherWeight};
use crate::machine::{Fault, Machine};
use crate::outcome::{Fate, Outcome};
use crate::target::{Form, Target};

/// Notes the lines of other devices in the journal, before any is erased. Lines that are put back
/// themselves are not kept, but may be missing on our account until they are. A knob whose file
/// cannot be read is not touched.
pub(super) fn remember(
    journal: &mut Journal,
    todo: &mut BTreeMap<usize, String>,
    fates: &mut BTreeMap<usize, Fate>,
    machine: &Machine<'_>,
) {
    let ours: Vec<Target> =
        journal.entries.iter().filter(|e| todo.contains_key(&e.id)).map(|e| e.target.clone()).collect();
    let mut erased: Vec<Target> = Vec::new();
    for entry in &journal.entries {
        let (Form::DeviceWeight { dev }, Some("default")) = (&entry.target.form, entry.old.as_deref()) else {
            continue;
        };
        if !todo.contains_key(&entry.id) {
            continue;
        }
        let weights = match machine.read(&entry.target) {
            Ok(file) => text::weights(&file).ok_or_else(|| not_understood(&file)),
            Err(fault) => Err(fault.into_io().to_string()),
        };
        let weights = match weights {
            Ok(weights) => weights,
            Err(error) => {
                todo.remove(&entry.id);
                fates.insert(entry.id, Fate::Failed { error });
                continue;
            }
        };
        for (other, weight) in weights.devices.into_iter().filter(|(d, _)| d != dev) {
            let mut target = entry.target.clone();
            target.form = Form::DeviceWeight { dev: other };
            if ours.contains(&target) {
                erased.push(target);
            } else if !journal.kept.iter().any(|k| k.target == target) {
                journal.kept.push(OtherWeight {
                    target,
                    value: weight.to_string(),
                    identity: entry.identity,
                });
            }
        }
    }
    for entry in journal.entries.iter_mut().filter(|e| erased.contains(&e.target)) {
        let missing = "default".to_owned();
        if entry.old.as_ref() != Some(&missing) && !entry.also_ours.contains(&missing) {
            entry.also_ours.push(missing);
        }
    }
}

/// Writes lines again that are missing after a kill or an error while a default was rewritten.
/// Lines that may still be missing stay in the journal; returns one outcome for each.
pub(super) fn rewrite(journal: &mut Journal, machine: &Machine<'_>) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    journal.kept.retain(|kept| match rewrite_one(kept, machine) {
        Ok(()) => false,
        Err(error) => {
            outcomes.push(Outcome {
                knob: "weight of another device".to_owned(),
                path: kept.target.to_string(),
                old: Some(kept.target.form.shown(&kept.value)),
                fate: Fate::Failed { error },
            });
            true
        }
    });
    outcomes
}

fn rewrite_one(kept: &OtherWeight, machine: &Machine<'_>) -> Result<(), String> {
    match is_missing(kept, machine) {
        Ok(true) => {}
        Ok(false) | Err(Fault::Gone(_)) => return Ok(()),
        Err(Fault::Io(e)) => return Err(e.to_string()),
    }
    match machine.write(&kept.target, &kept.target.form.text(&kept.value)) {
        Ok(()) => {}
        // The device is gone, and its line with it.
        Err(Fault::Gone(_)) => return Ok(()),
        Err(Fault::Io(e)) => return Err(format!("writing `{}`: {e}", kept.value)),
    }
    match is_missing(kept, machine) {
        Ok(true) => Err(format!("`{}` was written but it shows none", kept.value)),
        Ok(false) | Err(Fault::Gone(_)) => Ok(()),
        Err(Fault::Io(e)) => Err(format!("reading back: {e}")),
    }
}

/// Whether the file has no line for the device. A later cgroup of the same name never had one.
fn is_missing(kept: &OtherWeight, machine: &Machine<'_>) -> Result<bool, Fault> {
    if let (Some(identity), Some(dir)) = (kept.identity, kept.target.path.parent()) {
        if machine.host().identity(dir).map_err(Fault::from_io)? != identity {
            return Ok(false);
        }
    }
    let file = machine.read(&kept.target)?;
    let value = kept.target.form.value(&file);
    value.map(|v| v == "default").ok_or_else(|| Fault::Io(std::io::Error::other(not_understood(&file))))
}

fn not_understood(file: &str) -> String {
    format!("it holds `{}`, which is not understood", file.trim())
}
