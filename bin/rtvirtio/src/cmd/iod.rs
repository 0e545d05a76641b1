//! `rtvirtio iod ...`: the running I/O domain.

mod trace;
mod watch;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_kernel::process;
use rtvirtio_units::{Bytes, Nanos};
use serde_json::Value;

use crate::args::{Global, IodCommand};
use crate::cmd::show;
use crate::ui::Ui;

/// The domain's program.
const PROGRAM: &str = "rtvirtio-iod";
/// A domain that does not answer for so long has a fault.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer that are read: more than that of the largest domain.
const LONGEST: u64 = 16 << 20;

/// The domain's program: beside this one, or in the path.
pub fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|p| p.with_file_name(PROGRAM));
    // Another one of the path is taken only where there is none.
    beside.filter(|p| !matches!(p.try_exists(), Ok(false))).unwrap_or_else(|| PROGRAM.into())
}

/// `rtvirtio iod ...`.
pub fn run(command: &IodCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let at = |given: &Option<PathBuf>| given.clone().unwrap_or_else(|| global.run_dir.join("iod.sock"));
    let args = match command {
        IodCommand::Status(args) => args,
        IodCommand::Reload(args) => {
            let control = at(&args.control);
            let reply = say(&control, "reload")?;
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

fn connect(control: &Path) -> anyhow::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let no_answer = || format!("{}: no I/O domain answers there; is {PROGRAM} running?", control.display());
    let address = SocketAddrUnix::new(control).with_context(no_answer)?;
    let begin = Instant::now();
    loop {
        // A connection to a listener with a full backlog waits without a limit otherwise.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(rustix::io::Errno::AGAIN) if begin.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) => return Err(std::io::Error::from(e)).with_context(no_answer),
        }
    }
}

/// What a domain says about itself.
pub fn ask(control: &Path) -> anyhow::Result<Value> {
    say(control, "status")
}

/// What a domain says about itself, if it is one of these processes: another one may listen at that path.
pub fn ask_one_of(control: &Path, pids: &[u32]) -> anyhow::Result<Value> {
    let stream = connect(control)?;
    let peer = process::peer(&stream)?;
    anyhow::ensure!(
        peer.is_some_and(|pid| pids.contains(&pid)),
        "{}: another process than the I/O domain answers there{}",
        control.display(),
        peer.map_or_else(String::new, |pid| format!(" ({pid})"))
    );
    exchange(&stream, control, "status")
}

/// The process that listens at a control socket; `None` where none does.
///
/// # Errors
/// When that cannot be told.
pub fn listener(control: &Path) -> anyhow::Result<Option<String>> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    match UnixStream::connect(control) {
        Ok(stream) => {
            let pid = process::peer(&stream)?;
            Ok(Some(pid.map_or_else(|| "of another PID namespace".to_owned(), |pid| pid.to_string())))
        }
        Err(e) if matches!(e.kind(), NotFound | ConnectionRefused) => Ok(None),
        Err(e) => Err(e).with_context(|| control.display().to_string()),
    }
}

/// One command and its answer.
fn say(control: &Path, command: &str) -> anyhow::Result<Value> {
    exchange(&connect(control)?, control, command)
}

fn exchange(stream: &UnixStream, control: &Path, command: &str) -> anyhow::Result<Value> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut to = stream;
    to.write_all(format!("{{\"command\": \"{command}\"}}\n").as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream.take(LONGEST)).read_line(&mut line)?;
    serde_json::from_str(&line).with_context(|| format!("{}: not an answer", control.display()))
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
