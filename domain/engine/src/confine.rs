//! What each thread gives up before it touches anything that a guest wrote. The process says what
//! that is; here is only when.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

/// What a thread does, and so what it still needs of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Serves the queues of a device's VMs by io_uring.
    Engine {
        /// It passes the guests' classes on to the host, which takes `CAP_SYS_NICE` for the
        /// real-time class.
        passes_priority: bool,
    },
    /// Listens to one VM's QEMU: messages, descriptors, memory to map.
    VhostUser,
    /// Answers on the control socket and reads the configuration again.
    Control,
}

type Step = dyn Fn(Role) -> io::Result<()> + Send + Sync;

/// Called by every thread with its role, once, when it has all that it needs and before it serves
/// anybody.
#[derive(Clone, Default)]
pub struct Confine(Option<Arc<Step>>);

impl Confine {
    /// Confines by this function. It is called by the thread that is to be confined.
    pub fn with(step: impl Fn(Role) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(step)))
    }

    /// Threads stay as they are: for tests and for `sandbox = "off"`.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Confines the calling thread, for good.
    ///
    /// # Errors
    /// What the kernel refused; the thread must then serve nobody.
    pub fn apply(&self, role: Role) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |step| step(role))
    }

    /// Starts a thread that is confined before it does anything else; it is when this returns.
    ///
    /// # Errors
    /// When the thread cannot be made, or what the kernel refused; `body` is not run then.
    pub fn spawn(
        &self,
        name: &str,
        role: Role,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let (ready, is_ready) = sync_channel(1);
        let confine = self.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let confined = confine.apply(role);
            let fine = confined.is_ok();
            let _ = ready.send(confined);
            if fine {
                body();
            }
        })?;
        is_ready.recv().map_err(io::Error::other)??;
        Ok(thread)
    }
}

impl fmt::Debug for Confine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Confine(by a function)" } else { "Confine(none)" })
    }
}
