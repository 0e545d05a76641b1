//! What each thread gives up before it touches anything that a guest wrote. The process says what that is; here is only when.

use std::fmt;
use std::io;
use std::sync::Arc;

/// What a thread does, and so what it still needs of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Serves the queues of a device's VMs by io_uring.
    Engine {
        /// It passes the guests' classes on to the host, which takes `CAP_SYS_NICE` for the real-time class.
        passes_priority: bool,
    },
    /// Listens to one VM's QEMU: messages, descriptors, memory to map.
    Frontend,
    /// Answers on the control socket and reads the configuration again.
    Control,
}

type Step = dyn Fn(Role) -> io::Result<()> + Send + Sync;

/// Called by every thread with its role, once, when it has all that it needs and before it serves anybody.
#[derive(Clone, Default)]
pub struct Confine(Option<Arc<Step>>);

impl Confine {
    /// Confines by this function. It is called by the thread that is to be confined.
    pub fn by(step: impl Fn(Role) -> io::Result<()> + Send + Sync + 'static) -> Self {
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
}

impl fmt::Debug for Confine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Confine(by a function)" } else { "Confine(none)" })
    }
}
