use rtvirtio_apply::KnobStatus;

use super::*;

fn status(states: Vec<KnobState>) -> Status {
    let knob = |state| KnobStatus {
        knob: "elevator".into(),
        path: "/sys/x".into(),
        old: Some("none".into()),
        new: "bfq".into(),
        state,
    };
    Status {
        pid: 7,
        version: "0".into(),
        complete: true,
        reverting: false,
        leftover: false,
        rebooted: false,
        knobs: states.into_iter().map(knob).collect(),
    }
}

fn changed() -> KnobState {
    KnobState::Changed { found: "none".into() }
}

fn gone() -> KnobState {
    KnobState::Gone { why: "the thread has ended".into() }
}

/// The headline, and whether the exit code is 0.
fn told(status: &Status) -> (String, bool) {
    (text(status, None).lines().next().unwrap().to_owned(), Count::from_status(status).is_whole(status))
}

#[test]
fn the_headline_counts_what_is_not_as_applied() {
    let unknown = || KnobState::Unknown { error: "EIO".into() };
    let cases = [
        (vec![KnobState::InForce], "no plan, but settings: in force, 1 setting", true),
        (
            vec![KnobState::InForce, changed()],
            "no plan, but settings: 1 of 2 settings in force, 1 not as applied",
            false,
        ),
        (vec![KnobState::InForce, KnobState::Original], "1 not as applied", false),
        (vec![KnobState::InForce, unknown()], "1 not readable", false),
        (vec![KnobState::InForce, gone()], "1 gone with", true),
        (vec![gone()], "0 of 1 settings in force", false),
    ];
    for (states, headline, whole) in cases {
        let (line, is_whole) = told(&status(states));
        assert!(line.contains(headline), "{line}");
        assert_eq!(is_whole, whole, "{line}");
    }
}

#[test]
fn a_plan_that_was_cut_off_is_not_in_force() {
    let half = Status { complete: false, ..status(vec![KnobState::InForce]) };
    let (line, whole) = told(&half);
    assert!(line.contains("HALF APPLIED") && line.contains("rtvirtio revert") && !whole, "{line}");
    let back = Status { reverting: true, ..status(vec![KnobState::InForce]) };
    let (line, whole) = told(&back);
    assert!(line.contains("HALF PUT BACK") && !whole, "{line}");
    let left = Status { leftover: true, ..status(vec![KnobState::InForce]) };
    let (line, whole) = told(&left);
    assert!(line.contains("LEFT BY A REVERT") && !whole, "{line}");
    let rebooted = Status { rebooted: true, ..status(vec![KnobState::InForce]) };
    assert!(!told(&rebooted).1);
}
