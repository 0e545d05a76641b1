//! Live migration of a guest to another QEMU of this host.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{QUIT_TIMEOUT, QemuError, QemuGuest};
use rtvirtio_vmm::{Qmp, VmmError};

/// Course of a migration that has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migration {
    /// Time for which the guest stood still, in ms, as QEMU says it.
    pub downtime_ms: u64,
    /// Duration in all, in ms.
    pub total_ms: u64,
    /// Passes over memory that was written meanwhile.
    pub syncs: u64,
}

impl QemuGuest {
    /// Migrates the guest to another QEMU while it runs, and waits until it runs there. This QEMU
    /// stays, without a guest that runs.
    ///
    /// # Errors
    /// The monitor refuses, the migration fails or does not end within `timeout`: it is cancelled
    /// then, and the guest runs here.
    pub fn migrate(&mut self, target: &QemuGuest, timeout: Duration) -> Result<Migration, QemuError> {
        self.begin_migration(target)?;
        let begin = Instant::now();
        loop {
            let seen = self.query_migration()?;
            let number = |value: &Value| value.as_u64().unwrap_or_default();
            match seen["status"].as_str() {
                Some("completed") => {
                    return Ok(Migration {
                        downtime_ms: number(&seen["downtime"]),
                        total_ms: number(&seen["total-time"]),
                        syncs: number(&seen["ram"]["dirty-sync-count"]),
                    });
                }
                Some("failed" | "cancelled") => return Err(self.not_migrated(&seen)),
                _ if begin.elapsed() > timeout => {
                    self.cancel_migration()?;
                    return Err(self.not_migrated(&seen));
                }
                _ => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Begins a migration, which goes on by itself.
    ///
    /// # Errors
    /// The monitor refuses: a device cannot be migrated, for one.
    pub fn begin_migration(&mut self, target: &QemuGuest) -> Result<(), QemuError> {
        let uri = format!("unix:{}", target.files.incoming.display());
        self.monitor("migrate", Some(json!({ "uri": uri }))).map(drop)
    }

    /// Cancels a migration: the guest runs here.
    pub fn cancel_migration(&mut self) -> Result<(), QemuError> {
        self.monitor("migrate_cancel", None).map(drop)
    }

    /// Makes a migration pause before its target takes over: the guest stands still, in the state
    /// `pre-switchover`, until [`Self::continue_migration`].
    pub fn pause_before_switchover(&mut self) -> Result<(), QemuError> {
        let pause = json!({ "capability": "pause-before-switchover", "state": true });
        self.monitor("migrate-set-capabilities", Some(json!({ "capabilities": [pause] }))).map(drop)
    }

    /// Continues a migration that is paused before its target takes over.
    pub fn continue_migration(&mut self) -> Result<(), QemuError> {
        self.monitor("migrate-continue", Some(json!({ "state": "pre-switchover" }))).map(drop)
    }

    /// State of a migration, as QEMU's `query-migrate` says it.
    pub fn query_migration(&mut self) -> Result<Value, QemuError> {
        self.monitor("query-migrate", None)
    }

    fn monitor(&mut self, command: &str, arguments: Option<Value>) -> Result<Value, QemuError> {
        let mut qmp = self.qmp()?;
        qmp.execute(command, arguments).map_err(|e| self.explain(e))
    }

    fn not_migrated(&self, seen: &Value) -> QemuError {
        QemuError::Migration { name: self.handle.name.clone(), state: seen.to_string() }
    }

    /// Waits until QEMU's monitor answers.
    pub(super) fn await_monitor(&mut self, start: Instant, timeout: Duration) -> Result<(), QemuError> {
        loop {
            // A busy machine may take a while for the answer too.
            let left = timeout.saturating_sub(start.elapsed()).max(QUIT_TIMEOUT);
            match Qmp::connect(&self.files.qmp, left) {
                Ok(_) => return Ok(()),
                Err(_) if !self.is_alive() => return Err(self.died()),
                Err(VmmError::Connect { .. }) if start.elapsed() < timeout => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(e) => return Err(self.explain(e)),
            }
        }
    }
}
