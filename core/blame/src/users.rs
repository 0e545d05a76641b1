//! Causes among those who use the device, and its elevator.

use crate::{ALONE, Cause, CauseKind, Facts, SHARED};

/// Elevator that held requests back for that share of the time.
pub(super) fn elevator(held: f64) -> Cause {
    Cause {
        kind: CauseKind::Elevator,
        share: None,
        evidence: format!(
            "for {:.0} % of the time BFQ held requests back while the disk had none (it idles for the VM whose turn it is)",
            100.0 * held
        ),
        remedy: "`rtvirtio plan` chooses BFQ's settings; or set `slice_idle` to 0".to_owned(),
    }
}

/// Causes among the users of a device on which requests wait.
pub(super) fn users(facts: &Facts, shares: &[(String, f64)]) -> Vec<Cause> {
    let (vm, mut found) = (&facts.vm, Vec::new());
    let own = shares.iter().find(|(name, _)| name == vm).map_or(0.0, |(_, share)| *share);
    for (name, share) in shares.iter().filter(|(name, share)| name != vm && *share >= SHARED) {
        found.push(Cause {
            kind: CauseKind::Neighbour,
            share: None,
            evidence: format!(
                "requests wait at the device, of whose bytes {:.0} % are {name}'s",
                100.0 * share
            ),
            remedy: format!("limit {name}, or `rtvirtio plan`"),
        });
    }
    let of_vms: f64 = shares.iter().map(|(_, share)| share).sum();
    let others = 1.0 - of_vms;
    if others >= SHARED {
        found.push(Cause {
            kind: CauseKind::OtherProgram,
            share: None,
            evidence: format!(
                "requests wait at the device, of whose bytes {:.0} % are of programs that are none of the VMs",
                100.0 * others
            ),
            remedy: "end that program, or limit it".to_owned(),
        });
    }
    // A share of bytes and an excess of requests of one direction are no part of each other.
    let load = facts.load.filter(|load| load.bytes && own < ALONE && own * load.excess() >= SHARED);
    found.extend(load.and_then(|load| load.cause()));
    if own >= ALONE && !facts.may_catch_up() {
        found.push(facts.load.and_then(|load| load.cause()).unwrap_or_else(|| Cause {
            kind: CauseKind::Device,
            share: None,
            evidence: format!(
                "requests wait at the device although {:.0} % of its bytes are this VM's own: it does not keep up",
                100.0 * own
            ),
            remedy: "lower the rate or block size, raise the target, or use a faster device".to_owned(),
        }));
    }
    found
}
