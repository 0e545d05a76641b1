use rtvirtio_stats::Random;

use super::*;
use crate::Profile;
use crate::testkit::twin;

/// The twin with flushes, of 8 ms at most.
fn profiled() -> Profiled {
    Profiled::new(&Profile { sync: twin().write, ..twin() }).unwrap()
}

/// Reads and writes of a window that take `slow` times as long as profiled, apart from each other.
fn window(slow: [f64; 2]) -> AgeingWindow {
    let profiled = profiled();
    let service = profiled.service();
    let one = |alone: f64, slow: f64| Completed {
        n: 1_000,
        bytes: 1_000 * service.block.0,
        time_s: 1_000.0 * alone * slow,
    };
    let read = one(service.read.alone, slow[0]);
    let write = one(service.write.unwrap().alone, slow[1]);
    let time = read.time_s + write.time_s;
    AgeingWindow {
        seconds: WINDOW_S,
        read,
        write,
        busy_s: time,
        in_flight_s: time,
        standstill_s: Some(0.001),
        ..AgeingWindow::default()
    }
}

fn new() -> Ageing {
    Ageing::new(profiled())
}

fn see(ageing: &mut Ageing, windows: usize, window: AgeingWindow) {
    (0..windows).for_each(|_| ageing.see(&window));
}

#[test]
fn a_slower_device_is_found_in_the_declared_time_and_said() {
    let mut of = new();
    see(&mut of, 100, window([1.0, 1.0]));
    assert_eq!((of.state(), of.factor(), of.alarm()), (AgeingState::AsProfiled, 1.0, None));
    see(&mut of, FOLLOW - 1, window([2.0, 1.0]));
    assert_eq!(of.factor(), 1.0);
    of.see(&window([2.0, 1.0]));
    // 1.1 * 1.25^3 is 2.15, one level less 1.72.
    assert!((of.factor() - STEP.powi(3)).abs() < 1e-9, "{of:?}");
    of.see(&window([2.0, 1.0]));
    let AgeingState::Slower(changes) = of.state() else { panic!("{of:?}") };
    assert_eq!((changes.len(), changes[0].part, changes[0].since), (1, Part::Reads, 1));
    assert!(changes[0].evidence >= RUN_LENGTH);
    assert_eq!(of.alarm().unwrap(), "against its profile, reads take up to 2.1 times as long");
    assert!((of.ratio_of(Part::Reads).unwrap() - 2.0).abs() < 1e-9);
    // Further levels take as long, those between none.
    see(&mut of, FOLLOW, window([2.1, 5.0]));
    assert!((of.factor() - STEP.powi(7)).abs() < 1e-9, "{of:?}");
}

#[test]
fn a_level_is_lowered_after_a_long_time_without_need_only() {
    let mut of = new();
    see(&mut of, FOLLOW, window([2.0, 1.0]));
    let slow = of.factor();
    see(&mut of, LOWER_AFTER - 1, window([1.0, 1.0]));
    assert_eq!((slow, of.factor()), (STEP.powi(3), slow));
    of.see(&window([1.0, 1.0]));
    assert_eq!((of.factor(), of.alarm()), (1.0, None));
    // What comes every day stays.
    for _ in 0..20 {
        see(&mut of, 10, window([2.0, 1.0]));
        see(&mut of, 134, window([1.0, 1.0]));
    }
    assert_eq!(of.factor(), STEP.powi(3));
}

#[test]
fn a_factor_below_one_takes_long_evidence_of_both_directions() {
    let mut of = new();
    see(&mut of, LOWER_AFTER - 1, window([0.5, 0.5]));
    assert_eq!((of.factor(), of.state()), (1.0, AgeingState::AsProfiled));
    of.see(&window([0.5, 0.5]));
    assert!((of.factor() - STEP.powi(-3)).abs() < 1e-9, "{of:?}");
    assert!(matches!(of.state(), AgeingState::Faster(changes) if changes.len() == 2));
    let mut reads = new();
    let only = AgeingWindow { write: Completed::default(), ..window([0.5, 0.5]) };
    see(&mut reads, LOWER_AFTER, only);
    assert_eq!(reads.factor(), 1.0, "nothing is known of writes");
}

#[test]
fn windows_that_cannot_tell_are_counted_and_are_no_evidence() {
    let mut of = new();
    let few = AgeingWindow {
        read: Completed { n: 499, ..window([9.0, 1.0]).read },
        write: Completed::default(),
        standstill_s: None,
        ..window([1.0, 1.0])
    };
    see(&mut of, 50, few);
    // Requests that wait for each other take longer, whatever the device does.
    let mut waits = window([3.0, 3.0]);
    (waits.busy_s, waits.standstill_s) = (waits.in_flight_s / 3.0, None);
    see(&mut of, 60, waits);
    // As may those that come while the host stands still.
    let stalled = AgeingWindow { host_stalled_s: 20.0, standstill_s: None, ..window([1.5, 1.5]) };
    see(&mut of, 70, stalled);
    // And those that wait for flushes.
    let flushed = AgeingWindow { flushes: 100, flush_s: 10.0, standstill_s: None, ..window([1.5, 1.5]) };
    see(&mut of, 20, flushed);
    assert_eq!(of.uncounted(), Uncounted { few: 50, waited: 150 });
    assert_eq!((of.state(), of.factor()), (AgeingState::Unclear { windows: 0 }, 1.0));
    // Unless the device is slower even if they all waited.
    let mut slow = window([12.0, 1.0]);
    slow.busy_s = slow.in_flight_s / 2.0;
    see(&mut of, FOLLOW, slow);
    assert!(of.factor() > 4.0, "{of:?}");
}

#[test]
fn a_later_process_keeps_a_slower_device_and_not_a_faster_one() {
    let mut of = new();
    see(&mut of, FOLLOW, window([2.0, 1.0]));
    let later = Ageing::restored(profiled(), of.levels());
    assert_eq!((later.factor(), later.alarm()), (of.factor(), of.alarm()));
    let mut faster = new();
    see(&mut faster, LOWER_AFTER, window([0.5, 0.5]));
    assert!(faster.factor() < 1.0);
    assert_eq!(Ageing::restored(profiled(), faster.levels()).factor(), 1.0);
}

#[test]
fn long_standstills_are_a_change_of_their_own() {
    let mut of = new();
    let standstill = |s: f64| AgeingWindow { standstill_s: Some(s), ..window([1.0, 1.0]) };
    see(&mut of, 100, standstill(0.004));
    assert_eq!((of.alarm(), of.standstill()), (None, None));
    // One of two windows.
    for _ in 0..6 {
        of.see(&standstill(0.1));
        of.see(&standstill(0.001));
    }
    assert_eq!(of.factor(), 1.0);
    let longest = of.standstill().unwrap().as_secs_f64();
    assert!((0.1..0.14).contains(&longest), "{longest}");
    assert!(of.alarm().unwrap().contains("stands still for up to"), "{of:?}");
    // Without a measurement of flushes, one would be taken for a change.
    let mut unknown = Ageing::new(Profiled::new(&twin()).unwrap());
    see(&mut unknown, 100, standstill(0.1));
    assert_eq!((unknown.standstill(), unknown.alarm()), (None, None));
    // Shorter ones than profiled are no better device.
    see(&mut of, 2 * LOWER_AFTER, standstill(0.0));
    assert_eq!((of.factor_of(Part::Standstills), of.state()), (1.0, AgeingState::AsProfiled));
}

/// Half a year of windows with noise of 3 %, and now and then twice the time.
#[test]
fn noise_is_no_change() {
    for seed in 0..4 {
        let (mut of, mut random) = (new(), Random::new(seed));
        for _ in 0..26_000 {
            let outlier = if random.unit() < EXCEEDING / 5.0 { 2.0 } else { 1.0 };
            let noise = outlier * (0.03 * random.normal()).exp();
            of.see(&window([noise, noise]));
            assert_eq!(of.alarm(), None, "{seed}: {of:?}");
        }
        assert_eq!(of.factor(), 1.0);
    }
}
