//! Whose turn it is, when nobody has a deadline: round robin by pieces, or by device time in proportion to weights.

/// Turns among VMs: deficit round robin (Shreedhar and Varghese, SIGCOMM 1995), of which plain round robin by data quantum (the I/O-domain paper, section III-C) is the
/// case of one piece a turn.
#[derive(Clone, Debug)]
pub struct Turns {
    /// Device time in ns that each VM gets in a turn.
    shares: Vec<u64>,
    /// What is left of it.
    left: Vec<u64>,
    at: usize,
    /// The VM at `at` has had its share of this turn.
    begun: bool,
    /// Pieces, not time, are shared.
    by_piece: bool,
}

impl Turns {
    /// One piece a turn for each of `n` VMs.
    pub fn by_piece(n: usize) -> Self {
        Self { shares: vec![1; n], left: vec![0; n], at: 0, begun: false, by_piece: true }
    }

    /// Device time by weights. `most` is what one piece costs at most: the smallest share is that, so that each VM is served in every round.
    pub fn by_weight(weights: &[u32], most: u64) -> Self {
        let mut turns = Self { by_piece: false, ..Self::by_piece(weights.len()) };
        turns.set_weights(weights, most);
        turns
    }

    /// Other weights; what is left of the running turns stays.
    pub fn set_weights(&mut self, weights: &[u32], most: u64) {
        if self.by_piece {
            return;
        }
        let least = u128::from(weights.iter().copied().min().unwrap_or(1).max(1));
        for (share, weight) in self.shares.iter_mut().zip(weights) {
            let exact = u128::from(most.max(1)) * u128::from((*weight).max(1)) / least;
            *share = u64::try_from(exact).unwrap_or(u64::MAX / 2).min(u64::MAX / 2);
        }
    }

    /// The VM that is next. `cost` tells what the next piece of a VM costs, and `None` of one that has nothing to give now.
    pub fn next(&mut self, mut cost: impl FnMut(usize) -> Option<u64>) -> Option<usize> {
        let n = self.shares.len();
        // In n + 1 steps everybody is seen with a fresh share, which covers any piece.
        let steps = if n == 0 { 0 } else { n + 1 };
        for _ in 0..steps {
            match cost(self.at) {
                // Who has nothing to give saves nothing up.
                None => self.left[self.at] = 0,
                Some(cost) => {
                    let cost = if self.by_piece { 1 } else { cost };
                    if !self.begun {
                        self.begun = true;
                        self.left[self.at] += self.shares[self.at];
                    }
                    if self.left[self.at] >= cost {
                        self.left[self.at] -= cost;
                        return Some(self.at);
                    }
                }
            }
            self.at = (self.at + 1) % n;
            self.begun = false;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(turns: &mut Turns, costs: &[Option<u64>], n: usize) -> Vec<u64> {
        let mut time = vec![0; costs.len()];
        for _ in 0..n {
            let Some(i) = turns.next(|i| costs[i]) else { break };
            time[i] += costs[i].unwrap();
        }
        time
    }

    #[test]
    fn pieces_are_shared_whatever_they_cost() {
        let mut turns = Turns::by_piece(3);
        let time = served(&mut turns, &[Some(10), Some(100), None], 1_000);
        assert_eq!(time, [5_000, 50_000, 0]);
    }

    #[test]
    fn time_is_shared_by_weight() {
        let mut turns = Turns::by_weight(&[100, 300, 200], 100);
        let time = served(&mut turns, &[Some(100), Some(30), Some(64)], 100_000);
        let total: u64 = time.iter().sum();
        for (got, share) in time.iter().zip([1.0 / 6.0, 0.5, 1.0 / 3.0]) {
            let got = *got as f64 / total as f64;
            assert!((got - share).abs() < 0.001, "{got} of {share}");
        }
    }

    #[test]
    fn who_has_nothing_to_give_saves_nothing_up() {
        let mut turns = Turns::by_weight(&[1, 1], 100);
        // 40 of its share of 100 are left after the first; then it has nothing, while the other is served.
        assert_eq!(turns.next(|_| Some(60)), Some(0));
        assert_eq!(turns.next(|i| (i == 1).then_some(100)), Some(1));
        assert_eq!(turns.next(|i| (i == 1).then_some(100)), Some(1));
        // With the 40 it could give two of 70 in its next turn.
        assert_eq!(turns.next(|_| Some(70)), Some(0));
        assert_eq!(turns.next(|_| Some(70)), Some(1));
    }

    #[test]
    fn nothing_to_give_ends() {
        assert_eq!(Turns::by_weight(&[1, 1], 10).next(|_| None), None);
        assert_eq!(Turns::by_piece(0).next(|_| Some(1)), None);
    }
}
