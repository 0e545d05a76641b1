//! Damaged journals: refused whatever the damage, kept as they are, and shown.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rtvirtio_apply::{ApplyError, OnConflict, Silent, status};
use rtvirtio_kernel::sched::Attr;
use support::tasks::{CPU, VMS, cgroup, group, policy};
use support::{Sim, assert_same, full_plan};

/// Machine with a plan in force for settings of the kernel, of cgroups and of guests, or with a
/// contract for threads.
fn in_force(v2: bool, threads: bool) -> Sim {
    let lab = Sim::new().with_disk(v2, &["/lab", "/lab/vm0", "/lab/vm1", "/lab/vm2"], "mq-deadline");
    let mut lab = lab.with_guests(&["none"; 3]);
    lab.kernel.boot("6e9d4e52-0a0c-4b0f-9d4c-0a3c1c3f6b1d\n");
    if threads {
        lab = lab.with_cpu();
        let dir = Path::new(CPU).join("rtvirtio-vm");
        let budget = [("cpu.rt_runtime_us", "4000")];
        lab.case.cpu = group(&dir, Path::new(VMS), "other nice 0", &budget);
        for tid in 7..12 {
            lab.kernel.thread(7, tid, &Attr::other(-2), "/vms");
            lab.case.cpu.extend([cgroup(7, tid, "/rtvirtio-vm"), policy(7, tid, &Attr::fifo(2))]);
        }
    } else {
        lab.case.plan = full_plan(true);
    }
    lab.apply().unwrap();
    lab
}

impl Sim {
    /// Reverts with a journal of these bytes; returns the error.
    fn revert_of(&self, bytes: &[u8]) -> ApplyError {
        fs::write(self.journal(), bytes).unwrap();
        let error = self.session().revert(OnConflict::Force, &self.machine(), &mut Silent).unwrap_err();
        assert_eq!(fs::read(self.journal()).unwrap(), bytes, "kept as it is");
        error
    }
}

fn labs() -> [(&'static str, Sim); 3] {
    [("v1", in_force(false, false)), ("v2", in_force(true, false)), ("threads", in_force(false, true))]
}

/// `SplitMix64`: the same positions in every run.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn a_flipped_bit_anywhere_is_refused_and_touches_nothing() {
    let mut seed = 34;
    for (name, lab) in labs() {
        let good = fs::read(lab.journal()).unwrap();
        let applied = lab.snapshot();
        let header = good.iter().position(|b| *b == b'\n').unwrap() as u64 * 8;
        let mut bits = BTreeSet::new();
        while bits.len() < 1000 {
            // Every fifth bit is in the first line.
            let range = if bits.len() % 5 == 0 { header } else { good.len() as u64 * 8 };
            bits.insert(random(&mut seed) % range);
        }
        for bit in bits {
            let mut bytes = good.clone();
            bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
            let error = lab.revert_of(&bytes);
            assert!(matches!(error, ApplyError::BadJournal { .. }), "{name}: bit {bit}: {error}");
        }
        let now = lab.snapshot();
        assert_same(&applied, &now, name);
        println!("{name}: 1000 bits of {} flipped: all refused, 0 settings touched", good.len() * 8);
        fs::write(lab.journal(), good).unwrap();
        assert!(lab.revert(OnConflict::Report).done);
    }
}

#[test]
fn a_journal_that_is_cut_doubled_or_goes_on_is_refused() {
    for (name, lab) in labs() {
        let good = fs::read(lab.journal()).unwrap();
        let refused = |bytes: &[u8], what: &str| {
            fs::write(lab.journal(), bytes).unwrap();
            let error = lab.session().in_force().unwrap_err();
            assert!(matches!(error, ApplyError::BadJournal { .. }), "{name}: {what}: {error}");
        };
        for length in 0..good.len() {
            // All lengths within the first line and near the end, some in between.
            if length < 120 || length + 40 > good.len() || length % 41 == 0 {
                refused(&good[..length], &format!("cut at {length}"));
            }
        }
        let (first, body) = good.split_at(good.iter().position(|b| *b == b'\n').unwrap() + 1);
        let other = fs::read(in_force(name == "v1", false).journal()).unwrap();
        let other_body = &other[first.len()..];
        for (what, parts) in [
            ("doubled", [&good[..], &good[..]]),
            ("its body doubled", [&good, body]),
            ("without its first line", [body, b""]),
            ("with two first lines", [first, &good]),
            ("the first line of another", [first, other_body]),
            ("with a space", [&good, b" "]),
            ("with a line more", [&good, b"\n"]),
            ("with zeros", [&good, &[0; 512]]),
            ("zeros first", [&[0; 512], &good]),
            ("a byte order mark first", [b"\xef\xbb\xbf", &good]),
        ] {
            refused(&parts.concat(), what);
        }
        let windows = String::from_utf8(good.clone()).unwrap().replace('\n', "\r\n");
        refused(windows.as_bytes(), "edited elsewhere");
        let edited =
            String::from_utf8(good.clone()).unwrap().replacen("\"complete\": true", "\"complete\":  true", 1);
        refused(edited.as_bytes(), "edited by hand");
        fs::write(lab.journal(), &good).unwrap();
        assert!(lab.session().in_force().unwrap());
    }
}

#[test]
fn what_can_be_read_is_shown_with_its_commands() {
    let lab = in_force(false, false);
    let good = String::from_utf8(fs::read(lab.journal()).unwrap()).unwrap();
    let scheduler = "echo 'mq-deadline' > '/sys/block/loop0/queue/scheduler'  # unverified";
    let limit = "echo '7:0 0' > '/sys/fs/cgroup/blkio/lab/vm2/blkio.throttle.read_iops_device'  # unverified";
    let guest = "echo 'none' > '/sys/block/vda/queue/scheduler'  # unverified";
    let error = lab.revert_of(good.replacen("boot_id", "boot_ie", 1).as_bytes());
    assert!(error.to_string().contains("no setting was touched, and the file is kept"), "{error}");
    let text = error.readable().unwrap().to_string();
    for line in [scheduler, limit] {
        assert!(text.lines().any(|l| l == line), "no {line} in {text}");
    }
    assert!(text.contains(guest), "{text}");
    // In the order of a revert: tunables before their elevator, and files that change along last.
    let place = |what: &str| text.find(what).unwrap_or_else(|| panic!("no {what} in {text}"));
    assert!(place(limit) < place(scheduler) && place(scheduler) < place("/queue/nr_requests (changes"));
    // `status` prints the same.
    let shown = status(&lab.case.state, &lab.machine()).unwrap_err();
    assert_eq!(shown.readable().unwrap().to_string(), text);
    let error = lab.revert_of(&good.as_bytes()[..good.len() / 2]);
    let readable = error.readable().unwrap();
    let half = readable.to_string();
    assert!(half.contains(scheduler) && !half.contains("/queue/nr_requests (changes"), "{half}");
    assert!(
        readable.entries.len() > 3 && readable.entries.iter().all(|e| e.old.is_some() || e.new.is_some())
    );
}
