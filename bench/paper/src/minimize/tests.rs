use super::*;

/// Options that find a minimum with six digits.
const EXACT: MinimizeOptions =
    MinimizeOptions { x_tolerance: 1e-7, f_tolerance: 1e-12, max_evaluations: 10_000, restarts: 3 };

fn rosenbrock(x: &[f64]) -> f64 {
    x.windows(2).map(|p| 100.0 * (p[1] - p[0] * p[0]).powi(2) + (1.0 - p[0]).powi(2)).sum()
}

fn search(objective: impl FnMut(&[f64]) -> f64, start: &[f64], bounds: &[(f64, f64)]) -> Minimum {
    nelder_mead(objective, start, bounds, &EXACT)
}

fn assert_near(point: &[f64], expected: &[f64], tolerance: f64) {
    let near = point.iter().zip(expected).all(|(a, b)| (a - b).abs() <= tolerance);
    assert!(near && point.len() == expected.len(), "{point:?} is not {expected:?}");
}

#[test]
fn rosenbrocks_valley_is_followed() {
    for start in [[-1.2, 1.0], [0.0, 0.0], [4.0, -3.0]] {
        let found = search(rosenbrock, &start, &[(-5.0, 5.0); 2]);
        assert!(found.converged && found.value < 1e-10, "{found:?}");
        assert_near(&found.point, &[1.0, 1.0], 1e-5);
        // Without contractions it takes far more.
        assert!(found.evaluations < 450, "{}", found.evaluations);
    }
    let found = search(rosenbrock, &[0.1, 0.5, 2.0, 0.1, -0.5], &[(-5.0, 5.0); 5]);
    assert!(found.converged, "{found:?}");
    assert_near(&found.point, &[1.0; 5], 1e-4);
}

#[test]
fn one_coordinate_is_enough() {
    let found = search(|x| (x[0] - 3.0).powi(2) + 7.0, &[0.0], &[(-10.0, 10.0)]);
    assert!(found.converged && (found.value - 7.0).abs() < 1e-10);
    assert_near(&found.point, &[3.0], 1e-4);
}

#[test]
fn bounds_are_never_left_and_the_edge_is_found() {
    let bounds = [(-2.0, 0.5), (0.0, 10.0), (-1.0, 1.0)];
    let mut outside = 0;
    let objective = |x: &[f64]| {
        outside += usize::from(x.iter().zip(&bounds).any(|(x, (low, high))| x < low || x > high));
        rosenbrock(&x[..2]) + (x[2] - 4.0).powi(2)
    };
    let found = search(objective, &[-9.0, 3.0, 0.0], &bounds);
    assert_eq!(outside, 0);
    assert!(found.converged);
    assert_near(&found.point, &[0.5, 0.25, 1.0], 1e-4);
}

#[test]
fn a_coordinate_may_be_fixed() {
    let found = search(rosenbrock, &[0.0, 0.3], &[(-2.0, 2.0), (0.25, 0.25)]);
    assert!(found.converged);
    let best =
        (-2000..=2000).map(|i| rosenbrock(&[f64::from(i) / 1000.0, 0.25])).fold(f64::INFINITY, f64::min);
    assert!(found.point[1] == 0.25 && found.value <= best, "{found:?} {best}");
    let fixed = search(|x| x[0] + x[1], &[0.0, 0.0], &[(2.0, 2.0), (3.0, 3.0)]);
    assert!(fixed.converged && fixed.value == 5.0);
}

#[test]
fn scales_may_differ_by_many_orders() {
    let objective = |x: &[f64]| (x[0] / 1e-6 - 1.0).powi(2) + (x[1] / 1e6 - 2.0).powi(2);
    let found = search(objective, &[5e-6, 1e5], &[(0.0, 1e-5), (0.0, 1e7)]);
    assert!(found.converged, "{found:?}");
    assert_near(&[found.point[0] * 1e6, found.point[1] / 1e6], &[1.0, 2.0], 1e-4);
}

#[test]
fn nan_counts_as_infinite() {
    let objective = |x: &[f64]| if x[0] < 0.5 { f64::NAN } else { (x[0] - 0.6).powi(2) + x[1] * x[1] };
    let found = search(objective, &[3.0, 2.0], &[(-5.0, 5.0); 2]);
    assert!(found.converged, "{found:?}");
    assert_near(&found.point, &[0.6, 0.0], 1e-4);
    let never = search(|_| f64::NAN, &[1.0, 2.0], &[(-5.0, 5.0); 2]);
    assert!(!never.converged && never.value == f64::INFINITY && never.evaluations <= 10_000);
}

#[test]
fn restarts_look_around_the_minimum_again() {
    // A pit one first size of the simplex away from the minimum, too narrow to be met on the way
    // there.
    let pit = |x: &[f64]| x[0] < -0.25 && x[1].abs() < 1e-3;
    let objective = |x: &[f64]| if pit(x) { -1.0 } else { x[0] * x[0] + x[1] * x[1] };
    let run = |restarts| {
        nelder_mead(objective, &[1.0, 1.0], &[(-2.0, 2.0); 2], &MinimizeOptions { restarts, ..EXACT })
    };
    let (once, again) = (run(0), run(2));
    assert!(once.converged && once.value.abs() < 1e-9, "{once:?}");
    assert!(again.converged && again.value == -1.0 && again.evaluations > once.evaluations, "{again:?}");
}

#[test]
fn the_budget_holds() {
    for max_evaluations in [7, 8, 20, 61, 100] {
        let options = MinimizeOptions { max_evaluations, ..EXACT };
        let mut calls = 0;
        let count = |x: &[f64]| {
            calls += 1;
            rosenbrock(x)
        };
        let found = nelder_mead(count, &[-1.2, 1.0], &[(-5.0, 5.0); 2], &options);
        assert_eq!(found.evaluations, calls);
        assert!(calls <= max_evaluations && !found.converged);
        assert_eq!(found.value, rosenbrock(&found.point));
        // The start comes back from the map with its last digits rounded.
        assert!(found.value <= rosenbrock(&[-1.2, 1.0]) + 1e-9);
    }
}
