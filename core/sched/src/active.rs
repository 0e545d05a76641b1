//! Set of the VMs that have requests queued, so that a search costs as much as there are of them,
//! however many others are idle.

use oxc_index::Idx;

use crate::id::VmId;

/// A set of VMs, one bit each.
#[derive(Clone, Debug, Default)]
pub struct ActiveSet {
    words: Vec<u64>,
    len: usize,
}

impl ActiveSet {
    /// Room for the first `n` VMs.
    pub fn reserve(&mut self, n: usize) {
        let words = n.div_ceil(64).max(self.words.len());
        self.words.resize(words, 0);
    }

    /// Adds or removes a VM, for which there is room.
    pub fn set(&mut self, vm: VmId, is_active: bool) {
        let index = vm.index();
        let Some(word) = self.words.get_mut(index / 64) else { return };
        let bit = 1 << (index % 64);
        if is_active == (*word & bit != 0) {
            return;
        }
        *word ^= bit;
        self.len = if is_active { self.len + 1 } else { self.len - 1 };
    }

    /// Number of VMs in the set.
    pub fn len(&self) -> usize {
        self.len
    }

    /// All VMs, in order.
    pub fn iter(&self) -> impl Iterator<Item = VmId> + '_ {
        self.words.iter().enumerate().flat_map(|(i, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let bit = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                Some(VmId((i * 64 + bit) as u16))
            })
        })
    }

    /// The first VM from `from` on, or the first of all where there is none; `None` when the set
    /// is empty.
    pub fn next(&self, from: VmId) -> Option<VmId> {
        let from = from.index();
        let first = from / 64;
        let here = self.words.get(first).map_or(0, |word| word & (u64::MAX << (from % 64)));
        if here != 0 {
            return Some(VmId((first * 64 + here.trailing_zeros() as usize) as u16));
        }
        let later = self.words.iter().enumerate().skip(first + 1).find(|(_, word)| **word != 0);
        let found = later.or_else(|| self.words.iter().enumerate().find(|(_, word)| **word != 0));
        found.map(|(i, word)| VmId((i * 64 + word.trailing_zeros() as usize) as u16))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compared with a list of flags.
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((0usize..200, any::<bool>()), 0..100), from in 0usize..210) {
            let (mut set, mut flags) = (ActiveSet::default(), vec![false; 200]);
            set.reserve(200);
            for (index, is_active) in steps {
                set.set(VmId::from_usize(index), is_active);
                flags[index] = is_active;
            }
            let all: Vec<VmId> = (0..200).filter(|i| flags[*i]).map(VmId::from_usize).collect();
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), &all[..]);
            prop_assert_eq!(set.len(), all.len());
            let from = VmId::from_usize(from);
            let next = all.iter().find(|vm| **vm >= from).or(all.first());
            prop_assert_eq!(set.next(from), next.copied());
        }
    }
}
