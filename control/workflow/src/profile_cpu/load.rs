//! Load of a VM, and its answered requests per second.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_measure::http::{self, Request, Url};
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rustix::process::{Pid, Signal};

use crate::error::{Context as _, Result, bail};
use crate::progress::Progress;

/// Before a web load is counted: some periods, and what the guest's caches need.
const WARM_UP: Duration = Duration::from_secs(1);
/// A command may take so many times as long as it was asked to, and this long more: a starved
/// server makes clients wait.
const LATE: (u32, Duration) = (4, Duration::from_secs(60));
/// Time between two polls of a command.
const POLL: Duration = Duration::from_millis(20);
/// Bytes of a command's output that are read.
const TAIL: u64 = 4096;
/// Placeholder of the length in a command.
const SECONDS: &str = "{seconds}";

/// Load of a VM, from this host.
pub enum Load {
    /// Requests to a web server.
    Http {
        /// Request that is repeated.
        request: Request,
        /// URL as the user wrote it.
        url: String,
        /// Number of connections at a time.
        connections: usize,
        /// Length of one answer, once it is known: at small budgets parts of one count.
        answer: Cell<Option<f64>>,
    },
    /// A command of the shell.
    Command(String),
}

/// Throughput and CPU use of a measurement.
pub struct Throughput {
    /// Requests a second that were answered.
    pub requests_per_s: f64,
    /// CPU time of the VM meanwhile, in seconds a second.
    pub cpu: f64,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { url, connections, .. } => write!(f, "{url} over {connections} connections"),
            Self::Command(text) => f.write_str(text),
        }
    }
}

impl Load {
    /// Requests to a web server, which follow each other at once.
    ///
    /// # Errors
    /// [`Kind::Argument`](crate::Kind::Argument) for a URL or a number that cannot be used.
    pub fn http(url: &str, connections: usize) -> Result<Self> {
        if !(1..=1000).contains(&connections) {
            bail!(Argument, "{connections} connections: 1 to 1000 are possible");
        }
        let request = Request::new(Url::find(url)?);
        Ok(Self::Http { request, url: url.to_owned(), connections, answer: Cell::new(None) })
    }

    /// A command that takes about `{seconds}` and prints a rate.
    ///
    /// # Errors
    /// [`Kind::Argument`](crate::Kind::Argument) for an empty command.
    pub fn command(text: &str) -> Result<Self> {
        if text.trim().is_empty() {
            bail!(Argument, "the load's command is empty");
        }
        Ok(Self::Command(text.to_owned()))
    }

    /// Time before a measurement counts.
    #[must_use]
    pub fn warm_up(&self) -> Duration {
        match self {
            Self::Http { .. } => WARM_UP,
            // It has its own, if any.
            Self::Command(_) => Duration::ZERO,
        }
    }

    /// Loads for `length`. `cpu` is asked at the beginning, and at the end for the CPU time since.
    ///
    /// # Errors
    /// When nothing is answered, or the user stops it.
    pub fn measure(
        &self,
        length: Duration,
        progress: &dyn Progress,
        cpu: &mut dyn FnMut() -> Result<Duration>,
    ) -> Result<Throughput> {
        match self {
            Self::Http { request, connections, answer, .. } => {
                let load = http::Load::start(request, *connections);
                progress.pause(WARM_UP)?;
                let (begin, before) = (Instant::now(), load.bytes());
                cpu()?;
                progress.pause(length)?;
                let (cpu, bytes, seconds) =
                    (cpu()?, load.bytes().saturating_sub(before), begin.elapsed().as_secs_f64());
                let counted = load.finish()?;
                if counted.answers > 0 {
                    answer.set(Some(counted.bytes as f64 / counted.answers as f64));
                }
                let Some(one) = answer.get() else {
                    let why = counted.why.unwrap_or_else(|| "no answer was whole in time".to_owned());
                    bail!(NotRunning, "{self} answered no request: {why}");
                };
                Ok(Throughput {
                    requests_per_s: bytes as f64 / one / seconds,
                    cpu: cpu.as_secs_f64() / seconds,
                })
            }
            Self::Command(text) => {
                let mut running = Running::start(&with_length(text, length), true)?;
                let begin = Instant::now();
                cpu()?;
                let most = length * LATE.0 + LATE.1;
                let status = loop {
                    progress.check_cancelled()?;
                    if let Some(status) = running.child.try_wait()? {
                        break status;
                    }
                    if begin.elapsed() > most {
                        bail!(
                            System,
                            "`{text}` has not ended after {} s: it is to take {SECONDS}",
                            most.as_secs()
                        );
                    }
                    std::thread::sleep(POLL);
                };
                let (cpu, seconds) = (cpu()?, begin.elapsed().as_secs_f64());
                if !status.success() {
                    bail!(System, "`{text}` ended with {status}: {}", tail(&mut running.errors).trim());
                }
                let rate = rate(&tail(&mut running.output), text)?;
                Ok(Throughput { requests_per_s: rate, cpu: cpu.as_secs_f64() / seconds })
            }
        }
    }

    /// Starts the load in the background, while something else is measured.
    pub fn background(&self, length: Duration) -> Result<Background<'_>> {
        Ok(match self {
            Self::Http { request, connections, answer, .. } => {
                Background::Http(http::Load::start(request, *connections), answer)
            }
            Self::Command(text) => {
                let text = with_length(text, length);
                Background::Command(Running::start(&format!("while {{ {text}\n}}; do :; done"), false)?)
            }
        })
    }
}

fn with_length(text: &str, length: Duration) -> String {
    // Whole seconds, as most clients take them.
    text.replace(SECONDS, &(length.as_secs_f64().ceil() as u64).to_string())
}

/// The last word, as a number.
fn rate(output: &str, command: &str) -> Result<f64> {
    let last = output.split_whitespace().last().unwrap_or_default();
    match last.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate >= 0.0 => Ok(rate),
        _ => bail!(
            Argument,
            "the last word that `{command}` printed is `{last}`, and not how many requests a second were answered"
        ),
    }
}

/// A load in the background.
pub enum Background<'a> {
    /// Requests to a web server.
    Http(http::Load, &'a Cell<Option<f64>>),
    /// A command that is started again and again.
    Command(Running),
}

impl Background<'_> {
    /// Ends it. Requests a second over `time`, where they are known.
    ///
    /// # Errors
    /// When it has ended, or answered nothing.
    pub fn finish(self, time: Duration) -> Result<Option<f64>> {
        match self {
            Self::Http(load, answer) => {
                let counted = load.finish().context("the neighbour's load")?;
                if counted.answers > 0 {
                    answer.set(Some(counted.bytes as f64 / counted.answers as f64));
                } else if answer.get().is_none() {
                    let why = counted.why.unwrap_or_default();
                    bail!(NotRunning, "the neighbour has answered no request: {why}");
                }
                Ok(Some(counted.answers as f64 / time.as_secs_f64()))
            }
            Self::Command(mut running) => match running.child.try_wait()? {
                None => Ok(None),
                Some(status) => {
                    bail!(
                        System,
                        "the neighbour's load ended with {status}: {}",
                        tail(&mut running.errors).trim()
                    )
                }
            },
        }
    }
}

/// A command with all that it started, in a session of its own. Dropping it ends them; so does the
/// end of this process, for the shell itself.
pub struct Running {
    child: Child,
    output: File,
    errors: File,
}

impl Running {
    fn start(text: &str, keep: bool) -> Result<Self> {
        // Files and no pipes: a process that the command leaves behind would keep these open.
        let file = || tempfile::tempfile().context("a file for the load's output");
        let (output, errors) = (file()?, file()?);
        let mut command = Command::new("sh");
        command.args(["-c", text]).stdin(Stdio::null()).stderr(errors.try_clone()?);
        command.stdout(if keep { Stdio::from(output.try_clone()?) } else { Stdio::null() });
        let child =
            spawn(command, Vec::new(), Lifetime::WithParent).context("starting the load's command")?;
        Ok(Self { child, output, errors })
    }
}

/// The end of what was written to a file.
fn tail(file: &mut File) -> String {
    let mut text = Vec::new();
    let length = file.metadata().map_or(0, |m| m.len());
    let read = file
        .seek(SeekFrom::Start(length.saturating_sub(TAIL)))
        .and_then(|_| file.take(TAIL).read_to_end(&mut text));
    read.map_or_else(|e| e.to_string(), |_| String::from_utf8_lossy(&text).into_owned())
}

impl Drop for Running {
    fn drop(&mut self) {
        if let (Ok(None), Some(pid)) =
            (self.child.try_wait(), i32::try_from(self.child.id()).ok().and_then(Pid::from_raw))
        {
            // Its session is its process group too.
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_is_the_rate() {
        assert_eq!(rate("Running 5s test\nRequests/sec: 123.5\n", "x").unwrap(), 123.5);
        for bad in ["", "12 requests", "-3", "nan", "inf"] {
            assert!(rate(bad, "x").unwrap_err().to_string().contains("`x`"), "{bad}");
        }
        assert_eq!(with_length("a -d {seconds} {seconds}", Duration::from_millis(1500)), "a -d 2 2");
    }
}
