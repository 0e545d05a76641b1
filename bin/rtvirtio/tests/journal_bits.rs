//! Bits of a real journal are turned over: `rtvirtio revert` refuses, or puts all back. It never
//! says that all is back when it is not.
//!
//! `RTVIRTIO_FLIPS` is the number of bits (40 without it), `RTVIRTIO_SEED` the seed; what was seen
//! is printed with `--nocapture`.

use std::fs;

mod plane;

use plane::{Plane, differences};
use rtvirtio_testkit::site::{Random, Site, number, text};

const CLAIMS: [&str; 4] = ["put back", "nothing to put back", "no plan is in force", "nothing to change"];

#[test]
fn a_journal_with_a_wrong_bit_is_refused_or_restores_all() {
    let site = Site::new();
    let Some(plane) = Plane::new("a_journal_with_a_wrong_bit_is_refused_or_restores_all", &site) else {
        return;
    };
    let before = plane.snapshot();
    let journal = site.state_dir().join("journal.json");
    let mut random = Random::new();
    println!("seed {}", random.seed());
    let (mut refused, mut restored) = (0_u64, 0_u64);
    for _ in 0..number("RTVIRTIO_FLIPS", 40) {
        site.ok(&["apply", plane.plan()]);
        let in_force = plane.snapshot();
        let right = fs::read(&journal).unwrap();
        let mut wrong = right.clone();
        let bit = (random.next() * (right.len() * 8) as f64) as usize;
        wrong[bit / 8] ^= 1 << (bit % 8);
        fs::write(&journal, &wrong).unwrap();
        let out = site.output(&["revert"]);
        let (said, now) = (text(&out.stdout) + &text(&out.stderr), plane.snapshot());
        let what = format!("bit {bit} of {} bytes: {}\n{said}", right.len(), out.status);
        if out.status.success() {
            restored += 1;
            assert_eq!(differences(&before, &now), [""; 0], "{what}");
            assert!(!journal.exists(), "{what}");
            continue;
        }
        refused += 1;
        assert!(!CLAIMS.iter().any(|claim| said.contains(claim)), "{what}");
        // Nothing was touched, and the journal is kept as it is, for a person to read.
        assert_eq!(differences(&in_force, &now), [""; 0], "{what}");
        assert_eq!(fs::read(&journal).unwrap(), wrong, "{what}");
        fs::write(&journal, &right).unwrap();
        assert!(site.ok(&["revert"]).contains("everything was put back"));
        assert_eq!(differences(&before, &plane.snapshot()), [""; 0], "{what}");
    }
    println!("{refused} refused, {restored} restored; differences 0, wrong claims 0");
}
