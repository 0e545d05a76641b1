//! The state of the service, as text.

use std::fmt::Write as _;
use std::process::ExitCode;

use rtvirtio_console::CONFLICT;
use rtvirtio_daemon::{Snapshot, VmSnapshot};
use rtvirtio_report::terminal;
use serde::Serialize;

/// Not everything is as the contracts ask.
pub fn exit_code(status: &Snapshot) -> ExitCode {
    if status.is_whole() { ExitCode::SUCCESS } else { ExitCode::from(CONFLICT) }
}

/// The word of a variant, with spaces.
fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().replace('_', " ")
}

/// One line for each VM, and one for each setting that another program has changed.
pub fn vm_lines(vms: &[&VmSnapshot]) -> String {
    let mut out = String::new();
    for vm in vms {
        let criticality = vm.criticality.map_or("-", |c| c.word());
        let why = vm.why.as_ref().map_or_else(String::new, |why| format!(": {}", terminal(why, false)));
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {:<20} {criticality:<7} {}{why}", vm.name, word(&vm.state));
        for drift in &vm.drift {
            let found = terminal(&drift.found, false);
            let _ = writeln!(out, "    {}: CHANGED from {} to {found}", drift.knob, drift.wanted);
        }
    }
    out
}

/// The whole state.
pub fn text(status: &Snapshot) -> String {
    let vms: Vec<&VmSnapshot> = status.vms.iter().collect();
    let mut out =
        format!("rtvirtiod (process {}, {}): {} contracts\n", status.pid, word(&status.mode), vms.len());
    out += &vm_lines(&vms);
    for fault in &status.faults {
        let _ = writeln!(out, "  {} is not used: {}", fault.file, terminal(&fault.why, true));
    }
    for problem in &status.problems {
        let _ = writeln!(out, "  {}", terminal(problem, false));
    }
    out
}
