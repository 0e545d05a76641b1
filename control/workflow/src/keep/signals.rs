//! Requests signals of urgent requests from the I/O domain, in a thread of its own: one that does
//! not answer delays no contract.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::domain::urgent::UrgentSignals;
use crate::error::{Context as _, Result};

/// Interval of requests to the I/O domain: one that was restarted has lost earlier ones.
const RENEW: Duration = Duration::from_secs(2);
/// Interval of checks for VMs that were added.
const ARRIVALS: Duration = Duration::from_millis(100);
/// Timeout for the end of the thread, which an unresponsive I/O domain delays.
const LAST: Duration = Duration::from_secs(1);

/// The thread, until it is dropped.
pub(super) struct Signals {
    /// VMs whose signals are asked for from now on.
    more: Sender<(String, UrgentSignals)>,
    /// VMs and why their urgent requests do not raise them.
    failures: Receiver<(String, String)>,
    end: Option<Sender<()>>,
    /// Closed when the thread has ended.
    ended: Receiver<()>,
}

impl Signals {
    /// Starts a thread that repeats the requests for all VMs that are added.
    pub fn start() -> Result<Self> {
        let (more, newcomers) = channel();
        let (failed, failures) = channel();
        let (end, is_ended) = channel::<()>();
        let (ending, ended) = channel::<()>();
        let run = move || {
            let mut of: Vec<(String, UrgentSignals)> = Vec::new();
            let mut asked = Instant::now();
            loop {
                let known = of.len();
                of.extend(newcomers.try_iter());
                let is_due = asked.elapsed() >= RENEW;
                let first = if is_due { 0 } else { known };
                for (vm, signals) in &mut of[first..] {
                    if let Err(e) = signals.renew() {
                        // Fails when the receiver was dropped, at the end.
                        let _ = failed.send((vm.clone(), format!("urgent requests do not raise it: {e:#}")));
                    }
                }
                if is_due {
                    asked = Instant::now();
                }
                if !matches!(is_ended.recv_timeout(ARRIVALS), Err(RecvTimeoutError::Timeout)) {
                    break;
                }
            }
            // Withdraws the eventfds from the I/O domain.
            drop(of);
            drop(ending);
        };
        let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(run);
        thread.context("a thread that asks the I/O domain for its signals")?;
        Ok(Self { more, failures, end: Some(end), ended })
    }

    /// Asks for a VM's signals too.
    pub fn add(&self, vm: String, signals: UrgentSignals) {
        // A thread that has ended asks for none.
        let _ = self.more.send((vm, signals));
    }

    /// Failures since the last call: VM and reason.
    pub fn failures(&self) -> Vec<(String, String)> {
        self.failures.try_iter().collect()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        drop(self.end.take());
        // Ended or hanging, there is nothing more to do.
        let _ = self.ended.recv_timeout(LAST);
    }
}
