//! Streams traces of the engines, to one listener at a time.
//!
//! The reply to `{"command": "trace", "for_ms": 10000}` is a line `{"trace": ...}`, one line for
//! each request, and `{"end": {"events": .., "dropped": ..}}` when the time is over or the listener
//! shuts down its side; without `for_ms` only then. A listener that does not read loses events, and
//! delays no other thread.

use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::engine::{Command, EngineHandle, TraceEvent, TraceReader};
use rtvirtio_sched::{Class, Op};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde_json::json;

/// Events between two drains: 10 ms at 800 000 requests per second, about 0.7 MB.
const CAPACITY: usize = 8_192;
/// Interval of drains. The engine wakes no thread.
const DRAIN_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// A listener that accepts no data for this long is dropped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Accepts listeners.
pub struct TraceServer {
    listeners: SyncSender<(UnixStream, Option<Duration>)>,
}

impl TraceServer {
    /// Starts the serving thread; it exists from the beginning, because a confined process starts
    /// no thread later.
    pub fn start(engines: Vec<(String, EngineHandle)>, confine: &Confine) -> anyhow::Result<Self> {
        // No queue: a second listener is refused at once.
        let (listeners, next) = sync_channel::<(UnixStream, Option<Duration>)>(0);
        let serve_all = move || {
            for (stream, length) in next {
                if let Err(e) = serve(&stream, length, &engines) {
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

/// One device.
struct Source {
    device: String,
    engine: EngineHandle,
    /// Names by [`TraceEvent::member`]: disks come and go during a trace.
    names: HashMap<u32, String>,
    trace: TraceReader,
}

/// The name of the disk of an event. One that went before it was asked for has none.
fn name_of<'a>(names: &'a mut HashMap<u32, String>, engine: &EngineHandle, event: &TraceEvent) -> &'a str {
    names.entry(event.member).or_insert_with(|| {
        let found = engine.ask(|reply| Command::Member { vm: event.vm, reply });
        let found = found.ok().flatten().filter(|(member, _)| *member == event.member);
        found.map_or_else(|| "(detached)".to_owned(), |(_, name)| name)
    })
}

impl Source {
    /// Writes all pending events; returns their number.
    fn write(&mut self, out: &mut impl Write) -> std::io::Result<usize> {
        let Self { device, engine, names, trace } = self;
        let mut done = Ok(());
        let n = trace.drain(|event| {
            if done.is_ok() {
                let vm = name_of(names, engine, &event);
                let line = serde_json::to_writer(&mut *out, &EventLine::new(device, vm, &event));
                done = line.map_err(Into::into).and_then(|()| out.write_all(b"\n"));
            }
        });
        done.map(|()| n)
    }
}

fn serve(
    stream: &UnixStream,
    length: Option<Duration>,
    engines: &[(String, EngineHandle)],
) -> anyhow::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut sources = Vec::new();
    for (device, engine) in engines {
        let places = engine.ask(|reply| Command::Status { reply })?.places;
        let mut names = HashMap::new();
        for vm in 0..places {
            names.extend(engine.ask(|reply| Command::Member { vm, reply })?);
        }
        let trace = TraceReader::start(engine, CAPACITY).with_context(|| format!("device \"{device}\""))?;
        sources.push(Source { device: device.clone(), engine: engine.clone(), names, trace });
    }
    let mut out = BufWriter::new(stream);
    writeln!(out, "{}", json!({ "trace": { "devices": sources.len(), "room": CAPACITY } }))?;
    let begin = Instant::now();
    let mut events = 0;
    let mut over = false;
    while !over {
        for source in &mut sources {
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
    let mut dropped = 0;
    for source in &mut sources {
        dropped += source.trace.stop()?;
        events += source.write(&mut out)?;
    }
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
                Op::Read => "read",
                Op::Write => "write",
                Op::Flush => "flush",
                Op::Discard => "discard",
                Op::WriteZeroes => "write-zeroes",
            },
            len: e.len,
            class: e.priority.class,
            level: e.priority.level,
            reserved: e.reserved,
            status: e.status,
            at_ns: e.arrival.0,
            wait_ns: e.wait.0,
            device_ns: e.device.0,
            total_ns: e.wait.0 + e.device.0,
        }
    }
}
