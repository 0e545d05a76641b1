//! Quantile regression forest: the whole conditional distribution from few rows.
//!
//! Trees are grown as in a random forest (Breiman, Machine Learning 45, 2001), each on a part of
//! the groups (measured runs) and with a random part of the features at each split. A new row falls
//! into one leaf of each tree; the training rows in those leaves, weighted by how few share their
//! leaf, are its neighbours, and their weighted quantiles are its quantiles (Meinshausen, Quantile
//! Regression Forests, Journal of Machine Learning Research 7, 2006). Widths follow by themselves:
//! where neighbours disagree, the quantiles are apart.
//!
//! Trees that did not see a row's group predict it *out of bag*: errors on unseen runs without
//! cross-validation, as conformal calibration needs them (Johansson, Bostrom, Lofstrom and
//! Linusson, Machine Learning 97, 2014).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Random, Rows};

mod grow;
#[cfg(test)]
mod tests;

use grow::Grower;

/// Format version of a serialised [`Forest`].
pub const SCHEMA: &str = "rtvirtio.forest.v1";
/// Most trees that [`Forest::check`] accepts.
pub const TREES_MAX: usize = 10_000;
/// Largest weight of a row that [`Forest::check`] accepts, and the inverse of the smallest: sums of
/// them stay finite.
const WEIGHT_MAX: f64 = 1e100;

/// A fitted quantile regression forest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forest {
    /// Format version, always [`SCHEMA`].
    pub schema: String,
    /// Smallest and largest value of each feature in the training rows.
    pub ranges: Vec<[f64; 2]>,
    /// Targets of the training rows, rising.
    pub targets: Vec<f64>,
    /// A second quantity of each row, in the same order, of which predictions give the mean.
    #[serde(alias = "companions")]
    pub secondary_targets: Vec<f64>,
    /// Weight of each row, in the same order.
    pub weights: Vec<f64>,
    /// Trees, each with one vote.
    pub trees: Vec<Tree>,
}

/// A regression tree. The first split is the root; a tree without splits is one leaf.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tree {
    /// Inner nodes, the root first.
    pub splits: Vec<Split>,
    /// Training rows in each leaf, as indices into [`Forest::targets`].
    pub leaves: Vec<Vec<u32>>,
}

/// An inner node: feature, limit, and the children for rows up to the limit and above it: a split's
/// index, which is larger than this one's, or `-1 - leaf`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Split(pub u16, pub f64, pub i32, pub i32);

/// Options of a fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForestOptions {
    /// Number of trees, at least 10.
    pub trees: usize,
    /// Fewest rows in a leaf, at least 1.
    pub leaf: usize,
    /// Share of the features that each split may choose from, above 0 and at most 1.
    pub features: f64,
    /// Share of the groups that each tree learns from, above 0 and below 1.
    pub share: f64,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Default for ForestOptions {
    fn default() -> Self {
        Self { trees: 150, leaf: 3, features: 0.4, share: 0.632, seed: 1 }
    }
}

/// Predictions for training rows by the trees that did not learn from them.
#[derive(Clone, Debug, PartialEq)]
pub struct OutOfBag {
    /// Quantiles at the levels asked for, for each row in the order given.
    pub quantiles: Vec<Vec<f64>>,
    /// Mean secondary target of each row.
    pub secondary_targets: Vec<f64>,
}

/// Buffer of predictions; it grows in the first call.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    weights: Vec<f64>,
}

/// Errors of fitting, reading or evaluating a forest.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ForestError {
    /// An option is outside its range.
    #[error("{0}")]
    BadOption(&'static str),
    /// Rows, groups and secondary targets do not match.
    #[error("{found} {what} for {rows} rows")]
    Length {
        /// Name of the list.
        what: &'static str,
        /// Length of the list.
        found: usize,
        /// Number of rows given.
        rows: usize,
    },
    /// Too few groups to leave some out.
    #[error("{groups} groups are too few for a forest: at least 4 are needed")]
    TooFewGroups {
        /// Number of different groups.
        groups: usize,
    },
    /// An input of another width, or with a NaN or infinite value in it.
    #[error("an input must be {width} finite numbers")]
    BadInput {
        /// Number of features of the forest.
        width: usize,
    },
    /// A value read from a file contradicts itself.
    #[error("the forest is damaged: {0}")]
    Damaged(&'static str),
}

impl Forest {
    /// Fits a forest. `groups` has a number for each row: rows of equal number (one measured run)
    /// are learned from together or not at all. `levels` are the quantiles wanted out of bag, 0
    /// to 1.
    ///
    /// # Errors
    /// [`ForestError`]: options out of range, lists that do not match, too few groups.
    pub fn fit(
        rows: &Rows,
        secondary_targets: &[f64],
        groups: &[usize],
        levels: &[f64],
        options: &ForestOptions,
    ) -> Result<(Self, OutOfBag), ForestError> {
        options.check()?;
        let n = rows.len();
        for (what, found) in [("group numbers", groups.len()), ("secondary targets", secondary_targets.len())]
        {
            if found != n {
                return Err(ForestError::Length { what, found, rows: n });
            }
        }
        let mut of_group: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        groups.iter().enumerate().for_each(|(i, g)| of_group.entry(*g).or_default().push(i));
        if of_group.len() < 4 {
            return Err(ForestError::TooFewGroups { groups: of_group.len() });
        }
        // Rank of each row by its target: leaves hold ranks, so that a sum over ranks is a
        // distribution function.
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| rows.y[*a].total_cmp(&rows.y[*b]).then(a.cmp(b)));
        let mut rank = vec![0u32; n];
        order.iter().enumerate().for_each(|(r, i)| rank[*i] = r as u32);
        let pick = |values: &[f64]| order.iter().map(|i| values[*i]).collect::<Vec<f64>>();
        let mut forest = Self {
            schema: SCHEMA.to_owned(),
            ranges: ranges(rows),
            targets: pick(&rows.y),
            secondary_targets: pick(secondary_targets),
            weights: pick(&rows.weight),
            trees: Vec::with_capacity(options.trees),
        };
        let mut random = Random::new(options.seed);
        let mut members: Vec<&Vec<usize>> = of_group.values().collect();
        let take = ((members.len() as f64 * options.share).round() as usize).clamp(1, members.len() - 1);
        let mut out_of_bag = vec![vec![0.0; n]; n];
        let mut scratch = Scratch::default();
        for _ in 0..options.trees {
            random.shuffle(&mut members);
            let (inside, outside) = members.split_at(take);
            let seen: Vec<usize> = inside.iter().flat_map(|g| g.iter().copied()).collect();
            let tree = Grower::new(rows, &rank, options, &mut random).grow(seen);
            for row in outside.iter().flat_map(|g| g.iter().copied()) {
                let leaf = tree.leaf(row_of(rows, row));
                forest.weigh_leaf(&tree, leaf, &mut out_of_bag[row]);
            }
            forest.trees.push(tree);
        }
        let mut report =
            OutOfBag { quantiles: Vec::with_capacity(n), secondary_targets: Vec::with_capacity(n) };
        for (row, weights) in out_of_bag.into_iter().enumerate() {
            scratch.weights = weights;
            if scratch.weights.iter().all(|w| *w == 0.0) {
                // No tree left this row out, which takes very few trees.
                forest.weigh(row_of(rows, row), &mut scratch)?;
            }
            let total: f64 = scratch.weights.iter().sum();
            let quantile = |q: &f64| forest.quantile_of(&scratch.weights, total, *q);
            report.quantiles.push(levels.iter().map(quantile).collect());
            report.secondary_targets.push(forest.secondary_of(&scratch.weights, total));
        }
        Ok((forest, report))
    }

    /// Checks a forest that came from a file.
    pub fn check(&self) -> Result<(), ForestError> {
        let bad = |what| Err(ForestError::Damaged(what));
        let n = self.targets.len();
        if self.schema != SCHEMA {
            return bad("it has another schema");
        }
        if self.trees.is_empty() || self.trees.len() > TREES_MAX {
            return bad("the number of its trees");
        }
        if self.secondary_targets.len() != n || self.weights.len() != n {
            return bad("its lists differ in length");
        }
        if !self.targets.iter().chain(&self.secondary_targets).all(|v| v.is_finite())
            || !self.weights.iter().all(|w| (1.0 / WEIGHT_MAX..=WEIGHT_MAX).contains(w))
            || self.targets.iter().any(|t| t.abs() > WEIGHT_MAX)
            || !self.ranges.iter().flatten().all(|v| v.is_finite())
        {
            return bad("an impossible number");
        }
        if self.targets.windows(2).any(|w| w[0] > w[1]) {
            return bad("its targets are not in order");
        }
        for tree in &self.trees {
            let child = |at: usize, c: i32| match usize::try_from(c) {
                Ok(split) => split > at && split < tree.splits.len(),
                Err(_) => leaf_index(c) < tree.leaves.len(),
            };
            let split = |(at, s): (usize, &Split)| {
                usize::from(s.0) < self.ranges.len() && s.1.is_finite() && child(at, s.2) && child(at, s.3)
            };
            if tree.leaves.is_empty() || !tree.splits.iter().enumerate().all(split) {
                return bad("a tree leads nowhere");
            }
            if tree.leaves.iter().any(|l| l.is_empty() || l.iter().any(|r| *r as usize >= n)) {
                return bad("a leaf without rows");
            }
        }
        Ok(())
    }

    /// The quantiles of a new row at `levels`, 0 to 1, into `out`, and the mean secondary target as
    /// the result.
    pub fn predict_with(
        &self,
        x: &[f64],
        levels: &[f64],
        scratch: &mut Scratch,
        out: &mut [f64],
    ) -> Result<f64, ForestError> {
        self.weigh(x, scratch)?;
        let weights = &scratch.weights;
        let total: f64 = weights.iter().sum();
        for (level, out) in levels.iter().zip(out) {
            *out = self.quantile_of(weights, total, *level);
        }
        Ok(self.secondary_of(weights, total))
    }

    /// Standard deviation of the trees' means: large where the forest is unsure. Not a confidence
    /// interval.
    pub fn spread(&self, x: &[f64]) -> Result<f64, ForestError> {
        self.accept(x)?;
        let means: Vec<f64> = self
            .trees
            .iter()
            .map(|tree| {
                let rows = &tree.leaves[tree.leaf(x)];
                let (sum, weight) = rows.iter().fold((0.0, 0.0), |(s, w), r| {
                    let (target, of_row) = (self.targets[*r as usize], self.weights[*r as usize]);
                    (s + target * of_row, w + of_row)
                });
                sum / weight
            })
            .collect();
        let mean = means.iter().sum::<f64>() / means.len() as f64;
        let squares: f64 = means.iter().map(|m| (m - mean) * (m - mean)).sum();
        Ok((squares / (means.len().max(2) - 1) as f64).sqrt())
    }

    /// Indices of features outside the range of the training rows.
    #[must_use]
    pub fn outside(&self, x: &[f64]) -> Vec<usize> {
        let holds = |(range, v): (&[f64; 2], &f64)| {
            let slack = 1e-9 * (range[1] - range[0]).abs().max(range[0].abs());
            *v >= range[0] - slack && *v <= range[1] + slack
        };
        self.ranges.iter().zip(x).enumerate().filter(|(_, pair)| !holds(*pair)).map(|(i, _)| i).collect()
    }

    fn accept(&self, x: &[f64]) -> Result<(), ForestError> {
        if x.len() == self.ranges.len() && x.iter().all(|v| v.is_finite()) {
            Ok(())
        } else {
            Err(ForestError::BadInput { width: self.ranges.len() })
        }
    }

    /// Weight of every training row as a neighbour of `x`.
    fn weigh(&self, x: &[f64], scratch: &mut Scratch) -> Result<(), ForestError> {
        self.accept(x)?;
        scratch.weights.clear();
        scratch.weights.resize(self.targets.len(), 0.0);
        for tree in &self.trees {
            self.weigh_leaf(tree, tree.leaf(x), &mut scratch.weights);
        }
        Ok(())
    }

    /// Adds one tree's vote, which the rows of the leaf share by weight.
    fn weigh_leaf(&self, tree: &Tree, leaf: usize, into: &mut [f64]) {
        let rows = &tree.leaves[leaf];
        let sum: f64 = rows.iter().map(|r| self.weights[*r as usize]).sum();
        for r in rows {
            into[*r as usize] += self.weights[*r as usize] / sum;
        }
    }

    /// The quantile at `level` of neighbours whose weights sum to `total`.
    fn quantile_of(&self, weights: &[f64], total: f64, level: f64) -> f64 {
        let wanted = level.clamp(0.0, 1.0) * total * (1.0 - 1e-12);
        let mut sum = 0.0;
        for (target, weight) in self.targets.iter().zip(weights) {
            sum += weight;
            if *weight > 0.0 && sum >= wanted {
                return *target;
            }
        }
        self.targets.last().copied().unwrap_or(0.0)
    }

    fn secondary_of(&self, weights: &[f64], total: f64) -> f64 {
        self.secondary_targets.iter().zip(weights).map(|(c, w)| c * w).sum::<f64>()
            / total.max(f64::MIN_POSITIVE)
    }
}

impl Tree {
    /// Index of the leaf of a row.
    fn leaf(&self, x: &[f64]) -> usize {
        let mut at = if self.splits.is_empty() { -1 } else { 0 };
        while let Ok(split) = usize::try_from(at) {
            let Split(feature, limit, below, above) = self.splits[split];
            at = if x[usize::from(feature)] <= limit { below } else { above };
        }
        leaf_index(at)
    }
}

/// Index of the leaf for a child's number below zero.
fn leaf_index(child: i32) -> usize {
    (-1 - i64::from(child)) as usize
}

fn row_of(rows: &Rows, i: usize) -> &[f64] {
    &rows.x[i * rows.width..(i + 1) * rows.width]
}

fn ranges(rows: &Rows) -> Vec<[f64; 2]> {
    let mut ranges = vec![[f64::INFINITY, f64::NEG_INFINITY]; rows.width];
    for row in rows.x.chunks_exact(rows.width.max(1)) {
        for (range, v) in ranges.iter_mut().zip(row) {
            *range = [range[0].min(*v), range[1].max(*v)];
        }
    }
    ranges
}

impl ForestOptions {
    fn check(&self) -> Result<(), ForestError> {
        if !(10..=TREES_MAX).contains(&self.trees) {
            return Err(ForestError::BadOption("a forest has 10 to 10000 trees"));
        }
        if self.leaf == 0 {
            return Err(ForestError::BadOption("a leaf has at least one row"));
        }
        if !(self.features > 0.0 && self.features <= 1.0) {
            return Err(ForestError::BadOption("the share of features is above 0 and at most 1"));
        }
        if !(self.share > 0.0 && self.share < 1.0) {
            return Err(ForestError::BadOption("the share of groups is above 0 and below 1"));
        }
        Ok(())
    }
}
