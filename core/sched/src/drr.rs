//! Sharing without deadlines: round robin by pieces, or by device time in proportion to weights.

use oxc_index::{Idx, IndexVec, index_vec};

use crate::active::ActiveSet;
use crate::id::VmId;

/// Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995). Plain round robin by data quantum
/// (the I/O-domain paper, section III-C) is the case of one piece a turn.
#[derive(Clone, Debug)]
pub struct DeficitRoundRobin {
    /// Device time in ns that each VM gets in a turn.
    quanta: IndexVec<VmId, u64>,
    /// Unused device time of each VM's turns, ns.
    deficits: IndexVec<VmId, u64>,
    current: VmId,
    /// Whether the VM at `current` has received its quantum of this turn.
    replenished: bool,
    /// Whether pieces, not time, are shared.
    per_piece: bool,
}

/// Result of a search for the next VM; [`DeficitRoundRobin::commit`] applies it.
#[derive(Debug)]
pub struct Round {
    /// Each VM that was visited, with its deficit afterwards.
    visited: Vec<(VmId, u64)>,
    current: VmId,
    replenished: bool,
}

impl Default for Round {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl Round {
    /// Room for the search among `n` VMs, so that it does not allocate.
    pub fn with_capacity(n: usize) -> Self {
        Self { visited: Vec::with_capacity(n + 1), current: VmId(0), replenished: false }
    }

    /// Room for the search among `n` VMs.
    pub fn reserve(&mut self, n: usize) {
        self.visited.reserve((n + 1).saturating_sub(self.visited.len()));
    }
}

impl DeficitRoundRobin {
    /// Round robin with one piece a turn for each of `n` VMs.
    pub fn per_piece(n: usize) -> Self {
        Self {
            quanta: index_vec![1; n],
            deficits: index_vec![0; n],
            current: VmId(0),
            replenished: false,
            per_piece: true,
        }
    }

    /// Round robin of device time by weights. `max_cost` is the most that one piece costs, in ns:
    /// the smallest quantum is that, so that each VM is served in every round.
    pub fn weighted(weights: &[u32], max_cost: u64) -> Self {
        let mut drr = Self { per_piece: false, ..Self::per_piece(weights.len()) };
        drr.set_weights(weights, max_cost);
        drr
    }

    /// Sets the weights; deficits stay.
    pub fn set_weights(&mut self, weights: &[u32], max_cost: u64) {
        if self.per_piece {
            return;
        }
        let lightest = u128::from(weights.iter().copied().min().unwrap_or(1).max(1));
        for (quantum, weight) in self.quanta.iter_mut().zip(weights) {
            let exact = u128::from(max_cost.max(1)) * u128::from((*weight).max(1)) / lightest;
            *quantum = u64::try_from(exact).unwrap_or(u64::MAX / 2).min(u64::MAX / 2);
        }
    }

    /// Resets a place for another VM, one of the known places or the next. The VM has no deficit,
    /// and no quantum until [`DeficitRoundRobin::set_weights`].
    pub fn replace(&mut self, vm: VmId) {
        if vm == self.quanta.next_idx() {
            self.quanta.push(1);
            self.deficits.push(0);
        } else if let Some(deficit) = self.deficits.get_mut(vm) {
            *deficit = 0;
        }
    }

    /// Records that a VM has no more requests: it accumulates no deficit, and its turn ends.
    pub fn on_idle(&mut self, vm: VmId) {
        if let Some(deficit) = self.deficits.get_mut(vm) {
            *deficit = 0;
        }
        if self.current == vm {
            self.current = self.after(vm);
            self.replenished = false;
        }
    }

    /// The place whose turn follows that of `vm`.
    fn after(&self, vm: VmId) -> VmId {
        VmId::from_usize((vm.index() + 1) % self.quanta.len().max(1))
    }

    /// Finds the VM that is served next, among those with requests. `cost` returns the cost of a
    /// VM's next piece in ns, `None` for a VM whose requests may not go. Nothing changes until
    /// [`DeficitRoundRobin::commit`].
    pub fn peek(
        &self,
        active: &ActiveSet,
        round: &mut Round,
        mut cost: impl FnMut(VmId) -> Option<u64>,
    ) -> Option<VmId> {
        let n = active.len();
        round.visited.clear();
        (round.current, round.replenished) = (self.current, self.replenished);
        // After n + 1 visits each VM was seen with a fresh quantum, which covers any piece.
        let visits = if n == 0 { 0 } else { n + 1 };
        for visit in 0..visits {
            let vm = active.next(round.current).filter(|vm| vm.index() < self.quanta.len())?;
            if vm != round.current {
                (round.current, round.replenished) = (vm, false);
            }
            let mut deficit = if visit == n { round.visited[0].1 } else { self.deficits[vm] };
            let mut served = false;
            match cost(vm) {
                // A VM that may not go accumulates no deficit.
                None => deficit = 0,
                Some(cost) => {
                    let cost = if self.per_piece { 1 } else { cost };
                    if !round.replenished {
                        round.replenished = true;
                        deficit += self.quanta[vm];
                    }
                    if deficit >= cost {
                        deficit -= cost;
                        served = true;
                    }
                }
            }
            round.visited.push((vm, deficit));
            if served {
                return Some(vm);
            }
            round.current = self.after(vm);
            round.replenished = false;
        }
        None
    }

    /// Applies the deficits and the turn of a search, also of one that found no VM.
    pub fn commit(&mut self, round: &Round) {
        for (vm, deficit) in &round.visited {
            self.deficits[*vm] = *deficit;
        }
        (self.current, self.replenished) = (round.current, round.replenished);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next VM among all, each with requests or idle.
    fn next(drr: &mut DeficitRoundRobin, mut cost: impl FnMut(VmId) -> Option<u64>) -> Option<VmId> {
        let (mut active, mut round) = (ActiveSet::default(), Round::default());
        active.reserve(drr.quanta.len());
        for vm in drr.quanta.indices() {
            let has_requests = cost(vm).is_some();
            active.set(vm, has_requests);
            if !has_requests {
                drr.on_idle(vm);
            }
        }
        let vm = drr.peek(&active, &mut round, cost);
        drr.commit(&round);
        vm
    }

    fn served(drr: &mut DeficitRoundRobin, costs: &[Option<u64>], n: usize) -> Vec<u64> {
        let mut time = vec![0; costs.len()];
        for _ in 0..n {
            let Some(vm) = next(drr, |vm| costs[vm.index()]) else { break };
            time[vm.index()] += costs[vm.index()].unwrap();
        }
        time
    }

    #[test]
    fn pieces_are_shared_whatever_they_cost() {
        let mut drr = DeficitRoundRobin::per_piece(3);
        let time = served(&mut drr, &[Some(10), Some(100), None], 1_000);
        assert_eq!(time, [5_000, 50_000, 0]);
    }

    #[test]
    fn time_is_shared_by_weight() {
        let mut drr = DeficitRoundRobin::weighted(&[100, 300, 200], 100);
        let time = served(&mut drr, &[Some(100), Some(30), Some(64)], 100_000);
        let total: u64 = time.iter().sum();
        for (got, share) in time.iter().zip([1.0 / 6.0, 0.5, 1.0 / 3.0]) {
            let got = *got as f64 / total as f64;
            assert!((got - share).abs() < 0.001, "{got} of {share}");
        }
    }

    #[test]
    fn an_idle_vm_accumulates_no_deficit() {
        let mut drr = DeficitRoundRobin::weighted(&[1, 1], 100);
        // 40 of its quantum of 100 are left after the first piece; then it is idle.
        assert_eq!(next(&mut drr, |_| Some(60)), Some(VmId(0)));
        assert_eq!(next(&mut drr, |vm| (vm == VmId(1)).then_some(100)), Some(VmId(1)));
        assert_eq!(next(&mut drr, |vm| (vm == VmId(1)).then_some(100)), Some(VmId(1)));
        // With the 40 it could submit two pieces of 70 in its next turn.
        assert_eq!(next(&mut drr, |_| Some(70)), Some(VmId(0)));
        assert_eq!(next(&mut drr, |_| Some(70)), Some(VmId(1)));
    }

    #[test]
    fn a_search_without_a_result_ends() {
        assert_eq!(next(&mut DeficitRoundRobin::weighted(&[1, 1], 10), |_| None), None);
        assert_eq!(next(&mut DeficitRoundRobin::per_piece(0), |_| Some(1)), None);
    }

    #[test]
    fn a_peek_changes_nothing() {
        let drr = DeficitRoundRobin::weighted(&[1, 2], 100);
        let (mut active, mut round) = (ActiveSet::default(), Round::with_capacity(2));
        active.reserve(2);
        active.set(VmId(0), true);
        active.set(VmId(1), true);
        for _ in 0..3 {
            assert_eq!(drr.peek(&active, &mut round, |_| Some(100)), Some(VmId(0)));
        }
    }
}
