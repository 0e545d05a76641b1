//! Streams traces of the engines, to one listener at a time.
//!
//! The reply to `{"command": "trace", "for_ms": 10000}` is a line `{"trace": ...}`, one line for
//! each request or frame, and `{"end": {"events": .., "dropped": ..}}` when the time is over or the
//! listener shuts down its side; without `for_ms` only then. A slow listener loses events, and
//! delays no other thread.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_domain_protocol::trace::{Begin, End, Event, Mark};
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::engine::{Command, EngineGone, EngineHandle, TraceCommand, TraceEvent, TraceReader};
use rtvirtio_engine::net::trace::FrameEvent;
use rtvirtio_engine::net::{NetCommand, NetHandle};
use rtvirtio_sched::{Class, Idx, Op, Priority, VmId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

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
                    let _ = write_mark(&mut &stream, &Mark::Failed { error: format!("{e:#}") });
                }
            }
        };
        confine
            .spawn("iod-trace", Role::Control, serve_all)
            .context("cannot confine the thread of traces")?;
        Ok(Self { listeners })
    }

    /// Attaches a listener; returns its stream when another one is attached.
    pub fn attach(&self, stream: UnixStream, length: Option<Duration>) -> Result<(), UnixStream> {
        self.listeners.try_send((stream, length)).map_err(|e| match e {
            TrySendError::Full((stream, _)) | TrySendError::Disconnected((stream, _)) => stream,
        })
    }
}

fn write_mark(out: &mut impl Write, mark: &Mark) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, mark)?;
    out.write_all(b"\n")
}

/// A traceable engine, of a device or of a network.
trait Traced: TraceCommand {
    /// Number of places, vacant ones included.
    fn places(engine: &EngineHandle<Self>) -> Result<usize, EngineGone>;
    /// Number and name of the member in a place; `None` for a vacant one.
    fn member(engine: &EngineHandle<Self>, place: VmId) -> Result<Option<(u32, String)>, EngineGone>;
    /// Place and member number of an event.
    fn place_of(event: &Self::Event) -> (VmId, u32);
    /// An event as it is sent.
    fn event<'a>(engine: &'a str, vm: &'a str, event: &Self::Event) -> Event<'a>;
}

impl Traced for Command {
    fn places(engine: &EngineHandle) -> Result<usize, EngineGone> {
        Ok(engine.ask(|reply| Self::Status { reply })?.places)
    }

    fn member(engine: &EngineHandle, vm: VmId) -> Result<Option<(u32, String)>, EngineGone> {
        engine.ask(|reply| Self::Member { vm, reply })
    }

    fn place_of(event: &TraceEvent) -> (VmId, u32) {
        (event.vm, event.member)
    }

    fn event<'a>(device: &'a str, vm: &'a str, e: &TraceEvent) -> Event<'a> {
        let op = match e.op {
            Some(Op::Read) => "read",
            Some(Op::Write) => "write",
            Some(Op::Flush) => "flush",
            Some(Op::Discard) => "discard",
            Some(Op::WriteZeroes) => "write-zeroes",
            None => "refused",
        };
        Event {
            device: Some(Cow::Borrowed(device)),
            network: None,
            vm: Cow::Borrowed(vm),
            queue: Some(e.queue),
            op: Cow::Borrowed(op),
            len: e.len,
            class: Cow::Borrowed(class(e.priority)),
            level: e.priority.level,
            reserved: e.reserved,
            refused: e.refused.map(Cow::Borrowed),
            status: Some(e.status),
            fate: None,
            at_ns: e.arrival.0,
            wait_ns: e.wait.0,
            device_ns: e.device.0,
            total_ns: e.wait.0 + e.device.0,
        }
    }
}

impl Traced for NetCommand {
    fn places(engine: &NetHandle) -> Result<usize, EngineGone> {
        Ok(engine.ask(|reply| Self::Status { reply })?.ports)
    }

    fn member(engine: &NetHandle, port: VmId) -> Result<Option<(u32, String)>, EngineGone> {
        engine.ask(|reply| Self::Member { port, reply })
    }

    fn place_of(event: &FrameEvent) -> (VmId, u32) {
        (event.port, event.member)
    }

    fn event<'a>(network: &'a str, vm: &'a str, e: &FrameEvent) -> Event<'a> {
        Event {
            device: None,
            network: Some(Cow::Borrowed(network)),
            vm: Cow::Borrowed(vm),
            queue: None,
            op: Cow::Borrowed(if e.sent { "send" } else { "receive" }),
            len: e.len,
            class: Cow::Borrowed(class(e.priority)),
            level: e.priority.level,
            reserved: e.reserved,
            refused: None,
            status: None,
            fate: Some(Cow::Borrowed(e.fate.name())),
            at_ns: e.arrival.0,
            wait_ns: e.wait.0,
            device_ns: e.passing.0,
            total_ns: e.wait.0 + e.passing.0,
        }
    }
}

fn class(priority: Priority) -> &'static str {
    match priority.class {
        Class::RealTime => "real-time",
        Class::BestEffort => "best-effort",
        Class::Idle => "idle",
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
        for place in (0..C::places(engine)?).map(VmId::from_usize) {
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
                let (place, member) = C::place_of(&event);
                // A member detached before the lookup has no name.
                let vm = names.entry(member).or_insert_with(|| {
                    let found = C::member(engine, place).ok().flatten();
                    let found = found.filter(|(known, _)| *known == member);
                    found.map_or_else(|| "(detached)".to_owned(), |(_, name)| name)
                });
                let line = serde_json::to_writer(&mut *out, &C::event(name, vm, &event));
                done = line.map_err(Into::into).and_then(|()| out.write_all(b"\n"));
            }
        });
        done.map(|()| n)
    }

    /// Ends the trace, and writes all pending events; returns the numbers of written and dropped
    /// events.
    fn finish(&mut self, out: &mut impl Write) -> anyhow::Result<(usize, u64)> {
        // An engine that does not answer in time has events that wait here all the same.
        let dropped = self.trace.stop();
        Ok((self.write(out)?, dropped?))
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
    let trace = Begin { devices: devices.len(), networks: networks.len(), room: CAPACITY };
    write_mark(&mut out, &Mark::Begin { trace })?;
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
    write_mark(&mut out, &Mark::End { end: End { events: events as u64, dropped } })?;
    out.flush()?;
    Ok(())
}
