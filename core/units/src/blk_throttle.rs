//! Accounting of the kernel's blk-throttle, by which limits of cgroups hold requests back.

/// Length over which blk-throttle counts, s (`DFL_THROTL_SLICE`, HZ / 10, `block/blk-throttle.c`; a
/// fifth of it on disks without rotation from Linux 6.10 until the fix, in 6.12.63 for example, and
/// before 6.10 where `BLK_DEV_THROTTLING_LOW` is built in). Elapsed time is rounded up to whole
/// slices (`tg_within_iops_limit`), so all requests that a limit allows for a slice may come at its
/// begin. Measured on 6.18: a neighbour of 32 in flight, limited to 682/s, filled the device for
/// others as often as its depth allows; limited to 200/s, twenty requests at a time.
pub const SLICE: f64 = 0.1;

/// Slices of which all that a limit allows may come at once, and one request more: after sparse
/// requests the limit of the last slice is unused, that of the last two where `throtl_trim_slice`
/// preserves one (Linux 6.15, and stable kernels of its time), and the next slice begins.
pub const SLICES_AT_ONCE: f64 = 3.0;

/// Requests per second of one in each [`SLICE`]: multiples of it are held exactly, except on the
/// kernels and disks with slices of a fifth, which hold multiples of five times as many.
pub const STEP: f64 = 10.0;

/// Requests per second that blk-throttle lets through under a limit: it counts whole requests in a
/// slice, and takes back the rest with each slice that has passed (`throtl_trim_slice`). Measured
/// on 6.18 with one request in flight and with 32: 19/s lets 10.2 through, 78/s 70.3, 198/s 190.2,
/// 1005/s 1000.2. Below [`STEP`] it errs either way (6/s: 4.2, 9/s: 15.6), and the limit itself
/// stands for what passes.
#[must_use]
pub fn let_through(limit: f64) -> f64 {
    let per_slice = limit / STEP;
    if per_slice >= 1.0 { per_slice.floor() * STEP } else { limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_lets_whole_requests_of_a_slice_through() {
        let all = [(9.0, 9.0), (10.0, 10.0), (19.0, 10.0), (70.0, 70.0), (78.0, 70.0), (1_005.0, 1_000.0)];
        for (limit, rate) in all {
            assert_eq!(let_through(limit), rate, "{limit}");
        }
    }
}
