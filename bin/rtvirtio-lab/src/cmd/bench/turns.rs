//! What is compared is measured in turn.

use rtvirtio_stats::Random;

use rtvirtio_console::{Bar, Ui};
use rtvirtio_workflow::Progress as _;

/// Measures every item once, in an order of chance, so that a host that becomes slower hits all alike; the same round has the same order.
/// What was measured comes in the order of `items`. `bar` goes on by one for each.
pub fn in_turn<I, T>(
    items: &[I],
    round: usize,
    bar: &mut Bar,
    ui: &Ui,
    mut measure: impl FnMut(&I) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<T>> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    Random::new(round as u64 + 1).shuffle(&mut order);
    let mut got: Vec<Option<T>> = items.iter().map(|_| None).collect();
    for i in order {
        ui.check_cancelled()?;
        got[i] = Some(measure(&items[i])?);
        bar.step();
    }
    Ok(got.into_iter().flatten().collect())
}
