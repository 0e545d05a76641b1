//! Confinement of threads: each drops its privileges before it handles guest input. The process
//! supplies the function; this module calls it at the right moment.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

/// The role of a thread, which decides the privileges that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Serves the queues of a device's VMs.
    Engine {
        /// Passes the guests' I/O classes on to the host, which takes `CAP_SYS_NICE` for the
        /// real-time class.
        passes_priority: bool,
    },
    /// Serves the ports of a network: reads and writes frames, and sets filters and offloads.
    Network,
    /// Waits for front ends, or handles one VM's vhost-user messages, descriptors and memory
    /// mappings.
    VhostUser,
    /// Serves the control socket and reloads the configuration.
    Control,
    /// Starts threads of the role [`Role::VhostUser`] when front ends send. The thread reads
    /// nothing of guests.
    Spawner,
}

/// Starts a confined thread.
pub trait StartThread {
    /// Starts a thread; returns when it is confined.
    ///
    /// # Errors
    /// The thread cannot be started or confined; `body` is not run then.
    fn start_thread(&self, name: &str, role: Role, body: Body) -> io::Result<JoinHandle<()>>;
}

pub type Body = Box<dyn FnOnce() + Send>;

impl StartThread for Confine {
    fn start_thread(&self, name: &str, role: Role, body: Body) -> io::Result<JoinHandle<()>> {
        self.spawn(name, role, body)
    }
}

struct Job {
    name: String,
    role: Role,
    body: Body,
    reply: SyncSender<io::Result<JoinHandle<()>>>,
}

/// A thread that starts others: a confined thread of another role cannot.
#[derive(Debug)]
pub struct Spawner {
    jobs: SyncSender<Job>,
}

impl Spawner {
    /// Starts the thread; it ends when this is dropped.
    pub fn start(confine: &Confine) -> io::Result<Self> {
        let (jobs, next) = sync_channel::<Job>(1);
        let confined = confine.clone();
        confine.spawn("iod-spawner", Role::Spawner, move || {
            for Job { name, role, body, reply } in next {
                let _ = reply.send(confined.spawn(&name, role, body));
            }
        })?;
        Ok(Self { jobs })
    }
}

impl StartThread for Spawner {
    fn start_thread(&self, name: &str, role: Role, body: Body) -> io::Result<JoinHandle<()>> {
        let (reply, answer) = sync_channel(1);
        let ended = || io::Error::other("the thread that starts others has ended");
        self.jobs.send(Job { name: name.to_owned(), role, body, reply }).map_err(|_| ended())?;
        answer.recv().map_err(|_| ended())?
    }
}

type Step = dyn Fn(Role) -> io::Result<()> + Send + Sync;

/// Function that each thread calls once with its role, between set-up and service.
#[derive(Clone, Default)]
pub struct Confine(Option<Arc<Step>>);

impl Confine {
    /// Confines by this function, which the confined thread itself calls.
    pub fn with(step: impl Fn(Role) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(step)))
    }

    /// No confinement: for tests and for `sandbox = "off"`.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Confines the calling thread, irreversibly.
    ///
    /// # Errors
    /// The kernel's; the thread must not serve guests then.
    pub fn apply(&self, role: Role) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |step| step(role))
    }

    /// Starts a thread; returns when it is confined.
    ///
    /// # Errors
    /// The thread cannot be started or confined; `body` is not run then.
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
