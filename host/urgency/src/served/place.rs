//! Location of the guest's reports: in the page, or in a page of its own memory.

use std::fs::File;
use std::path::PathBuf;

use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::{BLOCK, Blocks, LEAST_SIZE, Mode};

use super::ServedVm;
use crate::{FileMemory, UrgencyError};

/// Least time between two questions for a page that the guest has named.
const ASK_AGAIN: Nanos = Nanos::from_millis(1000);

impl ServedVm {
    /// Finds the location of the guest's reports. Returns whether the heartbeat has advanced. A
    /// guest whose page cannot be read reports nothing: that affects no other VM.
    pub(super) fn find_blocks(&mut self, now: Nanos) -> bool {
        let (mode, beat, unread) = match self.host.mode() {
            Ok((mode, beat)) => (mode, beat, None),
            Err(e) => (Mode::Off, self.beat.unwrap_or(0), Some(e)),
        };
        let beats = self.beat.replace(beat).is_some_and(|old| old != beat);
        if mode != self.mode {
            (self.mode, self.blocks, self.refused) = (mode, None, None);
            for v in &mut self.vcpus {
                (v.sequence, v.report) = (None, None);
                // The content may be from a host process that was killed.
                let _ = self.shown.show(v.vcpu, v.thread.level());
                // A guest that switches modes all the time is not one without reports.
                if mode == Mode::Off {
                    v.machine.end(now);
                }
            }
        }
        if let Some(e) = unread {
            self.refused = Some(format!("its urgency page cannot be read: {e}"));
        }
        match mode {
            _ if self.blocks.is_some() => {}
            Mode::Off => self.wrong = false,
            Mode::Region => {
                self.wrong = false;
                self.blocks = Some(Blocks::new(self.host.memory().clone(), BLOCK, self.host.vcpus()));
            }
            Mode::GuestMemory { address } => {
                if address % LEAST_SIZE as u64 != 0 {
                    let e = self.wrong_address(address, "it is no page's start");
                    (self.wrong, self.refused) = (true, Some(e.to_string()));
                } else if now >= self.ask_again {
                    self.ask_again = Nanos(now.0.saturating_add(ASK_AGAIN.0));
                    self.monitor.ask_address(address);
                }
            }
        }
        beats && (self.blocks.is_some() || self.wrong)
    }

    /// Takes QEMU's answer on the location of a guest page. Ignored where the guest has named
    /// another one since.
    pub(super) fn take_memory(&mut self, address: u64, place: Result<String, UrgencyError>) {
        if !matches!(self.mode, Mode::GuestMemory { address: named } if named == address) {
            return;
        }
        match place.and_then(|answer| self.guest_memory(address, &answer)) {
            Ok(memory) => {
                self.blocks = Some(Blocks::new(memory, 0, LEAST_SIZE / BLOCK));
                (self.wrong, self.refused) = (false, None);
            }
            Err(e) => {
                // A monitor that does not answer is not the guest's fault.
                self.wrong = matches!(e, UrgencyError::Address { .. });
                self.refused = Some(e.to_string());
            }
        }
    }

    fn wrong_address(&self, address: u64, why: &str) -> UrgencyError {
        UrgencyError::Address { vm: self.name.clone(), address, why: why.to_owned() }
    }

    /// Opens a page of the guest's memory. QEMU has translated the address, or refused one where
    /// the guest has no memory; a page is contiguous in QEMU's memory too.
    fn guest_memory(&self, address: u64, answer: &str) -> Result<FileMemory, UrgencyError> {
        // `Host virtual address for 0x1000 (pc.ram) is 0x7f0000001000`
        let place = answer.rsplit_once(" is 0x").and_then(|(_, hex)| u64::from_str_radix(hex, 16).ok());
        let place = place.ok_or_else(|| self.wrong_address(address, answer))?;
        let path = PathBuf::from(format!("/proc/{}/mem", self.pid));
        // Read only: levels are shown in the page alone.
        // kernel file
        let file = File::open(&path);
        Ok(FileMemory::new(file.map_err(UrgencyError::io("open", path))?, place))
    }
}
