//! A fleet file beside a spec and a profile that it may name: refused with a reason, or hosts and
//! contracts that refer to what exists, each name once.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

use rtvirtio_fleet::{Fleet, assess, load};

/// Hosts and contracts up to which a fleet is assessed too: more take minutes.
const MAX_ASSESSED: usize = 40;
/// Longest reason of a refusal.
const MAX_REASON: usize = 256 << 10;

/// A directory with `disk.json` and `vms.toml`, for the whole process.
fn directory() -> &'static Path {
    static DIRECTORY: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIRECTORY
        .get_or_init(|| {
            let dir = tempfile::tempdir().expect("a directory");
            let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("a file");
            put("disk.json", include_str!("../../control/learn/data/qlc-nvme.profile.json"));
            put("vms.toml", include_str!("../../examples/flood.toml"));
            dir
        })
        .path()
}

/// Reads a fleet, and assesses a small one.
///
/// # Panics
/// When a refusal has no reason, or an accepted fleet refers to a class, kind or host that it does
/// not have, or has a name twice.
pub fn play(data: &[u8]) {
    let path = directory().join("fleet.toml");
    std::fs::write(&path, data).expect("a file");
    match load(&path) {
        Err(e) => {
            let reason = e.to_string();
            assert!((1..=MAX_REASON).contains(&reason.len()), "{} bytes", reason.len());
        }
        Ok(fleet) => check(&fleet),
    }
}

fn check(fleet: &Fleet) {
    assert_eq!(fleet.classes.len(), fleet.class_names.len());
    let mut names = BTreeSet::new();
    for host in &fleet.hosts {
        assert!(host.class < fleet.classes.len() && names.insert(&host.name), "{host:?}");
    }
    names.clear();
    for contract in &fleet.contracts {
        assert!(contract.kind < fleet.kinds.len() && names.insert(&contract.name), "{contract:?}");
        assert!(contract.host.is_none_or(|host| host < fleet.hosts.len()), "{contract:?}");
    }
    if fleet.hosts.len() + fleet.contracts.len() <= MAX_ASSESSED {
        let assessment = assess(fleet, &|| false);
        assert!(!serde_json::to_string(&assessment).expect("JSON").is_empty());
    }
}
