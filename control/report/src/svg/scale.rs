//! Scales from values to coordinates, and their ticks.

/// A tick of a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tick {
    pub value: f64,
    /// Whether there is room for its number.
    pub labelled: bool,
}

/// Distribution of values over an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Equal distances for equal differences.
    Linear,
    /// Equal distances for equal ratios.
    Log,
}

/// Maps the values `lo..hi` to the coordinates `from..to`. Values outside are moved to the nearer
/// end, so that a latency of zero on a log scale stands at the axis and not at minus infinity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    spread: Spread,
    lo: f64,
    hi: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// A log scale over the positive values among `values`, widened to the next 1, 2 or 5 on either
    /// side.
    ///
    /// Without any positive value it spans one decade from 1.
    #[must_use]
    pub fn log(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (mut lo, mut hi) = (f64::INFINITY, 0.0f64);
        for v in values.filter(|v| v.is_finite() && *v > 0.0) {
            lo = lo.min(v);
            hi = hi.max(v);
        }
        if !lo.is_finite() {
            (lo, hi) = (1.0, 10.0);
        }
        // Slightly widened, so that a value that is itself a 1, 2 or 5 is not on the frame.
        let (lo, mut hi) = (step_below(lo * 0.999), step_above(hi * 1.001));
        if hi / lo < 10.0 {
            hi = lo * 10.0;
        }
        Self { spread: Spread::Log, lo, hi, from, to }
    }

    /// A linear scale from zero over the finite values, widened to a round number.
    #[must_use]
    pub fn linear(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let hi = values.filter(|v| v.is_finite()).fold(0.0f64, f64::max);
        let hi = if hi > 0.0 { hi } else { 1.0 };
        let step = linear_step(hi, 5.0);
        Self { spread: Spread::Linear, lo: 0.0, hi: (hi / step - 1e-9).ceil() * step, from, to }
    }

    /// A scale with exactly these ends; sorted, and kept apart when equal.
    #[must_use]
    pub fn exact(spread: Spread, a: f64, b: f64, from: f64, to: f64) -> Self {
        let floor = if spread == Spread::Log { f64::MIN_POSITIVE } else { f64::MIN };
        let ok = |v: f64| if v.is_finite() { v.max(floor) } else { 1.0 };
        let (lo, hi) = (ok(a).min(ok(b)), ok(a).max(ok(b)));
        let hi = if hi > lo { hi } else { lo.abs().max(0.5) * 2.0 };
        Self { spread, lo, hi, from, to }
    }

    /// Lowest and highest value of the scale.
    #[must_use]
    pub fn ends(&self) -> (f64, f64) {
        (self.lo, self.hi)
    }

    /// Coordinate of a value; of the low end for NaN.
    #[must_use]
    pub fn at(&self, v: f64) -> f64 {
        let v = if v.is_nan() { self.lo } else { v.clamp(self.lo, self.hi) };
        let share = match self.spread {
            Spread::Linear => (v - self.lo) / (self.hi - self.lo),
            Spread::Log => (v / self.lo).ln() / (self.hi / self.lo).ln(),
        };
        self.from + share * (self.to - self.from)
    }

    /// Ticks in rising order; labelled ones are at least `room` units of length apart.
    #[must_use]
    pub fn ticks(&self, room: f64) -> Vec<Tick> {
        let length = (self.to - self.from).abs();
        match self.spread {
            Spread::Linear => {
                let step = linear_step(self.hi - self.lo, (length / room.max(1.0)).clamp(1.0, 10.0));
                let first = (self.lo / step - 1e-9).ceil() as i64;
                let last = (self.hi / step + 1e-9).floor() as i64;
                (first..=last).map(|i| Tick { value: i as f64 * step, labelled: true }).collect()
            }
            Spread::Log => self.log_ticks(length, room),
        }
    }

    /// Ticks at every digit of every decade; numbers at 1, 2, 5, or at 1, or at 1 of every n-th
    /// decade, as room allows.
    fn log_ticks(&self, length: f64, room: f64) -> Vec<Tick> {
        let per_decade = length / (self.hi / self.lo).log10();
        let first = self.lo.log10().floor() as i32;
        let last = self.hi.log10().ceil() as i32;
        let every = (room / per_decade).ceil().max(1.0) as i32;
        // 2 and 1, and 5 and 10, are the closest of 1, 2, 5.
        let fine = per_decade * 2f64.log10() >= room;
        let digits = if per_decade < 24.0 { 1..2 } else { 1..10 };
        let mut out = Vec::new();
        for e in first..=last {
            for d in digits.clone() {
                let value = f64::from(d) * 10f64.powi(e);
                if value < self.lo * 0.9999 || value > self.hi * 1.0001 {
                    continue;
                }
                let labelled = if fine { matches!(d, 1 | 2 | 5) } else { d == 1 && e.rem_euclid(every) == 0 };
                out.push(Tick { value, labelled });
            }
        }
        out
    }
}

/// The largest 1, 2 or 5 times a power of ten that is not above `v > 0`.
fn step_below(v: f64) -> f64 {
    let decade = 10f64.powf(v.log10().floor());
    [5.0, 2.0, 1.0].into_iter().map(|d| d * decade).find(|&s| s <= v).unwrap_or(decade)
}

/// The smallest 1, 2 or 5 times a power of ten that is not below `v > 0`.
fn step_above(v: f64) -> f64 {
    let decade = 10f64.powf(v.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|d| d * decade).find(|&s| s >= v).unwrap_or(decade * 10.0)
}

/// A step of 1, 2 or 5 times a power of ten that divides `span` into about `parts`, never more.
fn linear_step(span: f64, parts: f64) -> f64 {
    let raw = span / parts;
    if raw.is_finite() && raw > 0.0 { step_above(raw * 0.999_999) } else { 1.0 }
}
