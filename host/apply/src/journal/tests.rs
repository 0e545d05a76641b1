use rtvirtio_kernel::Root;

use super::*;
use crate::target::Form;

fn entry(id: usize, created_by: Option<usize>) -> Entry {
    Entry {
        id,
        knob: format!("knob {id}"),
        target: Target::host(format!("/sys/block/loop{id}/queue/scheduler"), Form::Elevator),
        old: Some("none".to_owned()),
        new: Some("bfq".to_owned()),
        also_ours: Vec::new(),
        levels: Vec::new(),
        created_by,
        changed_by: None,
        identity: Some(4711),
        unsettled: false,
    }
}

fn journal(entries: Vec<Entry>) -> Journal {
    Journal {
        version: "0.1.0".to_owned(),
        boot_id: "7c0ef8a8".to_owned(),
        pid: 1,
        complete: true,
        entries,
        ..Journal::default()
    }
}

#[test]
fn what_is_written_is_read() {
    let journal = journal(vec![entry(0, None), entry(1, Some(0))]);
    let bytes = journal.encode().unwrap();
    assert_eq!(Journal::decode(&bytes).unwrap(), journal);
    // The first line is one, and JSON, and so is the rest.
    let text = String::from_utf8(bytes).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    let first: serde_json::Value = serde_json::from_str(first).unwrap();
    assert_eq!(first["schema"], JOURNAL_SCHEMA);
    assert_eq!(first["sha256"].as_str().unwrap().len(), 64);
    assert!(serde_json::from_str::<serde_json::Value>(rest).unwrap().is_object());
}

/// Journals of earlier versions name some fields otherwise.
#[test]
fn a_journal_with_older_names_is_read() {
    let journal = Journal { leftover: true, ..journal(vec![entry(0, None)]) };
    let text = serde_json::to_string(&journal).unwrap();
    let older = text.replace("\"also_ours\"", "\"passing\"").replace("\"leftover\"", "\"rest\"");
    assert!(older.contains("passing") && older.contains("rest"));
    assert_eq!(serde_json::from_str::<Journal>(&older).unwrap(), journal);
}

#[test]
fn every_bit_matters() {
    let bytes = journal(vec![entry(0, None)]).encode().unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let result = Journal::decode(&damaged);
        assert!(matches!(result, Err(Unusable::Damaged(_))), "bit {bit}: {result:?}");
    }
}

#[test]
fn a_reference_that_leads_nowhere_is_refused() {
    let bytes = journal(vec![entry(0, Some(99))]).encode().unwrap();
    let Err(Unusable::Damaged(why)) = Journal::decode(&bytes) else { panic!("accepted") };
    assert!(why.contains("refers to entry 99, which is missing"), "{why}");
}

#[test]
fn another_version_is_reported_from_damage() {
    let other = |text: &str| Journal::decode(text.as_bytes()).unwrap_err();
    let v1 = "{\n  \"schema\": \"rtvirtio.journal.v1\",\n  \"entries\": []\n}\n";
    assert_eq!(other(v1), Unusable::Other("rtvirtio.journal.v1".to_owned()));
    assert_eq!(
        other("{\"schema\":\"rtvirtio.journal.v3\",\"sha256\":\"00\"}\n{}\n"),
        Unusable::Other("rtvirtio.journal.v3".to_owned())
    );
    // What a terminal could take for a command is escaped.
    let hidden = "{\"schema\":\"rtvirtio.journal.v\\u001b[2J\",\"sha256\":\"00\"}\n{}\n";
    assert_eq!(other(hidden), Unusable::Other("rtvirtio.journal.v\\u{1b}[2J".to_owned()));
    let body = "{\"\\u001b[2J\":1}\n";
    let Unusable::Damaged(why) = other(&format!("{}{body}", header(body.as_bytes()))) else {
        panic!("taken")
    };
    assert!(why.contains("unknown field `\\u{1b}[2J`"), "{why}");
    for text in ["", "\n", "{}", "[]", "{\"schema\":\"elsewhere\"}\n", "{\"schema\":7}"] {
        assert!(matches!(other(text), Unusable::Damaged(_)), "{text}");
    }
}

/// A VM may keep threads coming for hours: what its journal has of ended ones must not grow on.
#[test]
fn a_journal_in_memory_is_read_again_once_it_is_old() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let random = dir.path().join("proc/sys/kernel/random");
    std::fs::create_dir_all(&random).unwrap();
    std::fs::write(random.join("boot_id"), "7c0ef8a8\n").unwrap();
    let root = Root::new(dir.path());
    let machine = Machine::new(&root, &crate::machine::NoGuests);
    let state = StateDir::open_or_create(dir.path().join("state")).unwrap();
    store(&state, &journal(vec![entry(0, None)])).unwrap();
    let mut known = KnownJournal::default();
    let (first, read) = known.take(&state, &machine).unwrap();
    assert_eq!(read, None);
    known.keep(&state, first.clone(), read);
    let (again, read) = known.take(&state, &machine).unwrap();
    assert!(read.is_some() && again == first);
    known.keep(&state, again, read);
    known.age();
    let (_, read) = known.take(&state, &machine).unwrap();
    assert_eq!(read, None, "from the file");
}
