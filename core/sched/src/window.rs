//! The window: the number of pieces that the device may hold. As few as keep it busy, so that the
//! scheduler decides the order of all others.
//!
//! Every piece at the device may be served before an urgent request that arrives. The smallest
//! window with (nearly) full throughput therefore gives the shortest tails at no cost (K2, Miller
//! et al., RTSS 2019, bounds the queue of an NVMe drive for the same reason). The profile contains
//! the knee; changes of the device, for instance when its cache is full, are followed by probing
//! one more and one less from time to time.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Pieces per throughput measurement.
const EPOCH: u32 = 256;
/// Epochs between two probes.
const STEADY_EPOCHS: u32 = 16;
/// Share of the best throughput that counts as saturated.
const SATURATED_SHARE: f64 = 0.97;
/// Decay of the remembered best after each probe, for devices that become slower.
const BEST_DECAY: f64 = 0.99;

/// Limits of the window, in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowConfig {
    /// Window at the start.
    pub start: u32,
    /// Smallest window, at least 1.
    pub least: u32,
    /// Largest window, 65 536 at most.
    pub most: u32,
    /// Most pieces without a reservation's deadline; `None` for no separate limit. Below the window
    /// it keeps slots free for pieces with a deadline.
    pub shared: Option<u32>,
}

impl WindowConfig {
    /// A constant window without probing.
    #[must_use]
    pub const fn fixed(pieces: u32) -> Self {
        Self { start: pieces, least: pieces, most: pieces, shared: None }
    }
}

/// Window that is being measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Steady(u32),
    ProbeUp,
    ProbeDown,
}

/// Controller of the window.
#[derive(Clone, Debug)]
pub struct Window {
    config: WindowConfig,
    /// The window between probes.
    base: u32,
    phase: Phase,
    /// Whether all probes so far have grown the window: the next one then follows at once, because
    /// a window that is too small costs throughput.
    growing: bool,
    /// Throughput, in ns of device time per ns, at the current window, one more and one less.
    rates: [f64; 3],
    best: f64,
    epoch: Option<Nanos>,
    work: u64,
    pieces: u32,
}

impl Window {
    /// A controller that starts at `config.start`.
    #[must_use]
    pub fn new(config: WindowConfig) -> Self {
        let base = config.start.clamp(config.least.max(1), config.most.max(1));
        Self {
            config,
            base,
            phase: Phase::Steady(1),
            growing: true,
            rates: [0.0; 3],
            best: 0.0,
            epoch: None,
            work: 0,
            pieces: 0,
        }
    }

    /// Changes the limits. The learned window stays within the new limits; a constant window
    /// applies at once.
    pub fn reconfigure(&mut self, config: WindowConfig) {
        if config != self.config {
            let base = if config.least >= config.most { config.start } else { self.base };
            *self = Self::new(WindowConfig { start: base, ..config });
            self.config = config;
        }
    }

    /// The current window, in pieces.
    #[must_use]
    pub fn limit(&self) -> u32 {
        match self.phase {
            Phase::Steady(_) => self.base,
            Phase::ProbeUp => (self.base + 1).min(self.config.most),
            Phase::ProbeDown => self.base.saturating_sub(1).max(self.config.least.max(1)),
        }
    }

    /// The current limit for pieces without a deadline.
    #[must_use]
    pub fn shared_limit(&self) -> u32 {
        self.config.shared.unwrap_or(u32::MAX).min(self.limit())
    }

    /// Records the completion of a piece of `cost` ns. `busy` when the window was full and requests
    /// were queued: only then does the throughput measure the device.
    pub fn on_completion(&mut self, now: Nanos, cost: u64, busy: bool) {
        if self.config.least >= self.config.most {
            return;
        }
        let Some(from) = self.epoch.filter(|_| busy) else {
            self.epoch = busy.then_some(now);
            (self.work, self.pieces) = (0, 0);
            return;
        };
        self.work = self.work.saturating_add(cost);
        self.pieces += 1;
        if self.pieces < EPOCH || now <= from {
            return;
        }
        let rate = self.work as f64 / (now.0 - from.0) as f64;
        self.epoch = Some(now);
        (self.work, self.pieces) = (0, 0);
        self.step(rate);
    }

    fn step(&mut self, rate: f64) {
        self.best = self.best.max(rate);
        match self.phase {
            Phase::Steady(left) => {
                self.rates[0] = rate;
                self.phase = if left > 1 { Phase::Steady(left - 1) } else { Phase::ProbeUp };
            }
            Phase::ProbeUp => {
                self.rates[1] = rate;
                self.phase = Phase::ProbeDown;
            }
            Phase::ProbeDown => {
                self.rates[2] = rate;
                self.decide();
                self.phase = Phase::Steady(if self.growing { 1 } else { STEADY_EPOCHS });
            }
        }
    }

    fn decide(&mut self) {
        let enough = self.best * SATURATED_SHARE;
        let [now, more, less] = self.rates;
        let grow = now < enough && more > now && self.base < self.config.most;
        self.growing &= grow;
        if grow {
            self.base += 1;
        } else if less >= enough {
            self.base = self.base.saturating_sub(1).max(self.config.least.max(1));
        }
        self.best *= BEST_DECAY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a device that serves `channels` pieces at once, each in 100 us.
    fn simulate(window: &mut Window, channels: u32, pieces: u32) {
        let mut now = 0.0;
        for _ in 0..pieces {
            now += 100_000.0 / f64::from(window.limit().min(channels));
            window.on_completion(Nanos(now as u64), 100_000, true);
        }
    }

    #[test]
    fn it_converges_to_the_number_of_channels() {
        for start in [1, 8, 32] {
            let mut w = Window::new(WindowConfig { start, least: 1, most: 32, shared: None });
            simulate(&mut w, 6, 400_000);
            assert_eq!(w.base, 6, "from {start}");
        }
    }

    #[test]
    fn it_grows_from_a_small_start_without_waiting() {
        let mut w = Window::new(WindowConfig { start: 1, least: 1, most: 32, shared: None });
        // Five steps of three epochs, and the epoch that the first piece starts.
        simulate(&mut w, 6, 5 * 3 * EPOCH + 1);
        assert_eq!(w.base, 6);
    }

    #[test]
    fn an_idle_device_changes_no_window() {
        let mut w = Window::new(WindowConfig { start: 4, least: 1, most: 32, shared: None });
        for i in 0..100_000 {
            w.on_completion(Nanos(i * 1_000_000), 100_000, false);
        }
        assert_eq!(w.limit(), 4);
    }

    #[test]
    fn other_limits_keep_the_learned_window() {
        let mut w = Window::new(WindowConfig { start: 8, least: 1, most: 32, shared: None });
        simulate(&mut w, 6, 400_000);
        w.reconfigure(WindowConfig { start: 20, least: 1, most: 24, shared: Some(3) });
        assert_eq!((w.limit(), w.shared_limit()), (6, 3));
        w.reconfigure(WindowConfig { start: 20, least: 1, most: 4, shared: None });
        assert_eq!(w.limit(), 4);
        w.reconfigure(WindowConfig::fixed(2));
        assert_eq!(w.limit(), 2);
    }

    #[test]
    fn a_fixed_window_stays() {
        let mut w = Window::new(WindowConfig::fixed(3));
        simulate(&mut w, 16, 100_000);
        assert_eq!((w.limit(), w.shared_limit()), (3, 3));
        let w = Window::new(WindowConfig { shared: Some(2), ..WindowConfig::fixed(3) });
        assert_eq!(w.shared_limit(), 2);
    }
}
