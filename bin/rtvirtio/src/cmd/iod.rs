//! `rtvirtio iod ...`: the running I/O domain.

mod trace;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use rtvirtio_console::{Global, Ui, show};
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_workflow::domain::client::{ask, send_command};
use serde_json::Value;

use crate::args::IodCommand;

/// `rtvirtio iod ...`.
pub fn run(command: &IodCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let at = |given: &Option<PathBuf>| given.clone().unwrap_or_else(|| global.run_dir.join("iod.sock"));
    let args = match command {
        IodCommand::Status(args) => args,
        IodCommand::Reload(args) => {
            let control = at(&args.control);
            let reply = send_command(&control, "reload")?;
            if let Some(error) = reply["error"].as_str() {
                anyhow::bail!("{}: {error}", control.display());
            }
            show(ui, &reply, || changes(&reply))?;
            return Ok(ExitCode::SUCCESS);
        }
        IodCommand::Trace(args) => return trace::run(args, &at(&args.control), ui),
    };
    if let Some(every) = args.watch {
        return watch::run(&at(&args.control), every, ui);
    }
    let status = ask(&at(&args.control))?;
    show(ui, &status, || table(&status))?;
    Ok(ExitCode::SUCCESS)
}

fn changes(reply: &Value) -> String {
    let none = Vec::new();
    let changed = reply["changed"].as_array().unwrap_or(&none);
    if changed.is_empty() {
        return "nothing is new\n".into();
    }
    changed.iter().map(|c| format!("in force: {}\n", c.as_str().unwrap_or_default())).collect()
}

fn table(status: &Value) -> String {
    let none = Vec::new();
    let list = |key: &str| status[key].as_array().unwrap_or(&none).clone();
    let mut s = String::new();
    for d in list("devices") {
        s.push_str(&format!(
            "device {}: window {}, {} pieces held by regulators, p99.99 {} late\n",
            d["name"].as_str().unwrap_or_default(),
            d["window"],
            d["held"],
            Nanos(d["late_p9999_ns"].as_u64().unwrap_or(0)),
        ));
        if d["discard_pieces"].as_u64().unwrap_or(0) > 0 {
            s.push_str(&format!(
                "                 discards: {} pieces, the longest took {}; {} took longer than `cost.discard`\n",
                d["discard_pieces"],
                Nanos(d["discard_longest_ns"].as_u64().unwrap_or(0)),
                d["discard_overruns"],
            ));
        }
    }
    s.push_str(&format!(
        "{:<16} {:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}\n",
        "VM", "", "requests", "moved", "p50", "p99", "p99.99", "longest", "alpha", "Delta", "capped"
    ));
    for vm in list("vms") {
        for (i, direction) in ["read", "write"].into_iter().enumerate() {
            let f = &vm[direction];
            let time = |key: &str| Nanos(f[key].as_u64().unwrap_or(0)).to_string();
            let name = if i == 0 { vm["name"].as_str().unwrap_or_default() } else { "" };
            s.push_str(&format!(
                "{name:<16} {direction:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}\n",
                f["requests"],
                Bytes(f["bytes"].as_u64().unwrap_or(0) >> 20 << 20).to_string(),
                time("p50_ns"),
                time("p99_ns"),
                time("p9999_ns"),
                time("max_ns"),
                format!("{:.1}MB/s", f["alpha_bytes_per_second"].as_f64().unwrap_or(0.0) / 1e6),
                time("delta_ns"),
                f["cap_hits"],
            ));
        }
        if vm["attached"] == false {
            s.push_str("                 no guest is attached\n");
        }
        for fault in ["errors", "malformed", "broken"] {
            if vm[fault].as_u64().unwrap_or(0) > 0 {
                s.push_str(&format!("                 {fault}: {}\n", vm[fault]));
            }
        }
    }
    s
}
