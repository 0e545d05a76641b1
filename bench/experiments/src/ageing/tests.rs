use super::*;

fn outcome(pattern: Pattern, days: u64) -> Outcome {
    run(pattern, &TwinProfile::built_in(TWIN).unwrap(), days, 1).unwrap()
}

#[test]
fn a_slower_device_is_followed_and_a_fixed_profile_is_not() {
    let of = outcome(Pattern::Step, 23);
    let [before, change, _] = of.phases;
    assert_eq!((before.broken_fixed, of.false_alarms, of.alarms), (0, 0, 1), "{of:?}");
    assert!(change.kept(false).unwrap() >= 0.99 && change.kept(true).unwrap() < 0.1, "{of:?}");
    assert!(of.longest_broken >= 1 && of.longest_broken <= FOLLOW as u64 + 2, "{of:?}");
}

#[test]
fn a_phase_without_windows_keeps_nothing_and_breaks_nothing() {
    assert_eq!(Phase::default().kept(false), None);
    assert_eq!((phase_of(Pattern::Noise, 9_999), phase_of(Pattern::Thermal, u64::MAX - 1)), (0, 1));
    let week = 27 * DAY;
    assert_eq!([week - 1, week].map(|number| phase_of(Pattern::Step, number)), [1, 2]);
}

#[test]
fn claims_are_of_the_worst_phase() {
    let phase = |broken, broken_fixed| Phase { windows: 100, broken, broken_fixed };
    let mut one = outcome(Pattern::Noise, 0);
    one.phases = [phase(0, 0), phase(2, 90), phase(1, 100)];
    let data = AgeingData {
        schema: AgeingData::SCHEMA.to_owned(),
        host: HostFacts { cpus: 1, ..HostFacts::default() },
        command: String::new(),
        generated: String::new(),
        days: 90,
        outcomes: vec![one],
    };
    let claims = data.claims();
    let of = |id: &str| claims.iter().find(|c| c.id == id).unwrap();
    assert!((of("drift.kept").value - 0.98).abs() < 1e-9 && !of("drift.kept").met);
    assert!(of("drift.kept_fixed").value.abs() < 1e-9 && !of("drift.kept_fixed").has_limit());
    assert_eq!(of("drift.kept").n, 300);
    assert!(data.report().is_ok());
}
