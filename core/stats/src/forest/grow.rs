//! Growing one tree: at each node the split that lowers the weighted variance most (CART; Breiman,
//! Friedman, Olshen and Stone, 1984).

use super::{ForestOptions, Split, Tree, row_of};
use crate::{Random, Rows};

pub(super) struct Grower<'a> {
    rows: &'a Rows,
    rank: &'a [u32],
    options: &'a ForestOptions,
    random: &'a mut Random,
    features: Vec<usize>,
    /// Value and row of one feature at one node.
    sorted: Vec<(f64, usize)>,
    tree: Tree,
}

/// A node to be split: its rows, parent split, and whether it is the child below the limit.
type Node = (Vec<usize>, Option<(usize, bool)>);
/// A possible split: explained sum of squares, feature, limit.
type BestSplit = (f64, usize, f64);

impl<'a> Grower<'a> {
    pub(super) fn new(
        rows: &'a Rows,
        rank: &'a [u32],
        options: &'a ForestOptions,
        random: &'a mut Random,
    ) -> Self {
        let features = (0..rows.width).collect();
        Self { rows, rank, options, random, features, sorted: Vec::new(), tree: Tree::default() }
    }

    /// Grows a tree on these rows.
    pub(super) fn grow(mut self, seen: Vec<usize>) -> Tree {
        let mut todo: Vec<Node> = vec![(seen, None)];
        while let Some((node, parent)) = todo.pop() {
            let number = match self.best(&node) {
                Some((_, feature, limit)) => {
                    let at = self.tree.splits.len();
                    self.tree.splits.push(Split(feature as u16, limit, 0, 0));
                    let (below, above): (Vec<usize>, Vec<usize>) =
                        node.into_iter().partition(|r| row_of(self.rows, *r)[feature] <= limit);
                    todo.push((below, Some((at, true))));
                    todo.push((above, Some((at, false))));
                    at as i32
                }
                None => {
                    self.tree.leaves.push(node.iter().map(|r| self.rank[*r]).collect());
                    -(self.tree.leaves.len() as i32)
                }
            };
            if let Some((parent, below)) = parent {
                let split = &mut self.tree.splits[parent];
                if below {
                    split.2 = number;
                } else {
                    split.3 = number;
                }
            }
        }
        self.tree
    }

    fn best(&mut self, node: &[usize]) -> Option<BestSplit> {
        if node.len() < 2 * self.options.leaf {
            return None;
        }
        self.random.shuffle(&mut self.features);
        let wanted = (self.rows.width as f64 * self.options.features).ceil() as usize;
        let mut best: Option<BestSplit> = None;
        let mut tried = 0;
        for i in 0..self.features.len() {
            let feature = self.features[i];
            // A feature that is constant here does not count as tried.
            let Some(found) = self.split_by(feature, node) else { continue };
            if best.is_none_or(|b| found.0 > b.0) {
                best = Some(found);
            }
            tried += 1;
            if tried >= wanted {
                break;
            }
        }
        best
    }

    /// The best limit of a feature; `None` when no limit leaves enough rows on both sides.
    fn split_by(&mut self, feature: usize, node: &[usize]) -> Option<BestSplit> {
        let rows = self.rows;
        self.sorted.clear();
        self.sorted.extend(node.iter().map(|r| (row_of(rows, *r)[feature], *r)));
        self.sorted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let of = |(_, r): &(f64, usize)| (rows.y[*r] * rows.weight[*r], rows.weight[*r]);
        let (sum, weight) = self.sorted.iter().map(of).fold((0.0, 0.0), |(s, w), (y, v)| (s + y, w + v));
        let (mut below_sum, mut below_weight) = (0.0, 0.0);
        let mut best: Option<BestSplit> = None;
        for i in 0..self.sorted.len() - self.options.leaf {
            let (y, w) = of(&self.sorted[i]);
            below_sum += y;
            below_weight += w;
            let (here, next) = (self.sorted[i].0, self.sorted[i + 1].0);
            if i + 1 < self.options.leaf || here == next {
                continue;
            }
            let (above_sum, above_weight) = (sum - below_sum, weight - below_weight);
            if below_weight <= 0.0 || above_weight <= 0.0 {
                continue;
            }
            // Least squares: the remaining error falls by as much as this sum rises.
            let explained = below_sum * below_sum / below_weight + above_sum * above_sum / above_weight;
            if best.is_none_or(|b| explained > b.0) {
                best = Some((explained, feature, between(here, next)));
            }
        }
        best
    }
}

/// A limit with `low <= limit < high`, in few digits: most of a forest's file is limits.
fn between(low: f64, high: f64) -> f64 {
    let middle = 0.5 * (low + high);
    for digits in 3..8 {
        let short: f64 = format!("{middle:.digits$e}").parse().unwrap_or(middle);
        if short >= low && short < high {
            return short;
        }
    }
    if middle >= low && middle < high { middle } else { low }
}

#[cfg(test)]
mod tests {
    use super::between;

    #[test]
    fn a_limit_parts_its_neighbours() {
        for (low, high) in
            [(0.0, 1.0), (-3.0, 3.0), (1.0, 1.0 + f64::EPSILON), (1e-300, 2e-300), (0.1, 0.100_000_1)]
        {
            let limit = between(low, high);
            assert!(limit >= low && limit < high, "{low} {limit} {high}");
        }
    }
}
