//! Streams traces of the engines, to one listener at a time.
//!
//! The reply to `{"command": "trace", "for_ms": 10000}` is a line `{"trace": ...}`, one line for
//! each request or frame, and `{"end": {"events": .., "dropped": ..}}` when the time is over or the
//! listener shuts down its side; without `for_ms` only then. A slow listener loses events, and
//! delays no other thread.

use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::engine::{Command, EngineGone, EngineHandle, TraceCommand, TraceEvent, TraceReader};
use rtvirtio_engine::net::trace::FrameEvent;
use rtvirtio_engine::net::{NetCommand, NetHandle};
use rtvirtio_sched::{Class, Op};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::json;

/// Events between two drains: 10 ms at 800 000 requests per second, about 0.7 MB.
const CAPACITY: usize = 8_192;
/// Interval of drains: the engine does not wake the thread.
const DRAIN_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// A listener that accepts no data for this long is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Accepts connections that receive the trace.
pub struct TraceServer {
    listeners: SyncSender<(UnixStream, Option<Duration>)>,
}

impl TraceServer {
    /// Starts the serving thread; it exists from the beginning, because a confined process starts
    /// no thread later.
    pub fn start(
        engines: Vec<(String, EngineHandle)>,
        networks: Vec<(String, NetHandle)>,
        confine: &Confine,
    ) -> anyhow::Result<Self> {
        // No queue: a second listener is refused at once.
        let (listeners, next) = sync_channel::<(UnixStream, Option<Duration>)>(0);
        let serve_all = move || {
            for (stream, length) in next {
                if let Err(e) = serve(&stream, length, &engines, &networks) {
                    // A closed connection is the usual end of a trace.
                    let _ = writeln!(&stream, "{}", json!({ "error": format!("{e:#}") }));
                }
            }
        };
        confine
            .spawn("iod-trace", Role::Control, serve_all)
            .context("cannot confine the thread of traces")?;
        Ok(Self { listeners })
    }

    /// Attaches a listener; returns its stream when another one is attached.
    pub fn attach(&self, stream: UnixStream, request: &serde_json::Value) -> Result<(), UnixStream> {
        let length = request.get("for_ms").and_then(serde_json::Value::as_u64).map(Duration::from_millis);
        self.listeners.try_send((stream, length)).map_err(|e| match e {
            std::sync::mpsc::TrySendError::Full((stream, _))
            | std::sync::mpsc::TrySendError::Disconnected((stream, _)) => stream,
        })
    }
}

/// A traceable engine, of a device or of a network.
trait Traced: TraceCommand {
    /// Number of places, vacant ones included.
    fn places(engine: &EngineHandle<Self>) -> Result<usize, EngineGone>;
    /// Number and name of the member in a place; `None` for a vacant one.
    fn member(engine: &EngineHandle<Self>, place: usize) -> Result<Option<(u32, String)>, EngineGone>;
    /// Place and member number of an event.
    fn of(event: &Self::Event) -> (usize, u32);
    /// Writes an event as JSON.
    fn line(engine: &str, vm: &str, event: &Self::Event, out: &mut dyn Write) -> serde_json::Result<()>;
}

impl Traced for Command {
    fn places(engine: &EngineHandle) -> Result<usize, EngineGone> {
        Ok(engine.ask(|reply| Self::Status { reply })?.places)
    }

    fn member(engine: &EngineHandle, vm: usize) -> Result<Option<(u32, String)>, EngineGone> {
        engine.ask(|reply| Self::Member { vm, reply })
    }

    fn of(event: &TraceEvent) -> (usize, u32) {
        (event.vm, event.member)
    }

    fn line(device: &str, vm: &str, event: &TraceEvent, out: &mut dyn Write) -> serde_json::Result<()> {
        serde_json::to_writer(out, &EventLine::new(device, vm, event))
    }
}

impl Traced for NetCommand {
    fn places(engine: &NetHandle) -> Result<usize, EngineGone> {
        Ok(engine.ask(|reply| Self::Status { reply })?.ports)
    }

    fn member(engine: &NetHandle, port: usize) -> Result<Option<(u32, String)>, EngineGone> {
        engine.ask(|reply| Self::Member { port, reply })
    }

    fn of(event: &FrameEvent) -> (usize, u32) {
        (event.port, event.member)
    }

    fn line(network: &str, vm: &str, event: &FrameEvent, out: &mut dyn Write) -> serde_json::Result<()> {
        serde_json::to_writer(out, &FrameLine::new(network, vm, event))
    }
}

/// Trace of one device or network.
struct Source<C: Traced> {
    name: String,
    engine: EngineHandle<C>,
    /// Names by the number of a member: disks and ports come and go during a trace.
    names: HashMap<u32, String>,
    trace: TraceReader<C>,
}

impl<C: Traced> Source<C> {
    fn start(name: &str, engine: &EngineHandle<C>) -> anyhow::Result<Self> {
        let mut names = HashMap::new();
        for place in 0..C::places(engine)? {
            names.extend(C::member(engine, place)?);
        }
        let trace = TraceReader::start(engine, CAPACITY).with_context(|| format!("\"{name}\""))?;
        Ok(Self { name: name.to_owned(), engine: engine.clone(), names, trace })
    }

    /// Writes all pending events; returns their number.
    fn write(&mut self, out: &mut impl Write) -> std::io::Result<usize> {
        let Self { name, engine, names, trace } = self;
        let mut done = Ok(());
        let n = trace.drain(|event| {
            if done.is_ok() {
                let (place, member) = C::of(&event);
                // A member detached before the lookup has no name.
                let vm = names.entry(member).or_insert_with(|| {
                    let found = C::member(engine, place).ok().flatten();
                    let found = found.filter(|(known, _)| *known == member);
                    found.map_or_else(|| "(detached)".to_owned(), |(_, name)| name)
                });
                let line = C::line(name, vm, &event, &mut *out);
                done = line.map_err(Into::into).and_then(|()| out.write_all(b"\n"));
            }
        });
        done.map(|()| n)
    }

    /// Ends the trace, and writes all pending events; returns the numbers of written and dropped
    /// events.
    fn finish(&mut self, out: &mut impl Write) -> anyhow::Result<(usize, u64)> {
        let dropped = self.trace.stop()?;
        Ok((self.write(out)?, dropped))
    }
}

fn serve(
    stream: &UnixStream,
    length: Option<Duration>,
    engines: &[(String, EngineHandle)],
    networks: &[(String, NetHandle)],
) -> anyhow::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let start = |(name, engine): &(String, EngineHandle)| Source::start(name, engine);
    let mut devices = engines.iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let start = |(name, engine): &(String, NetHandle)| Source::start(name, engine);
    let mut networks = networks.iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let mut out = BufWriter::new(stream);
    let head = json!({ "devices": devices.len(), "networks": networks.len(), "room": CAPACITY });
    writeln!(out, "{}", json!({ "trace": head }))?;
    let begin = Instant::now();
    let mut events = 0;
    let mut over = false;
    while !over {
        for source in &mut devices {
            events += source.write(&mut out)?;
        }
        for source in &mut networks {
            events += source.write(&mut out)?;
        }
        out.flush()?;
        let mut listener_fd = [PollFd::new(stream, PollFlags::IN | PollFlags::RDHUP)];
        // Any input after the request ends the trace.
        let has_input = match poll(&mut listener_fd, Some(&DRAIN_INTERVAL)) {
            Ok(n) => n > 0,
            Err(rustix::io::Errno::INTR) => false,
            Err(e) => return Err(e.into()),
        };
        over = has_input || length.is_some_and(|l| begin.elapsed() >= l);
    }
    let mut ended = Vec::new();
    for source in &mut devices {
        ended.push(source.finish(&mut out)?);
    }
    for source in &mut networks {
        ended.push(source.finish(&mut out)?);
    }
    let dropped: u64 = ended.iter().map(|(_, dropped)| dropped).sum();
    events += ended.iter().map(|(events, _)| events).sum::<usize>();
    writeln!(out, "{}", json!({ "end": { "events": events, "dropped": dropped } }))?;
    out.flush()?;
    Ok(())
}

/// A completed request as a JSON line.
#[derive(Serialize)]
struct EventLine<'a> {
    device: &'a str,
    vm: &'a str,
    queue: u16,
    op: &'static str,
    len: u64,
    class: Class,
    level: u8,
    reserved: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<&'static str>,
    status: u8,
    at_ns: u64,
    wait_ns: u64,
    device_ns: u64,
    total_ns: u64,
}

impl<'a> EventLine<'a> {
    fn new(device: &'a str, vm: &'a str, e: &TraceEvent) -> Self {
        Self {
            device,
            vm,
            queue: e.queue,
            op: match e.op {
                Some(Op::Read) => "read",
                Some(Op::Write) => "write",
                Some(Op::Flush) => "flush",
                Some(Op::Discard) => "discard",
                Some(Op::WriteZeroes) => "write-zeroes",
                None => "refused",
            },
            len: e.len,
            class: e.priority.class,
            level: e.priority.level,
            reserved: e.reserved,
            refused: e.refused,
            status: e.status,
            at_ns: e.arrival.0,
            wait_ns: e.wait.0,
            device_ns: e.device.0,
            total_ns: e.wait.0 + e.device.0,
        }
    }
}

/// A frame as a JSON line, with the keys of a request where they mean the same.
#[derive(Serialize)]
struct FrameLine<'a> {
    network: &'a str,
    vm: &'a str,
    op: &'static str,
    len: u64,
    class: Class,
    level: u8,
    reserved: bool,
    fate: &'static str,
    at_ns: u64,
    wait_ns: u64,
    device_ns: u64,
    total_ns: u64,
}

impl<'a> FrameLine<'a> {
    fn new(network: &'a str, vm: &'a str, e: &FrameEvent) -> Self {
        Self {
            network,
            vm,
            op: if e.sent { "send" } else { "receive" },
            len: e.len,
            class: e.priority.class,
            level: e.priority.level,
            reserved: e.reserved,
            fate: e.fate.name(),
            at_ns: e.arrival.0,
            wait_ns: e.wait.0,
            device_ns: e.passing.0,
            total_ns: e.wait.0 + e.passing.0,
        }
    }
}
