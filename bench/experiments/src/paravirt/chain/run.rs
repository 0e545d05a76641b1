//! The run of the chain.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rtvirtio_kernel::sched;
use rtvirtio_urgency_host::Raises;
use rtvirtio_vmm::threads::Named;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::domain::client;
use serde::Deserialize;
use serde_json::json;

use super::judge::{Cycle, Request, judge};
use super::test_bed::{DISKS, WINDOW};
use super::{Chain, PERIOD, Span};
use crate::guest::{run_command, wait_for_exit};
use crate::paravirt::Setup;
use crate::paravirt::guests::Guests;
use crate::paravirt::measure::{GUEST_TIMEOUT, WARM_UP, WORK};

/// The neighbour's reads, until it is killed; it keeps [`DEPTH`] outstanding.
const READS: &str = "fio --name=f --filename=/dev/vda --direct=1 --ioengine=libaio --rw=randread --bs=4k --iodepth=32 --time_based --runtime=3600 \
                     >/dev/null 2>&1";
const DEPTH: u64 = 32;
/// A guest's I/O scheduler dispatches in a kernel thread, which is not urgent in the guest.
const ELEVATOR: &str = "echo none >/sys/block/vda/queue/scheduler && cat /sys/block/vda/queue/scheduler";
/// A busy emulated guest starts its programs slowly.
const START: Duration = Duration::from_secs(60);
/// Longest wait for the next line of the trace.
const TRACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs the chain once for about `length`.
pub fn run(guests: &mut Guests<'_>, length: Duration, progress: &dyn Progress) -> anyhow::Result<Chain> {
    guests.set(Setup::Urgency, progress)?;
    guests.start_reporter(progress)?;
    let mut elements = elements(guests)?;
    let elevator = run_command(&mut guests.vms[0], &["sh", "-c", ELEVATOR])?;
    elements.push(("the scheduler of A's guest for its disk".to_owned(), elevator.trim().to_owned()));
    // Reads of the neighbour's guest during its boot do not count as its load.
    let before = reads(guests, 1)?;
    guests.vms[1].spawn(&["sh", "-c", READS])?;
    guests.vms[1].spawn(&["rtvirtio-guestload", "work", WORK])?;
    guests.vms[0].spawn(&["rtvirtio-guestload", "work", WORK])?;
    let begin = Instant::now();
    while reads(guests, 1)? < before + DEPTH {
        if begin.elapsed() > START {
            bail!("the neighbour does not read");
        }
        progress.pause(Duration::from_millis(100))?;
    }
    progress.pause(WARM_UP)?;
    let trace = Trace::start(guests.disks()?.control())?;
    let cycles = (length.as_nanos() / u128::from(PERIOD.0)).max(1).to_string();
    let period = (PERIOD.0 / 1_000).to_string();
    let task = ["ionice", "-c", "1", "-n", "0", "rtvirtio-guestload", "chain", "/dev/vda", &cycles, &period];
    let process = guests.vms[0].spawn(&task)?;
    let output =
        wait_for_exit(&mut guests.vms[0], process, length * 2 + GUEST_TIMEOUT, progress, &mut || Ok(()))?;
    let (requests, dropped) = trace.finish()?;
    let status = guests.unfollow()?;
    guests.kill(0, &["rtvirtio-guestload", "rtvirtio-guest"])?;
    guests.kill(1, &["rtvirtio-guestload", "fio"])?;
    guests.set(Setup::None, progress)?;
    if !output.success() {
        bail!("the timed task in the guest: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let history = guests.take_history().context("no history of A's vCPU")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let cycle = |line: &str| Cycle::parse(line).with_context(|| format!("the timed task: `{line}`"));
    let cycles = said.lines().map(cycle).collect::<anyhow::Result<Vec<_>>>()?;
    let judged = judge(&cycles, history.moments(), &requests, DISKS[0]);
    elements.extend(classes(&requests));
    let raises = status.iter().flat_map(|(status, _)| &status.vcpus).map(|vcpu| vcpu.raises);
    let total = cycles.iter().map(|cycle| cycle.answered.saturating_sub(cycle.due)).collect();
    let (most, sum) = judged.ahead.iter().fold((0, 0), |(most, sum), n| (most.max(*n), sum + n));
    Ok(Chain {
        cycles: cycles.len() as u64,
        seen: judged.seen,
        total: Span::from_lengths(total),
        elements,
        steps: judged.steps,
        ahead: (most, sum as f64 / (judged.seen as f64).max(1.0)),
        window: WINDOW,
        neighbour: rate(&requests, DISKS[1]),
        raises: raises.fold(Raises::default(), |sum, of| sum.with(&of)),
        lost: (history.missed(), dropped),
    })
}

/// Reads of a disk that the I/O domain has completed.
fn reads(guests: &Guests<'_>, disk: usize) -> anyhow::Result<u64> {
    let status = client::ask(guests.disks()?.control())?;
    status.vms.get(disk).and_then(|vm| vm.read.requests).context("the domain counts no reads")
}

/// Threads of the chain with their priorities by the kernel.
fn elements(guests: &mut Guests<'_>) -> anyhow::Result<Vec<(String, String)>> {
    let mut of = |vm: usize| -> anyhow::Result<String> {
        let named = Named::ask(&mut guests.vms[vm].qmp()?)?;
        let (tid, _) = named.vcpus.iter().next().context("a guest without a vCPU")?;
        Ok(sched::get(*tid).with_context(|| format!("the policy of thread {tid}"))?.to_string())
    };
    let neighbour = of(1)?;
    let element = |name: &str, priority: String| (name.to_owned(), priority);
    Ok(vec![
        element("the thread that follows A's page", guests.follower()?.to_owned()),
        element("A's vCPU by its contract, which is its ceiling", guests.contract_of_vcpu()?.to_owned()),
        element("B's vCPU", neighbour),
        element("the I/O domain's thread", guests.disks()?.priority()?),
    ])
}

/// Classes of both disks' requests.
fn classes(requests: &[Request]) -> Vec<(String, String)> {
    let of = |disk: &str| {
        let mut counts = std::collections::BTreeMap::<&str, u64>::new();
        for request in requests.iter().filter(|request| request.vm == disk) {
            *counts.entry(&request.class).or_default() += 1;
        }
        let text: Vec<String> = counts.iter().map(|(class, n)| format!("{class}: {n}")).collect();
        (format!("requests of disk {disk} in the I/O domain"), text.join(", "))
    };
    DISKS.map(of).to_vec()
}

/// Requests a second of a disk, from its first to its last.
fn rate(requests: &[Request], disk: &str) -> f64 {
    let at = || requests.iter().filter(|request| request.vm == disk).map(|request| request.at_ns);
    let Some((first, last)) = at().min().zip(at().max()) else { return 0.0 };
    (at().count() - 1) as f64 / ((last - first) as f64 / 1e9).max(1e-9)
}

/// A trace of the I/O domain, read by a thread of its own: an unread trace loses requests.
struct Trace {
    stream: UnixStream,
    reader: JoinHandle<anyhow::Result<(Vec<Request>, u64)>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Request(Request),
    End { end: End },
    Error { error: String },
    Begin { trace: serde_json::Value },
}

#[derive(Deserialize)]
struct End {
    dropped: u64,
}

impl Trace {
    /// Starts the trace; returns when it runs.
    fn start(control: &Path) -> anyhow::Result<Self> {
        let stream = client::connect(control)?;
        stream.set_read_timeout(Some(TRACE_TIMEOUT))?;
        writeln!(&stream, "{}", json!({ "command": "trace" }))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().context("no answer")?.context("no trace")?;
        match serde_json::from_str(&first).with_context(|| format!("a trace: {first}"))? {
            Line::Begin { .. } => {}
            Line::Error { error } => bail!("a trace: {error}"),
            Line::Request(_) | Line::End { .. } => bail!("a trace that begins with {first}"),
        }
        let read = move || {
            let mut requests = Vec::new();
            for line in lines {
                let line = line.context("the trace")?;
                match serde_json::from_str(&line).with_context(|| format!("the trace: {line}"))? {
                    Line::Request(request) => requests.push(request),
                    Line::End { end } => return Ok((requests, end.dropped)),
                    Line::Error { error } => bail!("the trace: {error}"),
                    Line::Begin { trace } => bail!("the trace began again: {trace}"),
                }
            }
            bail!("the I/O domain ended")
        };
        Ok(Self { stream, reader: std::thread::spawn(read) })
    }

    /// Ends the trace; returns the requests, and the number of lost ones.
    fn finish(self) -> anyhow::Result<(Vec<Request>, u64)> {
        self.stream.shutdown(Shutdown::Write)?;
        self.reader.join().map_err(|_| anyhow::anyhow!("the trace's reader panicked"))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_trace() {
        let line = |text: &str| serde_json::from_str::<Line>(text).unwrap();
        let request = r#"{"device":"bench","vm":"a","queue":0,"op":"read","len":4096,"class":"real-time","level":0,
            "reserved":true,"status":0,"at_ns":5,"wait_ns":1,"device_ns":7,"total_ns":8}"#;
        let Line::Request(found) = line(request) else { panic!("a request") };
        assert_eq!((found.vm.as_str(), found.class.as_str(), found.at_ns), ("a", "real-time", 5));
        assert!(matches!(line(r#"{"trace":{"devices":1,"networks":0,"room":8192}}"#), Line::Begin { .. }));
        let end = line(r#"{"end":{"events":9,"dropped":2}}"#);
        assert!(matches!(end, Line::End { end: End { dropped: 2 } }));
        assert!(matches!(line(r#"{"error":"busy"}"#), Line::Error { .. }));
        let of = |vm: &str, at_ns| Request { vm: vm.to_owned(), at_ns, ..found.clone() };
        let all = [of("a", 0), of("b", 0), of("a", 500_000_000), of("a", 1_000_000_000)];
        assert!((rate(&all, "a") - 2.0).abs() < 1e-9 && rate(&all, "c").abs() < 1e-9);
        assert_eq!(classes(&all)[0].1, "real-time: 3");
    }
}
