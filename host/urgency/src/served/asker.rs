//! A VM's monitor, asked by a thread of its own: one that does not answer holds up no look at the
//! vCPUs, of this VM or of another.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};

use rtvirtio_units::Nanos;
use rtvirtio_vmm::Qmp;
use serde_json::json;

use super::Monitor;
use crate::UrgencyError;

/// Before what failed is asked again: at first, and at most. It doubles each time.
const ASK_AGAIN: Nanos = Nanos::from_millis(1000);
const LONGEST: Nanos = Nanos::from_millis(60_000);

/// vCPU numbers by thread.
pub(super) type Vcpus = BTreeMap<u32, Vec<u32>>;

enum Question {
    Vcpus,
    Address(u64),
}

/// What QEMU has answered.
pub(super) enum Reply {
    /// Which thread runs which vCPUs.
    Vcpus(Result<Vcpus, UrgencyError>),
    /// Where a guest's address is in QEMU's memory, as the monitor's text says it.
    Address(u64, Result<String, UrgencyError>),
}

/// The thread, which ends with this.
pub(super) struct Asker {
    questions: Sender<Question>,
    answers: Receiver<Reply>,
    asked_vcpus: bool,
    asked_address: bool,
}

impl Asker {
    /// Nothing is asked yet.
    ///
    /// # Errors
    /// When there is no thread.
    pub fn start(mut monitor: Monitor) -> std::io::Result<Self> {
        let (questions, asked) = channel();
        let (answer, answers) = channel();
        let run = move || {
            // Until the sender is dropped.
            for question in asked {
                let answered = match question {
                    Question::Vcpus => Reply::Vcpus(monitor().and_then(|mut qmp| vcpus(&mut qmp))),
                    Question::Address(address) => {
                        Reply::Address(address, monitor().and_then(|mut qmp| translate(&mut qmp, address)))
                    }
                };
                if answer.send(answered).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("monitor".to_owned()).spawn(run)?;
        Ok(Self { questions, answers, asked_vcpus: false, asked_address: false })
    }

    /// Asks which thread runs which vCPU, unless that is asked already.
    pub fn ask_vcpus(&mut self) {
        if !std::mem::replace(&mut self.asked_vcpus, true) {
            // The thread lives as long as this.
            let _ = self.questions.send(Question::Vcpus);
        }
    }

    /// Whether an answer to that is to come.
    pub fn is_asking_vcpus(&self) -> bool {
        self.asked_vcpus
    }

    /// Asks where a page of the guest's memory is, unless one is asked for already.
    pub fn ask_address(&mut self, address: u64) {
        if !std::mem::replace(&mut self.asked_address, true) {
            let _ = self.questions.send(Question::Address(address));
        }
    }

    /// The next answer that has come.
    pub fn answer(&mut self) -> Option<Reply> {
        let answer = self.answers.try_recv().ok()?;
        match answer {
            Reply::Vcpus(_) => self.asked_vcpus = false,
            Reply::Address(..) => self.asked_address = false,
        }
        Some(answer)
    }
}

fn vcpus(qmp: &mut Qmp) -> Result<Vcpus, UrgencyError> {
    let mut vcpus = Vcpus::new();
    for cpu in qmp.query_cpus_fast()? {
        vcpus.entry(cpu.thread_id.unsigned_abs()).or_default().push(cpu.cpu_index);
    }
    Ok(vcpus)
}

fn translate(qmp: &mut Qmp, address: u64) -> Result<String, UrgencyError> {
    let arguments = json!({ "command-line": format!("gpa2hva {address:#x}") });
    let answer = qmp.execute("human-monitor-command", Some(arguments))?;
    Ok(answer.as_str().unwrap_or_default().trim().to_owned())
}

/// When to ask again after failures.
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
    /// Whether to ask.
    pub fn is_due(&self, now: Nanos) -> bool {
        now >= self.due
    }

    /// It has failed.
    pub fn failed(&mut self, now: Nanos) {
        self.due = Nanos(now.0.saturating_add(self.pause.0));
        self.pause = Nanos(self.pause.0.saturating_mul(2).min(LONGEST.0));
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
