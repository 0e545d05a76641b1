//! Shares of each CPU, as every mechanism of the kernel counts them.

/// Rounding of shares: the kernel compares them with 20 binary digits (`BW_SHIFT` in
/// `kernel/sched/sched.h`), so a sum that fits to this is let in.
pub const ROUNDING: f64 = 1.0 / (1 << 20) as f64;

/// Whether a contract's share of each CPU fits into what is free.
#[must_use]
pub fn fits(share: f64, free: f64) -> bool {
    share <= free + ROUNDING
}
