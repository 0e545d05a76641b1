//! CPU time of an urgent task's answer to an interrupt.

use rtvirtio_units::Nanos;

/// Factor that moves the estimate up after an answer that took longer.
const UP: f64 = 1.05;
/// Root of [`UP`] that moves the estimate back after a shorter answer, so that it settles at the
/// 75th percentile (Robbins and Monro, 1951).
const DOWN: f64 = 3.0;
/// Ratio of the limit to that estimate, for slower answers.
const ROOM: f64 = 2.0;

/// CPU time that a guest's vCPU needs from an interrupt to its report that an urgent task runs: the
/// interrupt itself, the work that the kernel does at once, and the switch. It depends on the
/// processor, the guest's kernel and its load, so it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    usual: f64,
}

impl Answer {
    /// Limits of [`Answer::get`]. The upper one bounds the cost of an interrupt for ordinary work
    /// to the neighbours.
    pub const BOUNDS: [Nanos; 2] = [Nanos::from_micros(50), Nanos::from_micros(1000)];

    /// An estimate without any answer yet.
    #[must_use]
    pub fn new(first: Nanos) -> Self {
        Self { usual: first.0 as f64 / ROOM }
    }

    /// Records the CPU time of an answer, also where the vCPU had been lowered before it came.
    pub fn took(&mut self, ran: Nanos) {
        let factor = if ran.0 as f64 > self.usual { UP } else { UP.powf(-1.0 / DOWN) };
        let [least, most] = Self::BOUNDS.map(|of| of.0 as f64 / ROOM);
        self.usual = (self.usual * factor).clamp(least, most);
    }

    /// CPU time after which an interrupt counts as one for other work.
    #[must_use]
    pub fn get(&self) -> Nanos {
        Nanos((self.usual * ROOM).round() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_answers_come_within_it() {
        let us = Nanos::from_micros;
        let mut answer = Answer::new(us(200));
        assert_eq!(answer.get(), us(200));
        let mut late = 0;
        for i in 0..5_000_u64 {
            let ran = us(100 + i * 7 % 100);
            answer.took(ran);
            late += u64::from(i > 500 && ran > answer.get());
        }
        assert_eq!(late, 0);
        assert!((us(300).0..=us(420).0).contains(&answer.get().0), "{}", answer.get());
        (0..1000).for_each(|_| answer.took(Nanos(0)));
        assert_eq!(answer.get(), Answer::BOUNDS[0]);
        (0..1000).for_each(|_| answer.took(Nanos(u64::MAX)));
        assert_eq!(answer.get(), Answer::BOUNDS[1]);
    }
}
