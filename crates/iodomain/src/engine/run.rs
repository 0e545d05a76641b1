//! The loop.

mod commands;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use io_uring::opcode;
use io_uring::types::Fd;
use rtvirtio_iosched::{Config, Finished, Next, Op, Piece, Request, Scheduler};
use rtvirtio_units::Nanos;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::command::Command;
use super::data::{fill, host_priority, transfer, unbounce, write_id};
use super::table::{Bounce, Latencies, Requests, Running};
use super::trace::{Event, Tracer};
use super::uring::{About, Answer, Uring};
use super::vring::Vring;
use super::{Disk, EngineConfig, EngineError};
use crate::blk::{self, Parsed, SEGMENTS};

/// Chains taken from one queue before the next one has its turn: bounds what one guest can make the others wait for.
const BATCH: usize = 32;
/// And no longer than this, whatever they are: chains may be long, and their memory cold.
const BATCH_NS: u64 = 50_000;

struct Vm {
    disk: Disk,
    vrings: Vec<Option<Vring>>,
    requests: Requests,
    latencies: [Latencies; 2],
    malformed: u64,
    errors: u64,
    broken: u64,
    /// It has as many requests outstanding as it may, and perhaps more in its queues.
    starved: bool,
    /// Who waits for the last piece after a disconnect.
    leaving: Option<SyncSender<()>>,
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
        // A place for every piece that the window allows, and for a flush of each VM.
        let most = sched.window.most.max(sched.window.start) + disks.len() as u32;
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
            vrings: (0..disk.queues).map(|_| None).collect(),
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
            if let Err(e) = self.tell() {
                self.failed(&e);
            }
            busy |= self.vms.iter().flat_map(|vm| vm.vrings.iter().flatten()).any(Vring::wants);
            let time = now();
            if busy {
                last_work = time;
            }
            let polling = time.0 - last_work.0 < self.config.poll.0;
            if let Err(e) = self.ring.enter(!busy && !polling, time, wake) {
                self.failed(&e);
            }
            let time = now();
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
                self.look();
            }
        }
    }

    fn failed(&self, e: &io::Error) -> ! {
        // Guests find a domain that is started anew, and what was in flight with it; one that lives on without an engine helps nobody, and its memory may still be written by the kernel.
        eprintln!("rtvirtio-iod: {}: io_uring failed, the process ends: {e}", self.config.name);
        std::process::abort();
    }

    /// Finds out whether guests put something into their queues without being asked to kick.
    fn look(&mut self) {
        for vring in self.vms.iter_mut().flat_map(|vm| vm.vrings.iter_mut().flatten()) {
            let there = vring.queue.avail_idx(&vring.mem.mem, std::sync::atomic::Ordering::Acquire);
            if there.is_ok_and(|i| i.0 != vring.queue.next_avail()) {
                vring.active = true;
            }
        }
    }

    /// Takes requests from the queues, a batch of each in turn. Returns whether there was one.
    fn fetch(&mut self) -> bool {
        let mut any = false;
        for vm in 0..self.vms.len() {
            for q in 0..self.vms[vm].vrings.len() {
                if self.vms[vm].vrings[q].as_ref().is_some_and(Vring::wants) {
                    any |= self.fetch_from(vm, q);
                }
            }
        }
        any
    }

    fn fetch_from(&mut self, vm: usize, q: usize) -> bool {
        let time = now();
        let Self { vms, scheduler, .. } = self;
        let Vm { disk, vrings, requests, malformed, broken, starved, .. } = &mut vms[vm];
        let Some(vring) = vrings[q].as_mut() else { return false };
        let mem = Arc::clone(&vring.mem);
        if vring.queue.disable_notification(&mem.mem).is_err() {
            vring.broken = true;
        }
        let rule = scheduler.rule(vm);
        let (mut taken, mut nothing) = (0, 0);
        while taken < BATCH && !vring.broken && now().0 - time.0 < BATCH_NS {
            let Some((slot, room)) = requests.free() else {
                // As many as it may have: goes on when one is answered.
                vring.active = false;
                *starved = true;
                break;
            };
            let (head, parsed) = if let Some(head) = vring.again.pop() {
                let chain =
                    blk::chain_at(&mem.mem, GuestAddress(vring.queue.desc_table()), vring.queue.size(), head);
                (head, blk::parse(&mem.mem, chain, &disk.backing.limits, &mut room.segments))
            } else {
                let chain = match vring.queue.iter(&mem.mem) {
                    Ok(mut chains) => chains.next(),
                    Err(_) => {
                        vring.broken = true;
                        break;
                    }
                };
                let Some(chain) = chain else {
                    match vring.queue.enable_notification(&mem.mem) {
                        Ok(true) => {
                            // Something is there now; when it still cannot be read, it never can.
                            nothing += 1;
                            vring.broken |=
                                nothing > 1 || vring.queue.disable_notification(&mem.mem).is_err();
                            continue;
                        }
                        Ok(false) => vring.active = false,
                        Err(_) => vring.broken = true,
                    }
                    break;
                };
                nothing = 0;
                let head = chain.head_index();
                if let Some(inflight) = &mut vring.inflight {
                    inflight.taken(head);
                }
                (head, blk::parse(&mem.mem, chain, &disk.backing.limits, &mut room.segments))
            };
            taken += 1;
            match parsed {
                // Without flushes there is no way to say when these are on stable storage.
                Ok(Parsed::Io { op: Op::Discard | Op::WriteZeroes, status, .. }) if vring.write_through => {
                    finish(vring, head, status, blk::UNSUPPORTED, 0);
                }
                Ok(Parsed::Io { op, offset, len, priority, unmap, status }) => {
                    (room.vring, room.generation, room.head) = (q as u16, vring.generation, head);
                    (room.op, room.len, room.unmap, room.status) = (op, len, unmap, status);
                    (room.offset, room.failed, room.unsupported) =
                        (disk.backing.start + offset, false, false);
                    (room.write_through, room.given) = (vring.write_through, Nanos(0));
                    room.mem = Some(Arc::clone(&mem));
                    let priority = rule.of(priority);
                    let request = Request { tag: slot.into(), op, len, priority, arrival: time };
                    if scheduler.submit(vm, request).is_ok() {
                        requests.take();
                        vring.outstanding += 1;
                    } else {
                        // The tables have the same size, so this is a defect; the guest must not wait for ever.
                        finish(vring, head, status, blk::IO_ERROR, 0);
                    }
                }
                Ok(Parsed::Id { status }) => {
                    let written = write_id(&mem.mem, &room.segments, &disk.serial);
                    finish(vring, head, status, blk::OK, written);
                }
                Ok(Parsed::Answer { status, code }) => finish(vring, head, status, code, 0),
                Err(_) => {
                    *malformed += 1;
                    vring.answer(head, 0);
                }
            }
        }
        *broken += u64::from(vring.broken);
        taken > 0
    }

    /// Gives the device what the scheduler lets go; the moment at which it wants to be asked again.
    fn dispatch(&mut self) -> io::Result<Nanos> {
        loop {
            let time = now();
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
            return self.back(now(), place, -libc::EIO);
        };
        taken.goes(time, &piece);
        let Some(mem) = taken.mem.clone() else {
            return self.back(now(), place, -libc::EIO);
        };
        let backing = &vm.disk.backing;
        let entry = match piece.op {
            Op::Read | Op::Write => {
                let ready = fill(running, taken, &mem.mem, &piece, backing.direct.then_some(backing.block));
                if let Err(code) = ready {
                    return self.back(now(), place, code);
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

    /// Writes the calls of guests who want to know of their answers.
    fn tell(&mut self) -> io::Result<()> {
        for (i, vm) in self.vms.iter_mut().enumerate() {
            for (q, vring) in vm.vrings.iter_mut().enumerate() {
                let Some(vring) = vring else { continue };
                let told = std::mem::take(&mut vring.tell);
                // Asked only when something was added: asking starts the count anew.
                let wanted = told && vring.queue.needs_notification(&vring.mem.mem).unwrap_or(true);
                vring.must_call |= wanted;
                let Some(call) = vring.call.as_ref().filter(|_| vring.must_call) else { continue };
                vring.must_call = false;
                if vring.calling {
                    vring.call_again = true;
                    continue;
                }
                vring.calling = true;
                let about = About::Call(i as u16, q as u16, vring.generation as u16);
                self.ring.ring(call.as_raw_fd(), about)?;
            }
        }
        Ok(())
    }

    fn vring(&mut self, vm: u16, q: u16, generation: u16) -> Option<&mut Vring> {
        let vring = self.vms.get_mut(usize::from(vm))?.vrings.get_mut(usize::from(q))?.as_mut()?;
        (vring.generation as u16 == generation).then_some(vring)
    }

    fn answer(&mut self, time: Nanos, answer: Answer) -> io::Result<()> {
        match answer.about {
            About::Nothing => Ok(()),
            About::Piece(place) => self.back(time, place, answer.result),
            About::Kick(vm, q, generation) => {
                let Some(vring) = self.vring(vm, q, generation) else { return Ok(()) };
                if !answer.more && answer.result < 0 {
                    // A descriptor that cannot be waited for.
                    vring.broken = true;
                    return Ok(());
                }
                vring.active = true;
                let fd = vring.kick.as_raw_fd();
                if answer.more { Ok(()) } else { self.ring.watch(fd, answer.about) }
            }
            About::Call(vm, q, generation) => {
                let Some(vring) = self.vring(vm, q, generation) else { return Ok(()) };
                vring.calling = false;
                vring.must_call |= std::mem::take(&mut vring.call_again);
                Ok(())
            }
            About::Doorbell => {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&self.doorbell, &mut count);
                while let Ok(command) = self.commands.try_recv() {
                    self.command(time, command)?;
                }
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
        if let Ok(Some(finished)) = self.scheduler.complete(time, &piece) {
            self.finished(time, &finished);
        }
        Ok(())
    }

    fn finished(&mut self, time: Nanos, finished: &Finished) {
        let vm = &mut self.vms[finished.vm];
        let slot = finished.request.tag as u32;
        let Some(taken) = vm.requests.get(slot) else { return };
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
        self.answered(finished.vm, q, generation, |vring| finish(vring, head, status, code, len));
    }

    /// One request less on a queue; the queue ends when it was the last one of one that stops.
    fn answered(&mut self, i: usize, q: usize, generation: u32, answer: impl FnOnce(&mut Vring)) {
        let vm = &mut self.vms[i];
        let mut stopped = false;
        if let Some(vring) =
            vm.vrings.get_mut(q).and_then(Option::as_mut).filter(|v| v.generation == generation)
        {
            answer(vring);
            vring.outstanding -= 1;
            stopped = vring.outstanding == 0 && vring.stopping.is_some();
        }
        if stopped {
            self.end(i, q);
        }
        let vm = &mut self.vms[i];
        if std::mem::take(&mut vm.starved) {
            for vring in vm.vrings.iter_mut().flatten() {
                vring.active = true;
            }
        }
        if vm.leaving.is_some() && self.scheduler.outstanding(i) == 0 {
            if let Some(reply) = vm.leaving.take() {
                let _ = reply.send(());
            }
        }
    }

    /// A queue is not served any more.
    fn end(&mut self, vm: usize, q: usize) {
        let Some(vring) = self.vms[vm].vrings[q].take() else { return };
        let _ = self.ring.forget(About::Kick(vm as u16, q as u16, vring.generation as u16));
        // The last answers are told before QEMU hears that the queue has stopped; by io_uring, for somebody may have filled the descriptor.
        if let Some(call) = vring.call.as_ref().filter(|_| vring.tell || vring.must_call || vring.call_again)
        {
            let _ = self.ring.ring(call.as_raw_fd(), About::Nothing);
        }
        // Handed over before the descriptors are closed and their numbers given to others.
        let _ = self.ring.enter(false, Nanos(0), Nanos(0));
        if let Some(reply) = vring.stopping {
            let _ = reply.send(vring.queue.next_avail());
        }
    }
}

/// Status byte and used ring.
fn finish(vring: &mut Vring, head: u16, status: GuestAddress, code: u8, len: u64) {
    let mem = Arc::clone(&vring.mem);
    if mem.mem.write_obj(code, status).is_err() {
        vring.answer(head, 0);
        return;
    }
    vring.answer(head, u32::try_from(len + 1).unwrap_or(u32::MAX));
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
