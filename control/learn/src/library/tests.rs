//! Shares of similar devices, and of devices that differ.

use rtvirtio_units::{Bytes, Nanos};

use super::*;
use crate::synthetic::{profile as twin, quick, synthetic_runs};
use crate::train::FEWEST;

fn kind() -> DeviceKind {
    DeviceKind {
        model: "ACME FAST 1T".to_owned(),
        firmware: Some("EDA7".to_owned()),
        size: Bytes(1 << 40),
        rotational: false,
        logical_block: Bytes(512),
        physical_block: Bytes(4096),
        write_cache: Some("write back".to_owned()),
        cpus: 2,
        kernel: "6.1".to_owned(),
    }
}

/// Share of a host whose device's requests take `factor` times as long.
fn share(index: u32, of: u32, factor: f64) -> (PathBuf, Share) {
    let profile = Profile { identity: Some("serial-1234".to_owned()), ..twin().slowed(factor) };
    let share = Share::new(kind(), Shard::new(index, of).unwrap(), &profile, &[]);
    (PathBuf::from(format!("share-{index}.json")), share)
}

fn merged(shares: &[(PathBuf, Share)]) -> Result<Merged, LibraryError> {
    merge(shares, &quick(), "today")
}

#[test]
fn parts_of_a_sweep_come_as_text_or_from_a_job_array() {
    let shard: Shard = "3/8".parse().unwrap();
    assert_eq!((shard.index(), shard.total(), shard.to_string()), (3, 8, "3/8".to_owned()));
    for bad in ["0/8", "9/8", "3", "a/b", "3/0", "1/121", "-1/2", ""] {
        assert!(bad.parse::<Shard>().is_err(), "{bad}");
    }
    // Every condition belongs to one part.
    let parts: Vec<Shard> = (1..=7).map(|i| Shard::new(i, 7).unwrap()).collect();
    for i in 0..FEWEST {
        assert_eq!(parts.iter().filter(|p| p.has(i)).count(), 1, "{i}");
    }
    let slurm = |given: &[(&str, &str)]| {
        let find = |name: &str| given.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Shard::of_slurm(&find).map(|s| s.to_string())
    };
    let (id, count, min, step) =
        ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP");
    let array = |i: &str, from: &str, by: &str| slurm(&[(id, i), (count, "4"), (min, from), (step, by)]);
    assert_eq!(array("3", "1", "1").as_deref(), Ok("3/4"));
    assert_eq!(array("0", "0", "1").as_deref(), Ok("1/4"));
    assert_eq!(array("17", "11", "2").as_deref(), Ok("4/4"));
    // Gaps, as in --array=1,2,9: no constant step.
    assert!(array("9", "1", "1").is_err() && array("12", "11", "2").is_err());
    assert!(slurm(&[(id, "x"), (count, "4")]).is_err());
    assert!(slurm(&[]).unwrap_err().contains("--array=1-8"));
}

#[test]
fn devices_that_are_alike_become_one_entry() {
    let shares = [share(1, 4, 0.98), share(2, 4, 1.0), share(4, 4, 1.03)];
    let all = merged(&shares).unwrap();
    let (entry, one) = (&all.entry, &twin());
    assert_eq!((entry.shares, entry.runs, all.model.is_none()), (3, 0, true));
    assert_eq!(all.missing, [Shard::new(3, 4).unwrap()]);
    for (point, twin) in entry.profile.read.iter().zip(&one.read) {
        assert!((point.iops.0 / twin.iops.0 - 1.0).abs() < 1e-9, "the median");
        assert!(point.p9999 > twin.p9999 && point.max > twin.max, "the longest");
        assert_eq!(point.n, 3 * twin.n);
        assert!(point.spread >= 0.05 - 1e-3);
    }
    // Nothing that identifies a drive is in the file.
    let text = serde_json::to_string(&(entry, &shares[0].1)).unwrap();
    assert!(!text.contains("serial-1234") && text.contains("EDA7"), "{text}");
    assert_eq!(entry.profile.check(), Ok(()));
}

#[test]
fn runs_of_several_hosts_make_one_model() {
    // More than needed: runs of the same condition count once.
    let runs = synthetic_runs(FEWEST + 10, 0.3, 1);
    let (a, b) = runs.split_at(FEWEST / 2);
    let of = |i, runs: &[crate::dataset::Point]| {
        let one = share(i, 2, 1.0);
        (one.0, Share::new(kind(), Shard::new(i, 2).unwrap(), &twin(), runs))
    };
    let all = merged(&[of(1, a), of(2, b)]).unwrap();
    let model = all.model.as_ref().unwrap();
    assert_eq!((all.entry.runs, model.points), (FEWEST + 10, FEWEST + 10));
    assert!(all.missing.is_empty() && all.conditions >= FEWEST);
    // The entry fits a device of the kind under its own name, and no other kernel.
    let few =
        Profile { device: "sdb".to_owned(), identity: Some("x".to_owned()), ..all.entry.profile.clone() };
    let own = Confirmation::model(model, &few);
    assert!(own.fits(&few).is_ok());
    assert!(own.fits(&Profile { kernel: "9.9".to_owned(), ..few }).is_err());
    // One share alone has too few.
    let half = merged(&[of(1, a)]).unwrap();
    assert!(half.model.is_none() && half.conditions < FEWEST);
}

#[test]
fn what_does_not_belong_together_is_refused_with_the_reason() {
    assert!(matches!(merged(&[]), Err(LibraryError::Nothing)));
    let mut other = share(2, 2, 1.0);
    other.1.kind.firmware = Some("EDA8".to_owned());
    let refused = merged(&[share(1, 2, 1.0), other]).unwrap_err();
    assert!(matches!(&refused, LibraryError::OtherKind { what, .. } if what == "firmware EDA8, not EDA7"));
    let twice = merged(&[share(1, 2, 1.0), share(2, 2, 1.0), share(1, 2, 1.0)]).unwrap_err();
    assert!(matches!(twice, LibraryError::SameShard { shard, .. } if shard.to_string() == "1/2"));
    let mut no_writes = share(2, 2, 1.0);
    no_writes.1.profile.write.clear();
    let refused = merged(&[share(1, 2, 1.0), no_writes]).unwrap_err();
    assert!(matches!(&refused, LibraryError::OtherMeasurement { what, .. } if what.starts_with("writes")));
    // Of five shares one is half as fast and is named; of two either could be the wrong one.
    let worn = [share(1, 5, 1.0), share(2, 5, 1.01), share(3, 5, 2.0), share(4, 5, 0.99), share(5, 5, 1.0)];
    let refused = merged(&worn).unwrap_err();
    let LibraryError::Contradiction { path, others, what } = &refused else { panic!("{refused}") };
    assert_eq!((path.as_path(), others.as_str()), (Path::new("share-3.json"), "the other 4"));
    assert!(what.contains("at depth 1: "), "{what}");
    let refused = merged(&[share(1, 2, 1.0), share(2, 2, 2.0)]).unwrap_err();
    assert!(matches!(refused, LibraryError::Contradiction { .. }));
}

#[test]
fn a_few_points_confirm_a_device_or_say_what_differs() {
    let entry = merged(&[share(1, 2, 1.0), share(2, 2, 1.0)]).unwrap().entry;
    // Depths of a confirming measurement.
    let few = |factor: f64| {
        let mut p = Profile { device: "sdb".to_owned(), ..twin().slowed(factor) };
        for points in [&mut p.read, &mut p.write] {
            points.retain(|p| [1, 8, 32].contains(&p.depth));
        }
        Profile { sync: Vec::new(), read_bfq: Vec::new(), large: None, doubts: Vec::new(), ..p }
    };
    let close = few(1.04);
    let answer = confirm(&entry, &close);
    assert_eq!((&answer.differs, answer.points.len()), (&None, close.read.len() + close.write.len()));
    assert!((answer.largest() - 0.04).abs() < 1e-3, "{answer:?}");
    let profile = answer.profile(&entry, &close);
    assert_eq!((profile.device.as_str(), &profile.read), ("sdb", &entry.profile.read));
    assert!(profile.doubts[0].contains("2 other devices") && profile.doubts[0].contains("at most 4 % off"));
    // Writes that were not measured here are not reported as confirmed.
    let reads = Profile { write: Vec::new(), ..few(1.0) };
    let said = confirm(&entry, &reads).profile(&entry, &reads).doubts.remove(0);
    assert!(said.contains("its writes were not"), "{said}");
    let differs = |p: &Profile| confirm(&entry, p).differs.unwrap_or_default();
    assert!(differs(&few(1.8)).contains("throughput is -44 % off"), "{}", differs(&few(1.8)));
    let mut erasing = few(1.0);
    erasing.read[0].max = Nanos(entry.profile.read[0].max.0 * 3);
    assert!(differs(&erasing).contains("a request took"), "{}", differs(&erasing));
    let mut busy = few(1.0);
    busy.read[1].spread = 0.9;
    assert!(differs(&busy).contains("repetitions differ by 90 %"));
    let mut none = few(1.0);
    none.read.clear();
    none.write.clear();
    assert_eq!(differs(&none), "nothing was compared");
}

#[test]
fn a_library_is_a_directory_of_kinds() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let library = Library::new(dir.path());
    assert!(library.find(&kind()).unwrap().is_none());
    assert!(library.refuse_existing(&kind()).is_ok());
    let entry = merged(&[share(1, 1, 1.0)]).unwrap().entry;
    let path = library.entry_file(&kind());
    assert!(path.file_name().unwrap().to_string_lossy().starts_with("ACME-FAST-1T-"), "{path:?}");
    std::fs::write(&path, serde_json::to_vec(&entry).unwrap()).unwrap();
    assert_eq!(library.find(&kind()).unwrap().unwrap(), entry);
    assert!(matches!(library.refuse_existing(&kind()), Err(LibraryError::Exists { shares: 1, .. })));
    let other = DeviceKind { firmware: None, ..kind() };
    assert!(library.find(&other).unwrap().is_none());
    // An entry of another kind, of another version, and an invalid file.
    std::fs::copy(&path, library.entry_file(&other)).unwrap();
    assert!(library.find(&other).unwrap_err().to_string().contains("firmware EDA7, not none"));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("library.v1", "library.v9")).unwrap();
    assert!(library.find(&kind()).unwrap_err().to_string().contains("v9"));
    std::fs::write(&path, "half").unwrap();
    assert!(library.find(&kind()).unwrap_err().to_string().contains("it is not JSON"));
    // A share comes back as it was saved.
    let (_, share) = share(2, 3, 1.0);
    let path = dir.path().join("share.json");
    std::fs::write(&path, serde_json::to_vec(&share).unwrap()).unwrap();
    assert_eq!(Share::load(&path).unwrap(), share);
    std::fs::write(&path, serde_json::to_string(&share).unwrap().replace("\"2/3\"", "\"4/3\"")).unwrap();
    assert!(Share::load(&path).unwrap_err().to_string().contains("4 is none of 1 to 3"));
}

#[test]
fn a_share_without_any_measurement_is_refused() {
    let (path, mut empty) = share(2, 2, 1.0);
    empty.profile.read.clear();
    for shares in [vec![(path.clone(), empty.clone())], vec![share(1, 2, 1.0), (path.clone(), empty.clone())]]
    {
        let refused = merged(&shares);
        assert!(matches!(&refused, Err(LibraryError::NoMeasurement { path: of }) if *of == path));
    }
}
