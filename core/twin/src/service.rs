//! The twin's service-time model: time at which a request completes. Pure: the clock and the seed
//! are given.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rtvirtio_units::Nanos;

use crate::profile::TwinProfile;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads from the medium.
    Read,
    /// Writes into the write cache, or onto the medium when there is none.
    Write,
    /// Empties the write cache.
    Flush,
}

/// State of one emulated device.
///
/// Each of `channels` servers takes the request that arrived first. Its service takes
/// `base + bytes * per_byte`, times `1 + jitter * u` with `u` uniform in [0, 1), plus the arm's
/// movement where there is an arm.
#[derive(Debug)]
pub struct ServiceModel {
    profile: TwinProfile,
    size: u64,
    /// Time at which each channel becomes free, in ns of the caller's clock.
    free_at: Vec<u64>,
    /// Offset at which the last request ended, for the arm.
    head: u64,
    /// Bytes in the write cache at `drained_at`.
    cached: f64,
    drained_at: u64,
    /// Bytes written since the last garbage collection.
    since_gc: u64,
    /// Factor of all service times, 1 as declared.
    slowness: f64,
    rng: ChaCha8Rng,
}

impl ServiceModel {
    /// A device at rest. `size` in bytes scales the arm's movement; equal seeds give equal service
    /// times.
    #[must_use]
    pub fn new(profile: TwinProfile, size: u64, seed: u64) -> Self {
        let channels = profile.channels as usize;
        Self {
            profile,
            size: size.max(1),
            free_at: vec![0; channels.max(1)],
            head: 0,
            cached: 0.0,
            drained_at: 0,
            since_gc: 0,
            slowness: 1.0,
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    /// Sets the factor by which later services take longer than declared: a device that wears out,
    /// or is shared with a load that is not seen. At least 0.
    pub fn set_slowness(&mut self, times: f64) {
        self.slowness = times.max(0.0);
    }

    /// Replaces the declared service times of later requests, as by wear or a new firmware. The
    /// number of channels, and what the cache holds, stay.
    pub fn set_profile(&mut self, profile: TwinProfile) {
        self.profile = TwinProfile { channels: self.profile.channels, ..profile };
    }

    /// Admits a request that arrives at `now` (ns) and returns its completion time. `now` must not
    /// run backwards.
    pub fn complete_at(&mut self, now: u64, access: Access, offset: u64, len: u64) -> u64 {
        match access {
            Access::Flush => self.flush(now),
            Access::Read | Access::Write => self.transfer(now, access, offset, len),
        }
    }

    fn transfer(&mut self, now: u64, access: Access, offset: u64, len: u64) -> u64 {
        let timing = if access == Access::Read { &self.profile.read } else { &self.profile.write };
        let mut service = timing.base.0 as f64 + len as f64 * timing.per_byte_ns;
        service *= 1.0 + self.profile.jitter.0 * self.unit();
        service = (service + self.arm(offset, len)) * self.slowness;
        let channel = self.next_channel();
        let mut start = self.free_at[channel].max(now);
        if access == Access::Write {
            start = self.wait_for_cache(start, len);
            start = self.collect_garbage(start, len);
        }
        let done = start + service as u64;
        self.free_at[channel] = done;
        done
    }

    /// Seek and rotation in ns; zero without an arm or when the request continues where the last
    /// one ended.
    fn arm(&mut self, offset: u64, len: u64) -> f64 {
        let Some(arm) = self.profile.arm.clone() else { return 0.0 };
        let distance = offset.abs_diff(self.head) as f64 / self.size as f64;
        self.head = offset + len;
        if distance == 0.0 {
            return 0.0;
        }
        // The square root is the usual shape of seek curves (Ruemmler and Wilkes, "An introduction
        // to disk drive modeling", 1994). Over uniformly random pairs the mean of sqrt(distance) is
        // 8/15.
        let seek = arm.settle.0 as f64
            + (arm.average_seek.0 as f64 - arm.settle.0 as f64) * distance.sqrt() * 15.0 / 8.0;
        seek.max(0.0) + arm.revolution.0 as f64 * self.unit()
    }

    /// A write goes into the cache; when it does not fit, it waits until enough has drained to the
    /// medium.
    fn wait_for_cache(&mut self, start: u64, len: u64) -> u64 {
        let Some(cache) = self.profile.write_cache.clone() else { return start };
        self.drain(start, cache.drain.0);
        let over = self.cached + len as f64 - cache.size.0 as f64;
        let wait = if over > 0.0 { (over / cache.drain.0 * 1e9) as u64 } else { 0 };
        self.drain(start + wait, cache.drain.0);
        self.cached += len as f64;
        start + wait
    }

    fn drain(&mut self, to: u64, per_second: f64) {
        if to > self.drained_at {
            self.cached = (self.cached - (to - self.drained_at) as f64 / 1e9 * per_second).max(0.0);
            self.drained_at = to;
        }
    }

    /// After so many bytes written all channels stop for the pause.
    fn collect_garbage(&mut self, start: u64, len: u64) -> u64 {
        let Some(gc) = self.profile.garbage_collection.clone() else { return start };
        self.since_gc += len;
        if self.since_gc < gc.every.0 {
            return start;
        }
        self.since_gc = 0;
        let end = start + gc.pause.0;
        for free in &mut self.free_at {
            *free = (*free).max(end);
        }
        end
    }

    fn flush(&mut self, now: u64) -> u64 {
        let busy = self.free_at.iter().copied().max().unwrap_or(now).max(now);
        let Some(cache) = self.profile.write_cache.clone() else { return busy };
        self.drain(busy, cache.drain.0);
        let done = busy + (self.cached / cache.drain.0 * 1e9) as u64;
        self.drain(done, cache.drain.0);
        done
    }

    fn next_channel(&self) -> usize {
        (0..self.free_at.len()).min_by_key(|&i| self.free_at[i]).unwrap_or(0)
    }

    /// Uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Mean service time of a lone request of this size, without jitter's randomness, arm or stalls.
#[must_use]
pub fn mean_service(profile: &TwinProfile, access: Access, len: u64) -> Nanos {
    let timing = if access == Access::Write { &profile.write } else { &profile.read };
    let plain = timing.base.0 as f64 + len as f64 * timing.per_byte_ns;
    Nanos((plain * (1.0 + profile.jitter.0 / 2.0)) as u64)
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
