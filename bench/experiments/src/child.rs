//! Other programs of ours as measured processes.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rtvirtio_workflow::Progress;
use rustix::process::{Pid, Signal, kill_process};

/// Exit codes with a result: met, a claim or target missed, a target not proven.
const WITH_RESULT: [i32; 3] = [0, 2, 4];
/// Time limit of a program to restore all settings after a signal.
const PUT_BACK: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(50);
/// Longest wait for the last lines, and for the result, of a program that has ended.
const AFTER_END: Duration = Duration::from_secs(5);
/// Number of lines kept of a failed program.
const LAST_WORDS: usize = 3;

/// End of a program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Standard output of a program with a result, and its exit code.
    Result(String, i32),
    /// Reason why there is none.
    Failed(String),
}

/// Runs a program of ours to its end, or asks it to end at the limit. It has a process group of its
/// own, so that Ctrl-C reaches it once, from here; it restores all settings.
///
/// # Errors
/// The program does not start, or the kernel refuses to wait for it.
pub(crate) fn run(
    program: &Path,
    args: &[String],
    (name, limit): (&str, Duration),
    progress: &dyn Progress,
) -> anyhow::Result<Ended> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().with_context(|| program.display().to_string())?;
    let stdout = read_all(child.stdout.take());
    let lines = read_lines(child.stderr.take());
    let begin = Instant::now();
    let mut signalled: Option<(Instant, String)> = None;
    let mut last: Vec<String> = Vec::new();
    let show = |line: String, last: &mut Vec<String>| {
        let line = line.strip_prefix("rtvirtio: ").unwrap_or(&line).to_owned();
        progress.step(&format!("{name}: {line}"));
        last.push(line);
        let surplus = last.len().saturating_sub(LAST_WORDS);
        last.drain(..surplus);
    };
    let status = loop {
        lines.try_iter().for_each(|line| show(line, &mut last));
        if let Some(status) = child.try_wait()? {
            break status;
        }
        match &signalled {
            None if progress.is_cancelled() => {
                signal(&child, Signal::INT);
                signalled = Some((Instant::now(), "stopped as asked".to_owned()));
            }
            None if begin.elapsed() > limit => {
                signal(&child, Signal::INT);
                signalled = Some((Instant::now(), format!("stopped after {} s", limit.as_secs())));
            }
            Some((at, _)) if at.elapsed() > PUT_BACK => child.kill()?,
            _ => {}
        }
        thread::sleep(POLL);
    };
    // To the end of its output; a process that it left behind may hold the other end.
    let end = Instant::now() + AFTER_END;
    while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
        show(line, &mut last);
    }
    if let Some((_, why)) = signalled {
        return Ok(Ended::Failed(why));
    }
    let text = stdout.recv_timeout(AFTER_END).unwrap_or_default();
    Ok(match status.code() {
        Some(code) if WITH_RESULT.contains(&code) => Ended::Result(text, code),
        _ => Ended::Failed(last_words(status, &text, &last)),
    })
}

/// Reason of a failure: the command's error as JSON, else its last lines.
fn last_words(status: ExitStatus, stdout: &str, last: &[String]) -> String {
    let error = serde_json::from_str::<serde_json::Value>(stdout).ok();
    match error.as_ref().and_then(|error| error["error"].as_str()) {
        // The program's own output may follow, on lines of its own.
        Some(error) => error.lines().next().unwrap_or_default().to_owned(),
        None if last.is_empty() => status.to_string(),
        None => last.join("; "),
    }
}

fn signal(child: &Child, signal: Signal) {
    // The child has not been waited for, so the id is its own.
    let _ = kill_process(Pid::from_child(child), signal);
}

fn read_all(from: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (to, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // A result that is cut is not readable, which is said then.
            let _ = from.read_to_end(&mut bytes);
        }
        let _ = to.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

fn read_lines(from: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (to, receiver) = mpsc::channel();
    thread::spawn(move || {
        let Some(from) = from else { return };
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if to.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
#[path = "child_tests.rs"]
mod tests;
