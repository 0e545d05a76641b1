//! The event loop: fetch, submit, notify, wait, complete.

mod complete;
mod control;
mod fetch;
mod membership;
mod notify;
mod room;
mod submit;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use rtvirtio_sched::{Config, IndexVec, Scheduler, VmId};
use rtvirtio_stats::LatencyRecorder;
use rtvirtio_units::Nanos;

use super::command::Command;
use super::poll::AdaptivePoll;
use super::table::PieceSlot;
use super::thread::Serve;
use super::trace::TraceWriter;
use super::uring::{CompletionToken, Uring};
use super::vm::Vm;
use super::{Disk, EngineConfig, EngineError};

/// The state of the engine's thread.
pub struct EventLoop {
    config: EngineConfig,
    scheduler: Scheduler,
    ring: Uring,
    vms: IndexVec<VmId, Vm>,
    /// VMs so far; the next `Vm::member`.
    members: u32,
    /// Largest piece for which slots have room, in bytes.
    largest: u64,
    pieces: Vec<PieceSlot>,
    free_pieces: Vec<u32>,
    commands: Receiver<Command>,
    doorbell: Arc<OwnedFd>,
    generation: u32,
    /// More commands are pending than one round runs.
    commands_pending: bool,
    /// Pieces that failed before submission, in this round.
    failed_submissions: u32,
    /// The deferred VM that is fetched from first, and when deferred VMs were last fetched from.
    next_deferred: VmId,
    last_deferred: Nanos,
    /// The last round had completions of any kind.
    had_work: bool,
    /// The last round had completions of pieces.
    had_completions: bool,
    /// The next moment at which a regulator admits a piece.
    regulator_wakeup: Option<Nanos>,
    regulator_lateness: LatencyRecorder,
    poll: AdaptivePoll,
    /// Requests of a VM wait for room.
    has_held: bool,
    /// A queue stops as soon as its requests are completed.
    has_stopping: bool,
    /// Writer of the running trace.
    trace: Option<Box<TraceWriter>>,
    quit: bool,
}

impl Serve for EventLoop {
    fn is_restricted(&self) -> bool {
        self.ring.restricted
    }

    /// Runs until [`Command::Quit`]. A failure of io_uring is a defect or the end of memory, and
    /// ends the process.
    fn run(&mut self) {
        while !self.quit {
            if let Err(e) = self.run_once() {
                self.abort_on_ring_failure(&e);
            }
        }
    }
}

/// Current time of CLOCK_MONOTONIC.
pub(crate) fn now() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Largest number of pieces in flight: the window, a flush of each VM, and one deallocation.
fn max_inflight_pieces(window: u32, vms: usize) -> u32 {
    window + vms as u32 + 1
}

impl EventLoop {
    pub fn new(
        config: EngineConfig,
        scheduler: Scheduler,
        sched: &Config,
        disks: Vec<Disk>,
        commands: Receiver<Command>,
        doorbell: Arc<OwnedFd>,
    ) -> Result<Self, EngineError> {
        let io = |what| move |source| EngineError::Io { what, source };
        prepare_thread(&config.cpus, config.fifo).map_err(io("cannot set the engine's CPUs and priority"))?;
        let most = max_inflight_pieces(sched.window.most.max(sched.window.start), disks.len());
        let entries = most + 2 * disks.len() as u32 * 8;
        let ring = Uring::new(entries, config.buffers).map_err(io("io_uring"))?;
        let mut pieces = Vec::new();
        let largest = sched.vms.iter().map(|vm| sched.max_piece(vm)).max().unwrap_or(sched.quantum);
        for _ in 0..most {
            pieces.push(PieceSlot::new(largest).map_err(io("memory"))?);
        }
        let members = disks.len() as u32;
        let poll = config.poll;
        let vms = disks.into_iter().zip(&sched.vms).zip(0..);
        let vms = vms.map(|((disk, vm), member)| Vm { member, ..Vm::new(disk, vm.depth) });
        let mut engine = Self {
            vms: vms.collect(),
            members,
            largest,
            pieces,
            free_pieces: (0..most).rev().collect(),
            config,
            scheduler,
            ring,
            commands,
            doorbell,
            generation: 0,
            commands_pending: false,
            failed_submissions: 0,
            next_deferred: VmId(0),
            last_deferred: Nanos(0),
            had_work: false,
            had_completions: false,
            regulator_wakeup: None,
            regulator_lateness: LatencyRecorder::default(),
            poll: AdaptivePoll::new(poll),
            has_held: false,
            has_stopping: false,
            trace: None,
            quit: false,
        };
        engine
            .ring
            .arm_poll(engine.doorbell.as_raw_fd(), CompletionToken::Doorbell)
            .map_err(io("io_uring"))?;
        Ok(engine)
    }

    /// Runs one round; sleeps only without work.
    fn run_once(&mut self) -> io::Result<()> {
        let fetched = self.fetch();
        self.retire_drained()?;
        let retry = self.try_held()?;
        let wake = self.dispatch()?.min(retry);
        self.notify_guests()?;
        let busy = fetched
            || self.had_work
            || self.commands_pending
            || self.failed_submissions > 0
            || self.vms.iter().any(Vm::needs_fetch);
        let time = now();
        let sleeps = self.poll.sleeps(time, busy);
        self.ring.enter(sleeps, time, wake)?;
        let time = now();
        if sleeps {
            self.poll.woke(time);
        }
        if std::mem::take(&mut self.commands_pending) {
            self.run_commands(time)?;
        }
        self.had_work = false;
        while let Some(completion) = self.ring.next_completion() {
            self.had_work = true;
            self.handle_cqe(time, completion)?;
        }
        if !self.had_work && !sleeps && !busy {
            self.poll_avail_rings();
        }
        Ok(())
    }

    fn abort_on_ring_failure(&self, e: &io::Error) -> ! {
        // Guests reconnect to the restarted process, with their requests in flight. An I/O domain
        // without an engine would serve no guest, and the kernel may still write to guest memory.
        crate::log::write_line(format_args!("{}: io_uring failed, the process ends: {e}", self.config.name));
        std::process::abort();
    }
}

/// Sets CPUs, timer slack and priority of the calling thread.
pub(crate) fn prepare_thread(cpus: &[usize], fifo: Option<u8>) -> io::Result<()> {
    if !cpus.is_empty() {
        let mut set = rustix::thread::CpuSet::new();
        for cpu in cpus {
            set.set(*cpu);
        }
        rustix::thread::sched_setaffinity(None, &set)?;
    }
    // SAFETY: prctl with these arguments touches no memory. Timers of ordinary threads may be 50 us
    // late otherwise.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    if let Some(priority) = fifo {
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
