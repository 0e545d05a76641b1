use super::*;

#[test]
fn a_week_comes_to_rest_and_nothing_oscillates() {
    for seed in [1, 2, 3] {
        let week = simulate(seed, 7);
        assert!(week.causes > 800 && week.steps > 500, "{week:?}");
        assert_eq!((week.oscillating, week.restless, week.wrong_at_rest), (0, 0, 0), "{week:?}");
    }
    assert_eq!(simulate(1, 2), simulate(1, 2), "seeded");
}
