//! Start-up time of a command in a user's own guest, with cold caches.

use std::time::Duration;

use rtvirtio_kernel::Root;
use rtvirtio_stats::Summary;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::GuestAgent;
use serde::Serialize;

use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail, ensure};
use crate::find;
use crate::progress::Progress;

/// A guest under load answers late.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of polls of the agent, which cost the guest's CPU time.
const POLL: Duration = Duration::from_millis(250);
/// Commands of the agent that this takes.
const NEEDED: [&str; 2] = ["guest-exec", "guest-exec-status"];
/// Exit statuses of `timeout` when the time is over: of coreutils, and of busybox (128 + SIGTERM).
const TIMED_OUT: [i32; 2] = [124, 143];
/// Exit status of the script when the caches cannot be dropped.
const NOT_DROPPED: i32 = 77;
/// The host's file that drops its page cache.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

/// Options of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct StartUpOptions<'a> {
    /// The VM: its name in the spec or in the lab that is up.
    pub vm: &'a str,
    /// The spec; the lab that is up when `None`.
    pub spec: Option<&'a str>,
    /// A command of the guest's shell that ends once the application has started.
    pub command: &'a str,
    /// Number of start-ups to measure.
    pub times: usize,
    /// Time after which a start-up has failed.
    pub limit: Nanos,
    /// Whether the guest says to the host that something starts (`rtvirtio-guest start`).
    pub say: bool,
    /// Whether the host's page cache is dropped too, which slows all that runs there.
    pub host_caches: bool,
}

/// Time of one start-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StartUp {
    /// From exec to exit, or the limit; of the guest's clock, in steps of 10 ms.
    pub seconds: f64,
    /// Whether it did not end within the limit.
    pub timed_out: bool,
}

/// Result of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StartUps {
    pub vm: String,
    /// Command that was started.
    pub command: String,
    /// Whether the guest said that something starts.
    pub say: bool,
    /// Whether the host's page cache was dropped too.
    pub host_caches: bool,
    /// Limit of a start-up, in s.
    pub limit: f64,
    /// Start-ups in the order in which they ran.
    pub starts: Vec<StartUp>,
    /// Of the seconds; a start that failed counts as the limit.
    pub summary: Option<Summary>,
}

impl StartUps {
    /// Number of start-ups that exceeded the limit.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.starts.iter().filter(|s| s.timed_out).count()
    }
}

/// Starts the command again and again in the guest, through its agent. Drops the guest's caches
/// before each start.
///
/// # Errors
/// [`Kind::NotRunning`](crate::Kind::NotRunning) for a VM without an agent; an agent that may not
/// run programs; a command that fails.
pub fn measure_start_up(
    options: &StartUpOptions<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<StartUps> {
    ensure!(options.times > 0, Argument, "no start-up is asked for: --times from 1");
    let vms = find::find(options.spec, Some(options.vm), dirs)?;
    let vm = vms.first().context("the VM is gone")?;
    let address = vm.agent(&Root::default())?;
    let Some(address) = address else {
        bail!(
            NotRunning,
            "vm {}: no guest agent is known: install qemu-guest-agent in it, and name its socket in the spec with `agent`, or the VM by `domain` or \
             `proxmox`",
            options.vm
        )
    };
    let mut agent = GuestAgent::reach(&address, AGENT_TIMEOUT)?;
    agent.set_timeout(AGENT_TIMEOUT);
    agent.require(&NEEDED)?;
    let mut bar = progress.bar(&format!("start-ups in {}", options.vm), options.times as u64);
    let mut starts = Vec::with_capacity(options.times);
    for done in 0..options.times {
        if options.host_caches {
            Root::default()
                .write(DROP_CACHES, "1")
                .context("the host's caches cannot be dropped: run it with sudo")?;
        }
        starts.push(time_start(options, &mut agent, progress)?);
        bar.set(done as u64 + 1);
    }
    drop(bar);
    let seconds: Vec<f64> = starts.iter().map(|s| s.seconds).collect();
    Ok(StartUps {
        vm: options.vm.to_owned(),
        command: options.command.to_owned(),
        say: options.say,
        host_caches: options.host_caches,
        limit: options.limit.as_secs_f64(),
        starts,
        summary: Summary::from_values(&seconds),
    })
}

/// The shell script in the guest: `$1` seconds at most, then the command. Says status, and the
/// guest's uptime before and after.
fn script(say: bool) -> String {
    let word = if say { "rtvirtio-guest start --for $1 -- " } else { "" };
    format!(
        "sync; echo 3 >{DROP_CACHES} || exit {NOT_DROPPED}; read a x </proc/uptime; \
         {word}timeout $1 sh -c \"$2\" >/dev/null; r=$?; read b x </proc/uptime; echo $r $a $b"
    )
}

/// Status and seconds from the output of [`script`].
fn read_script(text: &str) -> Option<(i32, f64)> {
    let mut fields = text.split_whitespace();
    let status = fields.next()?.parse().ok()?;
    let from: f64 = fields.next()?.parse().ok()?;
    let to: f64 = fields.next()?.parse().ok()?;
    Some((status, to - from))
}

fn time_start(
    options: &StartUpOptions<'_>,
    agent: &mut GuestAgent,
    progress: &dyn Progress,
) -> Result<StartUp> {
    let limit = options.limit.as_secs_f64();
    let (script, seconds) = (script(options.say), limit.ceil().to_string());
    let process = agent.spawn(&["sh", "-c", &script, "sh", &seconds, options.command])?;
    let begin = std::time::Instant::now();
    let output = loop {
        if let Err(e) = progress.check_cancelled().and_then(|()| progress.pause(POLL)) {
            // Its own `timeout` ends it should this fail.
            let _ = agent.terminate(process, POLL * 8);
            return Err(e);
        }
        if let Some(output) = agent.poll(process)? {
            break output;
        }
        let patience = Duration::from_secs_f64(2.0 * limit) + AGENT_TIMEOUT;
        ensure!(
            begin.elapsed() < patience,
            System,
            "the command has not ended {} s after its limit: the guest hangs",
            (patience.as_secs_f64() - limit).round()
        );
    };
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.code == Some(NOT_DROPPED) {
        bail!(System, "the guest's caches cannot be dropped: its agent does not run as root: {stderr}");
    }
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let (status, took) =
        read_script(&stdout).with_context(|| format!("the guest printed `{stdout}`: {stderr}"))?;
    if TIMED_OUT.contains(&status) {
        return Ok(StartUp { seconds: limit, timed_out: true });
    }
    if status != 0 {
        bail!(System, "`{}` ended with {status} in the guest: {stderr}", options.command);
    }
    Ok(StartUp { seconds: took.min(limit), timed_out: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The script itself, by this machine's shell, with the file of the caches replaced.
    #[test]
    fn the_script_measures_a_command() {
        let run = |command: &str, limit: &str| {
            let script = script(false).replace(DROP_CACHES, "/dev/null");
            let out = std::process::Command::new("sh").args(["-c", &script, "sh", limit, command]).output();
            read_script(&String::from_utf8_lossy(&out.unwrap().stdout)).unwrap()
        };
        let (status, seconds) = run("echo what it prints is no part; sleep 0.05", "5");
        assert_eq!(status, 0);
        assert!(seconds >= 0.03, "two ticks of the clock less at most: {seconds}");
        assert_eq!(run("exit 3", "5").0, 3);
        assert!(TIMED_OUT.contains(&run("sleep 60", "0.1").0));
        assert!(script(true).contains("rtvirtio-guest start --for $1 -- timeout"));
        assert_eq!(read_script("sh: no\n"), None);
    }
}
