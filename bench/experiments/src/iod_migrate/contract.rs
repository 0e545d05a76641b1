//! Reservation of a disk that moves, as the I/O domains' status says it.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_domain_protocol::status::DiskStatus;
use serde::{Deserialize, Serialize};

use crate::guest;

/// Reservation in the configuration of both I/O domains.
pub(super) const RESERVE: &str = r#"{ share = "20%", burst = "100ms", deadline = "1s" }"#;
/// Numbers of [`RESERVE`].
const SHARE: f64 = 0.2;
const BURST_NS: u64 = 100_000_000;
pub(super) const DEADLINE_NS: u64 = 1_000_000_000;
/// Longest time until a request has completed within the reservation.
const TIME_LIMIT: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(50);

/// State of the reservation after an arrival.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contract {
    /// The disk is attached where the guest runs, with the declared reservation, within which
    /// requests have completed; on the other side it is not attached.
    InForce,
    /// Anything else, or a status that could not be read.
    Unverified(String),
}

/// Looks at both I/O domains until requests have completed within the reservation, or the time is
/// over.
pub(super) fn verify(here: &Path, other: &Path, qemu: u32) -> Contract {
    let begin = Instant::now();
    let mut before = None;
    loop {
        let status = guest::vm_status(here).map_err(|e| format!("{e:#}"));
        let seen = status.and_then(|status| declared(&status, qemu)).and_then(|requests| {
            let first = *before.get_or_insert(requests);
            if requests > first { Ok(()) } else { Err("no request within the reservation".to_owned()) }
        });
        match seen.and_then(|()| released(other)) {
            Ok(()) => return Contract::InForce,
            Err(why) if begin.elapsed() > TIME_LIMIT => return Contract::Unverified(why),
            Err(_) => thread::sleep(POLL),
        }
    }
}

fn released(control: &Path) -> Result<(), String> {
    match guest::is_attached(control) {
        Ok(false) => Ok(()),
        Ok(true) => Err("the disk is attached on the other side too".to_owned()),
        Err(e) => Err(format!("the other side: {e:#}")),
    }
}

/// Requests that have completed within the declared reservation of a disk which this QEMU uses.
pub(super) fn declared(status: &DiskStatus, qemu: u32) -> Result<u64, String> {
    if !status.attached || status.peer != Some(qemu) {
        return Err(format!("attached: {}, to process {:?}, not {qemu}", status.attached, status.peer));
    }
    let found = status.promises.iter().find(|p| p.key == "reserve").ok_or("no reservation")?;
    let has_share = found.share.is_some_and(|share| (share - SHARE).abs() < 1e-6);
    if !has_share || found.burst_ns != Some(BURST_NS) || found.deadline_ns != Some(DEADLINE_NS) {
        return Err(format!("another reservation: {found:?}"));
    }
    found.requests.ok_or_else(|| "the requests within the reservation are not known".to_owned())
}
