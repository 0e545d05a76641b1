//! Questions to a VM's monitor, asked by a thread of its own: a monitor that does not answer delays
//! no poll of vCPUs, of this VM or of another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;

use rtvirtio_units::Nanos;
use rtvirtio_vmm::Qmp;
use rtvirtio_vmm::threads::Named;
use serde_json::json;

use super::Monitor;
use crate::UrgencyError;

/// Pause before a failed question is repeated: the first, and the longest. It doubles each time.
const ASK_AGAIN: Nanos = Nanos::from_millis(1000);
const MAX_PAUSE: Nanos = Nanos::from_millis(60_000);

/// Numbers of vCPUs by thread id.
pub(super) type Vcpus = BTreeMap<u32, Vec<u32>>;

type Place = (u64, Result<String, UrgencyError>);

/// Pending questions, and the answers of QEMU.
#[derive(Default)]
struct Slots {
    ask_vcpus: bool,
    ask_address: Option<u64>,
    vcpus: Option<Result<Vcpus, UrgencyError>>,
    place: Option<Place>,
}

#[derive(Default)]
struct Shared {
    slots: Mutex<Slots>,
    end: AtomicBool,
}

/// Thread that asks; it ends when this is dropped.
///
/// The other side has the highest priority of all: it only tries the lock, because the thread may
/// be preempted where it cannot release it before that side sleeps.
pub(super) struct MonitorPoller {
    shared: Arc<Shared>,
    thread: Thread,
    asked_vcpus: bool,
    asked_address: bool,
}

impl MonitorPoller {
    /// Starts the thread, without a question.
    pub fn start(mut monitor: Monitor) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let run = move || {
            while !of_thread.end.load(Ordering::Acquire) {
                if !answer_one(&of_thread.slots, &mut monitor) {
                    std::thread::park();
                }
            }
        };
        let thread = std::thread::Builder::new().name("monitor".to_owned()).spawn(run)?.thread().clone();
        Ok(Self { shared, thread, asked_vcpus: false, asked_address: false })
    }

    /// Asks for the vCPUs of each thread, unless that is pending; to be called again until it is.
    pub fn ask_vcpus(&mut self) {
        if self.asked_vcpus {
            return;
        }
        if let Ok(mut slots) = self.shared.slots.try_lock() {
            (slots.ask_vcpus, self.asked_vcpus) = (true, true);
            drop(slots);
            self.thread.unpark();
        }
    }

    /// Asks for the address of a guest page in QEMU's memory, unless a question is pending; to be
    /// called again until it is.
    pub fn ask_address(&mut self, address: u64) {
        if self.asked_address {
            return;
        }
        if let Ok(mut slots) = self.shared.slots.try_lock() {
            (slots.ask_address, self.asked_address) = (Some(address), true);
            drop(slots);
            self.thread.unpark();
        }
    }

    /// Numbers of the vCPUs by thread, once the answer has come.
    pub fn vcpus(&mut self) -> Option<Result<Vcpus, UrgencyError>> {
        let taken = self.asked_vcpus.then(|| self.shared.slots.try_lock().ok()?.vcpus.take())?;
        self.asked_vcpus = taken.is_none();
        taken
    }

    /// Guest address with the monitor's text on its place in QEMU's memory, once it has come.
    pub fn place(&mut self) -> Option<Place> {
        let taken = self.asked_address.then(|| self.shared.slots.try_lock().ok()?.place.take())?;
        self.asked_address = taken.is_none();
        taken
    }
}

impl Drop for MonitorPoller {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Release);
        // Not joined: it may be asking.
        self.thread.unpark();
    }
}

/// Answers a question; returns whether there was one.
fn answer_one(slots: &Mutex<Slots>, monitor: &mut Monitor) -> bool {
    let lock = || slots.lock().unwrap_or_else(PoisonError::into_inner);
    // Each of these locks ends with its line: none is held while QEMU is asked.
    if std::mem::take(&mut lock().ask_vcpus) {
        let answer = monitor().and_then(|mut qmp| Ok(Named::ask_vcpus(&mut qmp)?));
        lock().vcpus = Some(answer);
        return true;
    }
    let Some(address) = lock().ask_address.take() else { return false };
    let answer = monitor().and_then(|mut qmp| translate(&mut qmp, address));
    lock().place = Some((address, answer));
    true
}

fn translate(qmp: &mut Qmp, address: u64) -> Result<String, UrgencyError> {
    let arguments = json!({ "command-line": format!("gpa2hva {address:#x}") });
    let answer = qmp.execute("human-monitor-command", Some(arguments))?;
    Ok(answer.as_str().unwrap_or_default().trim().to_owned())
}

/// Exponential back-off after failures.
#[derive(Debug)]
pub(super) struct Again {
    pause: Nanos,
    due: Nanos,
}

impl Default for Again {
    fn default() -> Self {
        Self { pause: ASK_AGAIN, due: Nanos(0) }
    }
}

impl Again {
    /// Whether the pause is over.
    pub fn is_due(&self, now: Nanos) -> bool {
        now >= self.due
    }

    /// Doubles the pause after a failure.
    pub fn failed(&mut self, now: Nanos) {
        self.due = Nanos(now.0.saturating_add(self.pause.0));
        self.pause = Nanos(self.pause.0.saturating_mul(2).min(MAX_PAUSE.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_asked_again_later_and_later() {
        let mut again = Again::default();
        assert!(again.is_due(Nanos(0)));
        let mut now = Nanos(5);
        for pause_ms in [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000] {
            again.failed(now);
            let due = Nanos(now.0 + Nanos::from_millis(pause_ms).0);
            assert!(!again.is_due(Nanos(due.0 - 1)) && again.is_due(due), "{pause_ms}");
            now = due;
        }
    }
}
