//! The loop.

mod commands;
mod fetch;
mod notify;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use io_uring::opcode;
use io_uring::types::Fd;
use rtvirtio_sched::{Config, Finished, Next, Op, Piece, Scheduler};
use rtvirtio_units::Nanos;

use self::fetch::finish;
use super::command::Command;
use super::data::{fill, host_priority, transfer, unbounce};
use super::slot::QueueSlot;
use super::table::{Bounce, Latencies, Requests, Running};
use super::trace::{Event, Tracer};
use super::uring::{About, Answer, Uring};
use super::vring::Vring;
use super::{Disk, EngineConfig, EngineError};
use crate::blk::{self, SEGMENTS};

/// Commands carried out in one round, and how long they may take: it is time of all guests.
const COMMANDS: usize = 16;
const COMMANDS_NS: u64 = 100_000;
/// Pieces that fail before the device has them, in one round: they hold no place, so nothing else
/// bounds them.
const FAILED_AT_ONCE: u32 = 16;

struct Vm {
    disk: Disk,
    slots: Vec<QueueSlot>,
    /// The queue that has its turn first.
    next_queue: usize,
    /// It made more work that costs no device time than a round has room for, and comes after all
    /// others.
    throttled: bool,
    requests: Requests,
    latencies: [Latencies; 2],
    malformed: u64,
    errors: u64,
    broken: u64,
    /// It has as many requests outstanding as it may, and perhaps more in its queues.
    starved: bool,
    /// Where to tell that nothing of it is left after a disconnect.
    leaving: Option<SyncSender<()>>,
}

impl Vm {
    /// Whether something is to be taken from one of its queues.
    fn wants(&self) -> bool {
        self.slots.iter().filter_map(|s| s.vring.as_ref()).any(Vring::wants)
    }
}

/// All that the engine's thread has.
pub struct Loop {
    config: EngineConfig,
    scheduler: Scheduler,
    ring: Uring,
    vms: Vec<Vm>,
    running: Vec<Running>,
    free: Vec<u32>,
    commands: Receiver<Command>,
    doorbell: Arc<OwnedFd>,
    generation: u32,
    /// More commands wait than one round carries out.
    commands_wait: bool,
    /// Pieces that failed before the device had them, in this round.
    failed_at_once: u32,
    /// The throttled VM that has its turn first, and when throttled VMs had theirs.
    next_throttled: usize,
    last_throttled: Nanos,
    /// The last round had pieces that came back.
    pieces_back: bool,
    /// When a regulator lets the next piece go.
    held_until: Option<Nanos>,
    late: Latencies,
    /// Somebody watches.
    trace: Option<Box<Tracer>>,
    quit: bool,
}

fn now() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Pieces that the device may have: the window's, a flush of each VM, and one deallocation.
fn places(window: u32, vms: usize) -> u32 {
    window + vms as u32 + 1
}

impl Loop {
    pub fn new(
        config: EngineConfig,
        scheduler: Scheduler,
        sched: &Config,
        disks: Vec<Disk>,
        commands: Receiver<Command>,
        doorbell: Arc<OwnedFd>,
    ) -> Result<Self, EngineError> {
        let io = |what| move |source| EngineError::Io { what, source };
        prepare_thread(&config).map_err(io("cannot set the engine's CPUs and priority"))?;
        let most = places(sched.window.most.max(sched.window.start), disks.len());
        let ring = Uring::new(most + 2 * disks.len() as u32 * 8).map_err(io("io_uring"))?;
        let mut running = Vec::new();
        let largest = sched.vms.iter().map(|vm| sched.largest(vm)).max().unwrap_or(sched.quantum);
        for _ in 0..most {
            let bounce = Bounce::new(largest as usize).map_err(io("memory"))?;
            running.push(Running {
                piece: None,
                iovecs: Vec::with_capacity(SEGMENTS),
                bounce,
                bounced: false,
            });
        }
        let vms = disks.into_iter().zip(&sched.vms).map(|(disk, vm)| Vm {
            slots: (0..disk.queues).map(|_| QueueSlot::default()).collect(),
            next_queue: 0,
            throttled: false,
            requests: Requests::new(vm.depth),
            latencies: [Latencies::new(), Latencies::new()],
            malformed: 0,
            errors: 0,
            broken: 0,
            starved: false,
            leaving: None,
            disk,
        });
        let mut engine = Self {
            vms: vms.collect(),
            running,
            free: (0..most).rev().collect(),
            config,
            scheduler,
            ring,
            commands,
            doorbell,
            generation: 0,
            commands_wait: false,
            failed_at_once: 0,
            next_throttled: 0,
            last_throttled: Nanos(0),
            pieces_back: false,
            held_until: None,
            late: Latencies::new(),
            trace: None,
            quit: false,
        };
        engine.ring.watch(engine.doorbell.as_raw_fd(), About::Doorbell).map_err(io("io_uring"))?;
        Ok(engine)
    }

    /// Whether its ring takes no other operations than the engine's.
    pub fn is_restricted(&self) -> bool {
        self.ring.restricted
    }

    /// Until it is told to end, or io_uring fails, which then is a defect of ours or the end of memory.
    pub fn run(&mut self) {
        let mut last_work = now();
        while !self.quit {
            let mut busy = self.fetch();
            let wake = match self.dispatch() {
                Ok(wake) => wake,
                Err(e) => self.failed(&e),
            };
            if let Err(e) = self.notify_guests() {
                self.failed(&e);
            }
            busy |= self.commands_wait || self.failed_at_once > 0 || self.vms.iter().any(Vm::wants);
            let time = now();
            if busy {
                last_work = time;
            }
            let polling = time.0 - last_work.0 < self.config.poll.0;
            if let Err(e) = self.ring.enter(!busy && !polling, time, wake) {
                self.failed(&e);
            }
            let time = now();
            if std::mem::take(&mut self.commands_wait) {
                if let Err(e) = self.carry_out_commands(time) {
                    self.failed(&e);
                }
            }
            let mut answered = false;
            while let Some(answer) = self.ring.answer() {
                answered = true;
                if let Err(e) = self.answer(time, answer) {
                    self.failed(&e);
                }
            }
            if answered {
                last_work = time;
            } else if polling {
                self.poll_avail_rings();
            }
        }
    }

    fn failed(&self, e: &io::Error) -> ! {
        // Guests find a domain that is started anew, and what was in flight with it; one that lives on without an engine helps nobody, and its memory may still be written by the kernel.
        eprintln!("rtvirtio-iod: {}: io_uring failed, the process ends: {e}", self.config.name);
        std::process::abort();
    }

    /// Gives the device what the scheduler lets go; the moment at which it wants to be asked again.
    fn dispatch(&mut self) -> io::Result<Nanos> {
        self.failed_at_once = 0;
        loop {
            let time = now();
            if self.failed_at_once >= FAILED_AT_ONCE {
                return Ok(time);
            }
            match self.scheduler.next(time) {
                Next::Piece(piece) => {
                    // What goes before that moment came from elsewhere.
                    if let Some(at) = self.held_until.take_if(|at| time >= *at) {
                        self.late.add(Nanos(time.0 - at.0));
                    }
                    self.give(time, piece)?;
                }
                Next::Wait(at) => {
                    self.held_until = Some(at);
                    return Ok(at);
                }
                Next::Full | Next::Idle => {
                    // A moment at which the device was full is not the regulator's.
                    self.held_until = None;
                    return Ok(Nanos(u64::MAX));
                }
            }
        }
    }

    fn give(&mut self, time: Nanos, piece: Piece) -> io::Result<()> {
        // The table has a place for every piece that the scheduler gives. A piece without one would never come back, and all would wait for it.
        let Some(place) = self.free.pop() else {
            return Err(io::Error::other("the scheduler gave more than the device may hold: a defect"));
        };
        let vm = &mut self.vms[piece.vm];
        let running = &mut self.running[place as usize];
        running.piece = Some(piece);
        running.bounced = false;
        let Some(taken) = vm.requests.get(piece.tag as u32) else {
            return self.fail_at_once(place, -libc::EIO);
        };
        taken.goes(time, &piece);
        let Some(mem) = taken.mem.clone() else {
            return self.fail_at_once(place, -libc::EIO);
        };
        let backing = &vm.disk.backing;
        let entry = match piece.op {
            Op::Read | Op::Write => {
                let ready = fill(running, taken, &mem.mem, &piece, backing.direct.then_some(backing.block));
                if let Err(code) = ready {
                    // Not the last reference when the request ends: unmapping a guest's memory
                    // takes long.
                    drop(mem);
                    return self.fail_at_once(place, code);
                }
                let priority = if self.config.pass_priority { host_priority(piece.priority) } else { 0 };
                transfer(running, &piece, &backing.file, taken.offset, taken.write_through, priority)
            }
            Op::Flush => opcode::Fsync::new(Fd(backing.file.as_raw_fd()))
                .flags(io_uring::types::FsyncFlags::DATASYNC)
                .build(),
            Op::Discard | Op::WriteZeroes => {
                let zero = piece.op == Op::WriteZeroes && !taken.unmap;
                let mode = if zero { libc::FALLOC_FL_ZERO_RANGE } else { libc::FALLOC_FL_PUNCH_HOLE };
                opcode::Fallocate::new(Fd(backing.file.as_raw_fd()), piece.len)
                    .offset(taken.offset + piece.offset)
                    .mode(mode | libc::FALLOC_FL_KEEP_SIZE)
                    .build()
            }
        };
        self.ring.push(&entry.user_data(About::Piece(place).pack()))
    }

    /// A piece that the device never had. Its VM made work that costs no device time.
    fn fail_at_once(&mut self, place: u32, code: i32) -> io::Result<()> {
        self.failed_at_once += 1;
        if let Some(piece) = self.running.get(place as usize).and_then(|r| r.piece) {
            self.vms[piece.vm].throttled = true;
        }
        self.back(now(), place, code)
    }

    fn answer(&mut self, time: Nanos, answer: Answer) -> io::Result<()> {
        match answer.about {
            About::Nothing => Ok(()),
            About::Piece(place) => {
                self.pieces_back = true;
                self.back(time, place, answer.result)
            }
            About::Kick(vm, q, generation) => self.on_kick((vm, q, generation), answer),
            About::Call(vm, q, generation) => self.on_call((vm, q, generation)),
            About::Doorbell => {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&self.doorbell, &mut count);
                self.carry_out_commands(time)?;
                if answer.more { Ok(()) } else { self.ring.watch(self.doorbell.as_raw_fd(), About::Doorbell) }
            }
        }
    }

    /// A piece is back from the device, with the kernel's word for it.
    fn back(&mut self, time: Nanos, place: u32, result: i32) -> io::Result<()> {
        let Some(running) = self.running.get_mut(place as usize) else { return Ok(()) };
        let Some(piece) = running.piece.take() else { return Ok(()) };
        self.free.push(place);
        if result == -libc::EAGAIN || result == -libc::EINTR {
            return self.give(time, piece);
        }
        if result == -libc::EPERM && self.config.pass_priority {
            eprintln!(
                "rtvirtio-iod: {}: the guests' classes are not passed on: that needs CAP_SYS_NICE",
                self.config.name
            );
            self.config.pass_priority = false;
            return self.give(time, piece);
        }
        let vm = &mut self.vms[piece.vm];
        let whole = if piece.op.moves_data() { result as i64 == piece.len as i64 } else { result >= 0 };
        if let Some(taken) = vm.requests.get(piece.tag as u32) {
            taken.failed |= !whole;
            taken.unsupported |= result == -libc::EOPNOTSUPP && !piece.op.moves_data();
            if let Some(mem) = taken.mem.clone().filter(|_| running.bounced && whole && piece.op == Op::Read)
            {
                taken.failed |= unbounce(running, taken, &mem.mem, &piece).is_err();
            }
        }
        if !whole {
            // The request has failed: what is left of it need not go.
            self.scheduler.abandon(&piece);
        }
        // A piece that the scheduler does not know of would hold its place for ever, and its guest
        // would wait for ever.
        let done = self.scheduler.complete(time, &piece).map_err(io::Error::other)?;
        done.map_or(Ok(()), |finished| self.finished(time, &finished))
    }

    fn finished(&mut self, time: Nanos, finished: &Finished) -> io::Result<()> {
        let vm = &mut self.vms[finished.vm];
        let slot = finished.request.tag as u32;
        let Some(taken) = vm.requests.get(slot) else { return Ok(()) };
        let latency = Nanos(time.0.saturating_sub(finished.request.arrival.0));
        vm.latencies[taken.op.direction().index()].add(latency);
        vm.errors += u64::from(taken.failed && !taken.unsupported);
        let (q, generation, head, status) =
            (usize::from(taken.vring), taken.generation, taken.head, taken.status);
        let code = match (taken.failed, taken.unsupported) {
            (false, _) => blk::OK,
            (true, true) => blk::UNSUPPORTED,
            (true, false) => blk::IO_ERROR,
        };
        let len = if taken.op == Op::Read && !taken.failed { taken.len } else { 0 };
        if let Some(trace) = &mut self.trace {
            trace.add(Event::of(time, finished, taken, code));
        }
        vm.requests.release(slot);
        self.answered(finished.vm, q, generation, |vring| finish(vring, head, status, code, len))
    }

    /// One request less on a queue; the queue ends when it was the last one of one that stops.
    fn answered(
        &mut self,
        i: usize,
        q: usize,
        generation: u32,
        answer: impl FnOnce(&mut Vring),
    ) -> io::Result<()> {
        let vm = &mut self.vms[i];
        let mut stopped = false;
        let vring = vm.slots.get_mut(q).and_then(|s| s.vring.as_mut());
        if let Some(vring) = vring.filter(|v| v.generation == generation) {
            answer(vring);
            vring.outstanding -= 1;
            stopped = vring.outstanding == 0 && vring.stopping.is_some();
        }
        if stopped {
            self.end(i, q)?;
        }
        let vm = &mut self.vms[i];
        if std::mem::take(&mut vm.starved) {
            for vring in vm.slots.iter_mut().filter_map(|s| s.vring.as_mut()) {
                vring.active = true;
            }
        }
        self.tell_of_leaving(i);
        Ok(())
    }
}

fn prepare_thread(config: &EngineConfig) -> io::Result<()> {
    if !config.cpus.is_empty() {
        let mut set = rustix::thread::CpuSet::new();
        for cpu in &config.cpus {
            set.set(*cpu);
        }
        rustix::thread::sched_setaffinity(None, &set)?;
    }
    // SAFETY: prctl with these arguments touches no memory. Timers of ordinary threads may otherwise be 50 us late.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    if let Some(priority) = config.fifo {
        let param = libc::sched_param { sched_priority: priority.into() };
        // SAFETY: `param` is valid for the call; 0 is the calling thread.
        let done =
            unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &param) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
