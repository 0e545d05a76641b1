//! Folds for cross-validation that do not separate the rows of a group.

use std::collections::BTreeMap;

use rtvirtio_stats::Random;

use super::EnsembleError;

/// The fold of each row, in `0..folds`: rows of one group share a fold, every fold has a group.
///
/// The seed decides among groups of equal size; the largest groups go first, each to the fold with
/// the fewest rows so far (Graham's rule, SIAM Journal on Applied Mathematics 17, 1969), so folds
/// are of similar size.
///
/// # Errors
///
/// Fewer than 2 folds, or fewer groups than folds.
pub fn group_folds(groups: &[usize], folds: usize, seed: u64) -> Result<Vec<usize>, EnsembleError> {
    let mut sizes = BTreeMap::new();
    for group in groups {
        *sizes.entry(*group).or_insert(0usize) += 1;
    }
    if folds < 2 || sizes.len() < folds {
        return Err(EnsembleError::Folds { folds, groups: sizes.len() });
    }
    let mut order: Vec<(usize, usize)> = sizes.into_iter().collect();
    Random::new(seed).shuffle(&mut order);
    // A stable sort: the shuffled order stays among equals.
    order.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
    let mut filled = vec![0; folds];
    let mut fold_of = BTreeMap::new();
    for (group, size) in order {
        let fold = (0..folds).min_by_key(|fold| filled[*fold]).unwrap_or(0);
        filled[fold] += size;
        fold_of.insert(group, fold);
    }
    Ok(groups.iter().map(|group| fold_of[group]).collect())
}
