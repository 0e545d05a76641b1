//! The thread of an event loop: of a device, or of a network.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::EngineError;
use crate::confine::{Confine, Role};

/// Commands that wait for the loop: a few for each VM, further ones wait in the control threads.
const PENDING_COMMANDS: usize = 64;

/// A loop that serves queues until a command ends it.
pub(crate) trait Serve {
    /// Whether the ring accepts no operations but those of the loop.
    fn is_restricted(&self) -> bool;

    /// Runs until a command ends it.
    fn run(&mut self);
}

/// A command that ends a loop.
pub(crate) trait Quit {
    /// Makes the command that ends the loop.
    fn quit() -> Self;
}

/// The engine has ended.
#[derive(Debug, thiserror::Error)]
#[error("the engine has ended")]
pub struct EngineGone;

/// Sends commands to an engine, from any thread.
#[derive(Debug)]
pub struct EngineHandle<C> {
    sender: SyncSender<C>,
    doorbell: Arc<OwnedFd>,
}

impl<C> Clone for EngineHandle<C> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), doorbell: Arc::clone(&self.doorbell) }
    }
}

impl<C> EngineHandle<C> {
    fn new(sender: SyncSender<C>, doorbell: Arc<OwnedFd>) -> Self {
        Self { sender, doorbell }
    }

    /// Sends a command; waits while the engine's command queue is full.
    pub fn send(&self, command: impl Into<C>) -> Result<(), EngineGone> {
        self.sender.send(command.into()).map_err(|_| EngineGone)?;
        rustix::io::write(&self.doorbell, &1u64.to_ne_bytes()).map_err(|_| EngineGone)?;
        Ok(())
    }

    /// Sends a command and waits for its reply.
    pub fn ask<T, K: Into<C>>(&self, command: impl FnOnce(SyncSender<T>) -> K) -> Result<T, EngineGone> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().map_err(|_| EngineGone)
    }
}

/// A running loop; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct EngineThread<C: Quit> {
    handle: EngineHandle<C>,
    thread: Option<JoinHandle<()>>,
    restricted: bool,
}

impl<C: Quit + Send + 'static> EngineThread<C> {
    /// Starts a thread that makes a loop, is confined, and runs it; returns when it serves. The
    /// thread that uses the ring makes it: the kernel then needs no lock for it.
    pub(crate) fn start<L: Serve>(
        name: &str,
        confine: Confine,
        role: Role,
        make: impl FnOnce(Receiver<C>, Arc<OwnedFd>) -> Result<L, EngineError> + Send + 'static,
    ) -> Result<Self, EngineError> {
        let io = |what| move |source| EngineError::Io { what, source };
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let doorbell = rustix::event::eventfd(0, flags).map_err(|e| io("eventfd")(e.into()))?;
        let doorbell = Arc::new(doorbell);
        let (sender, commands): (SyncSender<C>, Receiver<C>) = sync_channel(PENDING_COMMANDS);
        let handle = EngineHandle::new(sender, Arc::clone(&doorbell));
        let (ready, is_ready) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .spawn(move || {
                let _ends = AbortOnPanic;
                let confined = |serving| match confine.apply(role) {
                    Ok(()) => Ok(serving),
                    Err(source) => Err(io("cannot confine the engine's thread")(source)),
                };
                match make(commands, doorbell).and_then(confined) {
                    Ok(mut serving) => {
                        let _ = ready.send(Ok(serving.is_restricted()));
                        serving.run();
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })
            .map_err(io("cannot start a thread"))?;
        match is_ready.recv() {
            Ok(Ok(restricted)) => Ok(Self { handle, thread: Some(thread), restricted }),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(io("the engine's thread ended at once")(io::Error::other("no reason given"))),
        }
    }
}

impl<C: Quit> EngineThread<C> {
    /// Whether the kernel refuses every io_uring operation that the loop does not use.
    pub(crate) fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// A handle for control threads.
    pub(crate) fn handle(&self) -> EngineHandle<C> {
        self.handle.clone()
    }
}

impl<C: Quit> Drop for EngineThread<C> {
    fn drop(&mut self) {
        let _ = self.handle.send(C::quit());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A panic of a loop ends the process: its guests would wait for ever, and the kernel may still
/// write to memory that is about to be unmapped. QEMU reconnects to the restarted I/O domain.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
