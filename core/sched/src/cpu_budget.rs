//! A budget of CPU time for a thread that serves several VMs.
//!
//! A real-time thread takes the CPU from every guest on it, so its time must be limited, and one VM
//! must not use up the time of all. Each period of P has a budget of B, as `cpu.max` of a cgroup
//! has. Half of B is divided into *slices*: one turn for each of the n members, and the rest by
//! weight, or equally where none has a weight. The other half is a *pool*, first come, first
//! served. A member is served while its slice, or the pool, covers a whole turn; its time is taken
//! from its slice, then from the pool. So
//!
//! - in a period the thread spends at most B, as long as no turn is longer than [`CpuLimit::turn`];
//!   the excess of a longer one is a debt of the member's next slice, of one slice at most;
//! - a member that uses no more than its slice less a turn is never throttled, whatever others do;
//! - a throttled member is served again in the next period, or in the one after it where it has a
//!   debt.
//!
//! Slices and pool are refilled at whole multiples of P of the caller's clock.

use oxc_index::{Idx, IndexVec};
use rtvirtio_units::Nanos;

use crate::id::VmId;

/// Limit of a thread's CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuLimit {
    /// CPU time in each period.
    pub budget: Nanos,
    /// Length of a period.
    pub period: Nanos,
    /// Longest time of a turn of one member.
    pub turn: Nanos,
}

/// Errors of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuLimitError {
    /// A budget of 0, or above the period.
    #[error("a budget of {budget} in {period}: it must be more than nothing, and no more than the period")]
    Range {
        /// Budget as given.
        budget: Nanos,
        /// Period as given.
        period: Nanos,
    },
    /// A budget below one turn of each member.
    #[error("{budget} in {period} are less than one turn ({turn}) of each of {members}")]
    TooSmall {
        /// Budget as given.
        budget: Nanos,
        /// Period as given.
        period: Nanos,
        /// Longest turn of a member.
        turn: Nanos,
        /// Number of members.
        members: usize,
    },
}

impl CpuLimit {
    /// Checks that each of `members` gets a turn in each period.
    pub fn check(&self, members: usize) -> Result<(), CpuLimitError> {
        let Self { budget, period, turn } = *self;
        if budget.0 == 0 || budget > period {
            return Err(CpuLimitError::Range { budget, period });
        }
        if turn.0.saturating_mul(members as u64) > budget.0 {
            return Err(CpuLimitError::TooSmall { budget, period, turn, members });
        }
        Ok(())
    }

    /// Slice of one of `members` with this weight, of `weights` in all.
    #[must_use]
    pub fn slice(&self, members: usize, weight: u64, weights: u64) -> Nanos {
        let members = members.max(1) as u64;
        let divided = (self.budget.0 / 2).saturating_sub(self.turn.0.saturating_mul(members));
        let (part, all) = if weights == 0 { (1, members) } else { (weight, weights) };
        let more = u128::from(divided) * u128::from(part) / u128::from(all.max(1));
        Nanos(self.turn.0.saturating_add(u64::try_from(more).unwrap_or(u64::MAX)))
    }
}

/// Remaining time in a period; a debt when negative.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    period: u64,
    ns: i64,
}

impl Left {
    /// Sets `full`, less the debt, at the first call in a period.
    fn refill(&mut self, period: u64, full: Nanos) {
        if period > self.period {
            *self = Self { period, ns: full.0 as i64 + self.ns.min(0) };
        }
    }

    /// Takes up to `ns` of the remaining time; returns the part that is not covered.
    fn take(&mut self, ns: u64) -> u64 {
        let there = (self.ns.max(0) as u64).min(ns);
        self.ns -= there as i64;
        ns - there
    }
}

/// State of a member, or a vacant place.
#[derive(Clone, Copy, Debug, Default)]
struct Member {
    is_there: bool,
    weight: u64,
    left: Left,
    throttled_since: Option<Nanos>,
    counters: CpuCounters,
}

/// CPU time used by a member, and its throttling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuCounters {
    /// CPU time used in all.
    pub used: Nanos,
    /// Number of times that the member was throttled.
    pub throttled: u64,
    /// Total time for which the member was throttled.
    pub throttled_time: Nanos,
}

/// State of a thread's budget.
#[derive(Clone, Debug)]
pub struct CpuBudget {
    limit: CpuLimit,
    members: IndexVec<VmId, Member>,
    there: usize,
    /// Sum of the members' weights.
    weights: u64,
    pool: Left,
}

impl CpuBudget {
    /// A budget for members of these weights, in the first places.
    #[must_use]
    pub fn new(limit: CpuLimit, weights: impl IntoIterator<Item = u64>) -> Self {
        let mut budget =
            Self { limit, members: IndexVec::new(), there: 0, weights: 0, pool: Left::default() };
        for (place, weight) in weights.into_iter().enumerate() {
            budget.attach(VmId::from_usize(place), weight);
        }
        budget
    }

    /// Adds a member in a place, replacing the present one.
    pub fn attach(&mut self, place: VmId, weight: u64) {
        if place >= self.members.next_idx() {
            self.members.resize(place.index() + 1, Member::default());
        }
        self.detach(place);
        self.there += 1;
        self.weights = self.weights.saturating_add(weight);
        self.members[place] = Member { is_there: true, weight, ..Member::default() };
    }

    /// Sets the weight of a member.
    pub fn set_weight(&mut self, place: VmId, weight: u64) {
        if let Some(member) = self.members.get_mut(place).filter(|member| member.is_there) {
            self.weights = self.weights.saturating_sub(member.weight).saturating_add(weight);
            member.weight = weight;
        }
    }

    /// Slice of a member in each period.
    #[must_use]
    pub fn slice(&self, place: VmId) -> Nanos {
        let weight = self.members.get(place).map_or(0, |member| member.weight);
        self.limit.slice(self.there, weight, self.weights)
    }

    /// Removes the member of a place.
    pub fn detach(&mut self, place: VmId) {
        let Some(member) = self.members.get_mut(place) else { return };
        self.there -= usize::from(member.is_there);
        self.weights = self.weights.saturating_sub(member.weight);
        *member = Member::default();
    }

    fn period(&self, now: Nanos) -> u64 {
        // 0 is before the first period, so that the first call refills.
        now.0 / self.limit.period.0.max(1) + 1
    }

    fn refill(&mut self, now: Nanos, place: VmId) {
        let (period, slice) = (self.period(now), self.slice(place));
        let turns = self.limit.turn.0.saturating_mul(self.there as u64);
        let divided = turns.max(self.limit.budget.0 / 2);
        self.pool.refill(period, Nanos(self.limit.budget.0.saturating_sub(divided)));
        if let Some(member) = self.members.get_mut(place) {
            member.left.refill(period, slice);
        }
    }

    /// Whether a member is served at `now`; counts its throttling.
    pub fn admits(&mut self, now: Nanos, place: VmId) -> bool {
        self.refill(now, place);
        let turn = self.limit.turn.0 as i64;
        let Some(member) = self.members.get_mut(place) else { return true };
        if member.left.ns >= turn || self.pool.ns >= turn {
            if let Some(since) = member.throttled_since.take() {
                member.counters.throttled_time.0 += now.0.saturating_sub(since.0);
            }
            return true;
        }
        if member.throttled_since.is_none() {
            member.throttled_since = Some(now);
            member.counters.throttled += 1;
        }
        false
    }

    /// Time at which a throttled member may be served again: the begin of the next period.
    #[must_use]
    pub fn next_period(&self, now: Nanos) -> Nanos {
        Nanos(self.period(now).saturating_mul(self.limit.period.0))
    }

    /// Charges CPU time to a member.
    pub fn charge(&mut self, now: Nanos, place: VmId, used: Nanos) {
        self.refill(now, place);
        let most = self.slice(place).0;
        let Some(member) = self.members.get_mut(place) else { return };
        member.counters.used.0 = member.counters.used.0.saturating_add(used.0);
        let rest = member.left.take(used.0);
        let debt = self.pool.take(rest).min(most);
        member.left.ns = member.left.ns.saturating_sub(debt as i64).max(-(most as i64));
    }

    /// Counters of a member.
    #[must_use]
    pub fn counters(&self, place: VmId) -> CpuCounters {
        self.members.get(place).map_or_else(CpuCounters::default, |member| member.counters)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn limit(budget: u64, turn: u64) -> CpuLimit {
        CpuLimit { budget: Nanos(budget), period: Nanos(10 * MS), turn: Nanos(turn) }
    }

    #[test]
    fn a_limit_covers_a_turn_of_each() {
        assert_eq!(limit(3 * MS, 100_000).check(30), Ok(()));
        let small = limit(3 * MS, 100_000).check(31);
        assert!(matches!(small, Err(CpuLimitError::TooSmall { members: 31, .. })), "{small:?}");
        assert!(matches!(limit(0, 1).check(1), Err(CpuLimitError::Range { .. })));
        assert!(matches!(limit(11 * MS, 1).check(1), Err(CpuLimitError::Range { .. })));
        assert_eq!(limit(3 * MS, 100_000).slice(3, 0, 0), Nanos(500_000));
        assert_eq!(limit(3 * MS, 100_000).slice(30, 5, 5), Nanos(100_000));
        // A turn of each, and the rest to the one with a weight.
        let mut budget = CpuBudget::new(limit(3 * MS, 100_000), [7, 0, 0]);
        assert_eq!([VmId(0), VmId(1)].map(|place| budget.slice(place)), [Nanos(1_300_000), Nanos(100_000)]);
        budget.set_weight(VmId(1), 7);
        assert_eq!([VmId(0), VmId(1)].map(|place| budget.slice(place)), [Nanos(700_000); 2]);
    }

    #[test]
    fn one_that_floods_is_throttled_until_the_next_period() {
        let mut budget = CpuBudget::new(limit(3 * MS, 100_000), [0, 0]);
        let mut turns = 0;
        while budget.admits(Nanos(5), VmId(0)) {
            budget.charge(Nanos(5), VmId(0), Nanos(100_000));
            turns += 1;
        }
        // Its slice of 750 us, and the pool of 1.5 ms, each down to the last whole turn.
        assert!((21..=22).contains(&turns), "{turns}");
        assert!(budget.admits(Nanos(5), VmId(1)), "the other one has its slice");
        assert_eq!(budget.next_period(Nanos(5)), Nanos(10 * MS));
        assert!(!budget.admits(Nanos(10 * MS - 1), VmId(0)));
        assert!(budget.admits(Nanos(10 * MS), VmId(0)));
        let seen = budget.counters(VmId(0));
        assert_eq!((seen.throttled, seen.throttled_time), (1, Nanos(10 * MS - 5)));
        assert_eq!(budget.counters(VmId(1)), CpuCounters::default());
    }

    /// A turn that takes too long is paid back within two periods.
    #[test]
    fn a_debt_is_paid_and_has_an_end() {
        let mut budget = CpuBudget::new(limit(3 * MS, 100_000), [0, 0]);
        assert!(budget.admits(Nanos(0), VmId(0)));
        budget.charge(Nanos(0), VmId(0), Nanos(60_000 * MS));
        assert!(!budget.admits(Nanos(9 * MS), VmId(0)));
        assert!(budget.admits(Nanos(10 * MS), VmId(0)), "the pool is there for it");
        budget.charge(Nanos(10 * MS), VmId(1), Nanos(3 * MS));
        assert!(!budget.admits(Nanos(10 * MS), VmId(0)), "its slice has paid the debt");
        assert!(budget.admits(Nanos(20 * MS), VmId(0)));
    }

    #[test]
    fn places_come_and_go() {
        let mut budget = CpuBudget::new(limit(MS, 100_000), [0]);
        budget.attach(VmId(1), 0);
        budget.charge(Nanos(0), VmId(1), Nanos(5 * MS));
        assert!(!budget.admits(Nanos(0), VmId(1)));
        budget.attach(VmId(1), 0);
        assert_eq!((budget.there, budget.counters(VmId(1))), (2, CpuCounters::default()));
        budget.detach(VmId(0));
        budget.detach(VmId(7));
        assert_eq!(budget.there, 1);
    }

    proptest! {
        /// For any requests: no period has more than the budget, and a member that stays within its
        /// slice is served whenever it asks.
        #[test]
        fn the_budget_holds_and_a_modest_member_is_served(
            members in 2usize..12,
            budget in MS..9 * MS,
            turn in 1_000u64..80_000,
            weight in 0u64..5,
            asks in prop::collection::vec((0u64..400_000, 1usize..12, 1u64..80_000), 1..400),
        ) {
            let limit = limit(budget, turn);
            prop_assert_eq!(limit.check(members), Ok(()));
            let mut state = CpuBudget::new(limit, (0..members).map(|i| weight * i as u64));
            let (mut now, mut period, mut spent, mut modest) = (0u64, 0, 0, 0);
            for (pause, who, took) in asks {
                now += pause;
                if now / (10 * MS) > period {
                    (period, spent, modest) = (now / (10 * MS), 0, 0);
                }
                let (who, took) = (1 + who % (members - 1), took.min(turn));
                // Greedy members ask until they are throttled.
                while state.admits(Nanos(now), VmId::from_usize(who)) {
                    state.charge(Nanos(now), VmId::from_usize(who), Nanos(took));
                    spent += took;
                    if took < turn { break; }
                }
                if modest + 2 * turn <= state.slice(VmId(0)).0 {
                    prop_assert!(state.admits(Nanos(now), VmId(0)), "{modest} of its slice are used");
                    state.charge(Nanos(now), VmId(0), Nanos(took));
                    (modest, spent) = (modest + took, spent + took);
                }
                prop_assert!(spent <= budget, "{spent} of {budget}");
            }
        }

        /// Turns of any length: excess over the budget is paid back, but for one slice of each.
        #[test]
        fn long_turns_are_paid_later(
            members in 1usize..6,
            asks in prop::collection::vec((0usize..6, 1u64..150_000), 1..3_000),
        ) {
            let limit = limit(2 * MS, 50_000);
            let mut state = CpuBudget::new(limit, vec![0; members]);
            let mut spent = 0;
            for (i, (who, took)) in asks.iter().enumerate() {
                let now = i as u64 * 100_000;
                if state.admits(Nanos(now), VmId::from_usize(who % members)) {
                    state.charge(Nanos(now), VmId::from_usize(who % members), Nanos(*took));
                    spent += took;
                }
                let periods = now / (10 * MS) + 1;
                let beyond = members as u64 * 150_000;
                prop_assert!(spent <= periods * 2 * MS + beyond, "{spent} in {periods} periods");
            }
        }
    }
}
