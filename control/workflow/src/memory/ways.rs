//! Ways of the L3 cache, given out to VMs and devices next to what other groups have.

use rtvirtio_apply::Write;
use rtvirtio_kernel::Root;
use rtvirtio_kernel::resctrl::{self, CacheWays, ControlGroup, Resctrl, USUAL_MOUNT};
use rtvirtio_spec::Ways;
use rtvirtio_traffic::Cache;

use super::line;
use crate::error::{Result, bail, ensure};

/// Ways of the L3 cache while they are given out.
pub(super) struct WaysPlan<'a> {
    resctrl: &'a Resctrl,
    /// Ways that no other group may have: of exclusive groups, and VMs' own.
    closed: u64,
    /// Ways that groups other than the default one, or devices, fill.
    used: u64,
    /// VMs' own ways, which the default group gives up.
    own: u64,
    /// Sentences on them for the user.
    pub(super) notes: Vec<String>,
}

impl<'a> WaysPlan<'a> {
    pub(super) fn new(resctrl: &'a Resctrl, others: &[ControlGroup], devices: u64) -> Self {
        let union = |of: &dyn Fn(&ControlGroup) -> bool| {
            others.iter().filter(|group| of(group)).fold(0, |all, group| all | group.ways)
        };
        let (closed, used) = (union(&|group| group.exclusive), union(&|_| true) | devices);
        Self { resctrl, closed, used, own: 0, notes: Vec::new() }
    }

    fn cache(&self, who: &str) -> Result<&'a CacheWays> {
        match &self.resctrl.cache {
            Some(cache) => Ok(cache),
            None => bail!(
                System,
                "{who}: this CPU or kernel does not divide the L3 cache (no info/L3 in resctrl)"
            ),
        }
    }

    /// Ways that no other group fills, from the lower end, so that the rest has no gap.
    pub(super) fn own(&mut self, who: &str, wanted: Ways) -> Result<u64> {
        let cache = self.cache(who)?;
        let free = cache.all & !(self.closed | self.used);
        let leaves_rest = |mask: u64| is_valid(cache, cache.all & !(self.own | mask));
        let mask = match wanted {
            Ways::Mask(mask) => mask,
            Ways::Count(ways) => {
                let ways = ways.max(cache.least);
                let ones = 1u64.checked_shl(ways).map_or(u64::MAX, |bit| bit - 1);
                let mut places = (0..=64u32.saturating_sub(ways)).map(|shift| ones << shift);
                match places.find(|mask| mask & !free == 0 && leaves_rest(*mask)) {
                    Some(mask) => mask,
                    None => return self.too_few(who, ways, cache, self.closed | self.used),
                }
            }
        };
        check(who, cache, mask, self.closed | self.used)?;
        ensure!(
            leaves_rest(mask),
            Infeasible,
            "{who}: ways {mask:x} of its own would leave {:x} to all others, which no group of this cache can have: take ways at an end",
            cache.all & !(self.own | mask)
        );
        self.take(who, cache, mask);
        (self.closed, self.own) = (self.closed | mask, self.own | mask);
        Ok(mask)
    }

    /// Ways that others may fill too, apart from theirs where enough are left.
    pub(super) fn shared(&mut self, who: &str, wanted: Ways) -> Result<u64> {
        let cache = self.cache(who)?;
        let mask = match wanted {
            Ways::Mask(mask) => mask,
            Ways::Count(ways) => {
                let (least, shareable) = (cache.least, cache.shareable);
                let apart_from =
                    |taken: u64| Cache { all: cache.all & !taken, least, shareable, ways }.mask();
                match apart_from(self.closed | self.used).or_else(|| apart_from(self.closed)) {
                    Some(mask) => mask,
                    None => return self.too_few(who, ways, cache, self.closed),
                }
            }
        };
        check(who, cache, mask, self.closed)?;
        self.take(who, cache, mask);
        Ok(mask)
    }

    fn too_few<T>(&self, who: &str, ways: u32, cache: &CacheWays, taken: u64) -> Result<T> {
        bail!(
            Infeasible,
            "{who}: no {ways} adjacent ways of the L3 cache are free: it has {:x}, of which other groups have {:x}",
            cache.all,
            cache.all & taken
        )
    }

    fn take(&mut self, who: &str, cache: &CacheWays, mask: u64) {
        let shared = mask & (self.used | cache.shareable);
        let with = if shared == 0 { String::new() } else { format!(", of which others fill {shared:x} too") };
        self.notes.push(format!("{who}: ways {mask:x} of each L3 cache{with}"));
        self.used |= mask;
    }

    /// Takes VMs' own ways from the default group.
    pub(super) fn rest(&self, root: &Root) -> Result<Vec<Write>> {
        let (Some(cache), true) = (&self.resctrl.cache, self.own != 0) else { return Ok(Vec::new()) };
        let file = self.resctrl.mount.join("schemata");
        let text = root.read(&file)?;
        let mut writes = Vec::new();
        for resource in cache.resources() {
            let Some(values) = resctrl::schema(&text, resource, 16) else {
                bail!(System, "{} holds `{}`, which is not understood", file.display(), text.trim());
            };
            for (domain, mask) in &values {
                ensure!(
                    is_valid(cache, mask & !self.own),
                    Infeasible,
                    "the default group of resctrl has ways {mask:x} of cache {domain}, and without {:x} it would have none or a gap",
                    self.own
                );
            }
            let left = values.iter().map(|(domain, mask)| format!("{domain}={:x}", mask & !self.own));
            let left: Vec<String> = left.collect();
            writes.push(line(&file, resource, "all other threads", left.join(";")));
        }
        Ok(writes)
    }
}

/// Whether the cache takes a mask.
fn is_valid(cache: &CacheWays, mask: u64) -> bool {
    let is_whole = |mask: u64| (mask >> mask.trailing_zeros()).trailing_ones() == mask.count_ones();
    mask != 0 && mask.count_ones() >= cache.least && (cache.sparse || is_whole(mask))
}

fn check(who: &str, cache: &CacheWays, mask: u64, taken: u64) -> Result<()> {
    ensure!(
        mask & !cache.all == 0,
        Infeasible,
        "{who}: ways {mask:x} are more than the cache has, {:x}",
        cache.all
    );
    ensure!(
        is_valid(cache, mask),
        Infeasible,
        "{who}: ways {mask:x} are not taken by this cache: at least {} adjacent ones{}",
        cache.least,
        if cache.sparse { ", or with gaps" } else { " (sparse_masks is 0)" }
    );
    ensure!(
        mask & taken == 0,
        Infeasible,
        "{who}: ways {:x} of {mask:x} are of another group: `grep . {USUAL_MOUNT}/*/schemata {USUAL_MOUNT}/*/mode`",
        mask & taken
    );
    Ok(())
}
