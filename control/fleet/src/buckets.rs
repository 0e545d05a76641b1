//! Hosts by how much of them is free.

/// Number of buckets: free amounts from 0 to 1000.
const BUCKETS: usize = 1001;
const WORDS: usize = BUCKETS.div_ceil(64);

/// Hosts by a free amount from 0 to 1000, changed in constant time.
#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    hosts: Vec<Vec<u32>>,
    /// Bitmap of the buckets that hold a host.
    used: [u64; WORDS],
}

impl Buckets {
    pub(crate) fn new() -> Self {
        Self { hosts: vec![Vec::new(); BUCKETS], used: [0; WORDS] }
    }

    /// Adds a host; returns its position in its bucket.
    pub(crate) fn insert(&mut self, host: u32, free: u32) -> u32 {
        let at = bucket(free);
        self.used[at / 64] |= 1 << (at % 64);
        self.hosts[at].push(host);
        // There are fewer hosts than u32 has numbers.
        (self.hosts[at].len() - 1) as u32
    }

    /// Removes the host at a position. Returns the host that is at this position now, if any.
    pub(crate) fn remove(&mut self, free: u32, position: u32) -> Option<u32> {
        let at = bucket(free);
        self.hosts[at].swap_remove(position as usize);
        if self.hosts[at].is_empty() {
            self.used[at / 64] &= !(1 << (at % 64));
        }
        self.hosts[at].get(position as usize).copied()
    }

    /// The least free amount that is at least `least` and that a host has, with one that has it.
    pub(crate) fn least(&self, least: u32) -> Option<(u32, u32)> {
        let from = usize::try_from(least).ok().filter(|l| *l < BUCKETS)?;
        let mut word = from / 64;
        let mut bits = self.used[word] & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.used.get(word)?;
        }
        let at = word * 64 + bits.trailing_zeros() as usize;
        Some((at as u32, *self.hosts[at].last()?))
    }

    /// The hosts with less than `below` free, those with most first.
    pub(crate) fn below(&self, below: u32) -> impl Iterator<Item = u32> + '_ {
        let end = usize::try_from(below).unwrap_or(BUCKETS).min(BUCKETS);
        self.hosts[..end].iter().rev().flatten().copied()
    }

    /// All hosts, those with most free first.
    pub(crate) fn most_first(&self) -> impl Iterator<Item = u32> + '_ {
        self.below(u32::MAX)
    }
}

fn bucket(free: u32) -> usize {
    (free as usize).min(BUCKETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_found_by_what_is_free() {
        let mut b = Buckets::new();
        assert_eq!(b.least(0), None);
        for (host, free) in [(0, 5), (1, 700), (2, 64), (3, 5), (4, 1000)] {
            b.insert(host, free);
        }
        assert_eq!(b.least(6), Some((64, 2)));
        assert_eq!(b.least(65), Some((700, 1)));
        assert_eq!(b.least(701), Some((1000, 4)));
        assert_eq!(b.least(1001), None);
        assert_eq!(b.below(700).collect::<Vec<_>>(), [2, 0, 3]);
        assert_eq!(b.most_first().next(), Some(4));
        // Host 3 takes the place of host 0.
        assert_eq!(b.remove(5, 0), Some(3));
        assert_eq!(b.remove(700, 0), None);
        assert_eq!(b.least(65), Some((1000, 4)));
        assert_eq!(b.below(64).collect::<Vec<_>>(), [3]);
    }
}
