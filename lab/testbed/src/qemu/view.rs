//! A guest as it is seen from outside, by which its failure is judged.

use std::fmt;

use rtvirtio_vmm::Qmp;

use super::{QUIT_TIMEOUT, QemuGuest};

/// State of a guest, as its console, QEMU and its agent say it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestState {
    /// The console shows a panic or another fault of the guest's kernel than a lockup.
    Panicked,
    /// QEMU has ended, and the console shows no such fault.
    Ended,
    /// The vCPUs stand still, in this state of QEMU's.
    Paused(String),
    /// The vCPUs run, the console shows a lockup or nothing, and the agent does not answer.
    Hangs,
    /// The agent answers.
    Answers,
    /// QEMU's monitor does not say.
    Unknown(String),
}

impl fmt::Display for GuestState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panicked => f.write_str("its kernel panicked"),
            Self::Ended => f.write_str("QEMU has ended"),
            Self::Paused(status) => write!(f, "its vCPUs stand still: {status}"),
            Self::Hangs => f.write_str("hangs: its vCPUs run, and its agent does not answer"),
            Self::Answers => f.write_str("answers"),
            Self::Unknown(why) => write!(f, "not known: {why}"),
        }
    }
}

impl QemuGuest {
    /// State of the guest, and the end of QEMU's errors and of the console: from its first fault,
    /// where it shows one. An agent that does not answer takes 10 s.
    pub fn examine(&mut self) -> (GuestState, String) {
        // The console of a QEMU that has ended is complete.
        let state = self.state();
        let has_panicked = !matches!(state, GuestState::Answers) && self.files.has_panicked();
        (if has_panicked { GuestState::Panicked } else { state }, self.files.last_words())
    }

    fn state(&mut self) -> GuestState {
        if !self.is_alive() {
            return GuestState::Ended;
        }
        match Qmp::connect(&self.files.qmp, QUIT_TIMEOUT).and_then(|mut qmp| qmp.query_status()) {
            Ok(status) if !status.running => GuestState::Paused(status.status),
            Ok(_) => {
                self.close_agent();
                if self.agent().is_ok() {
                    GuestState::Answers
                } else if self.is_alive() {
                    GuestState::Hangs
                } else {
                    GuestState::Ended
                }
            }
            Err(_) if !self.is_alive() => GuestState::Ended,
            Err(e) => GuestState::Unknown(e.to_string()),
        }
    }
}
