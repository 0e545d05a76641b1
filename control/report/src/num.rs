//! Formatting of numbers. A value that is not finite is written `n/a`, never `NaN` or `inf`.

use rtvirtio_units::{Iops, Nanos};

/// Text in place of a missing number.
pub(crate) const MISSING: &str = "n/a";

/// A latency with three significant digits, such as `412ms`, `5.2ms`, `1.74s`; `gap` stands between
/// number and unit. Without a gap microseconds are `us`, as in spec files and safe for any
/// terminal; with one they are `µs`.
///
/// `Nanos` itself prints up to four or five digits, too many for a column of tails and beyond their
/// precision.
pub(crate) fn latency(ns: Nanos, gap: &str) -> String {
    if ns.0 == 0 {
        return format!("0{gap}ms");
    }
    let micro = if gap.is_empty() { "us" } else { "\u{b5}s" };
    let units = [(1.0, "ns"), (1e3, micro), (1e6, "ms"), (1e9, "s")];
    let v = ns.0 as f64;
    // Rounding may carry into the next unit: 999 600 ns is 1 ms, not 1000 us. Hence 999.5.
    let (scale, unit) = units.into_iter().find(|(s, _)| v / s < 999.5).unwrap_or((1e9, "s"));
    format!("{}{gap}{unit}", sig3(v / scale))
}

/// A signed difference of latencies, such as `+288ms` or `-1.2s`.
pub(crate) fn margin(ns: i64, gap: &str) -> String {
    let sign = if ns < 0 { "-" } else { "+" };
    format!("{sign}{}", latency(Nanos(ns.unsigned_abs()), gap))
}

/// Three significant digits, at least all digits before the point, no trailing zeros.
pub(crate) fn sig3(v: f64) -> String {
    if !v.is_finite() {
        return MISSING.to_owned();
    }
    let digits = match v.abs() {
        a if a >= 99.95 => 0,
        a if a >= 9.995 => 1,
        _ => 2,
    };
    let s = format!("{v:.digits$}");
    if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').to_owned() } else { s }
}

/// A rate without its unit: whole numbers from 1000 up, one decimal from 100 up, below that three
/// digits.
pub(crate) fn rate(r: Iops) -> String {
    if (99.95..999.95).contains(&r.0) {
        let s = format!("{:.1}", r.0);
        return s.strip_suffix(".0").unwrap_or(&s).to_owned();
    }
    sig3(r.0)
}

/// A share as a percentage, rounded down to a tenth.
///
/// Down, because `99.96 %` of a declared rate must not read as `100 %`.
pub(crate) fn percent(share: f64) -> String {
    if !share.is_finite() {
        return MISSING.to_owned();
    }
    // 1e-9 undoes the representation error of shares such as 0.29 without reaching the next tenth.
    let tenths = (share * 1000.0 + 1e-9).floor() / 10.0;
    let s = format!("{tenths:.1}");
    format!("{}%", s.strip_suffix(".0").unwrap_or(&s))
}

/// A whole number in groups of three digits, split by `gap`.
pub(crate) fn count(n: u64, gap: &str) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push_str(gap);
        }
        out.push(d);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_have_three_digits_and_the_right_unit() {
        let cases = [
            (0, "0ms"),
            (7, "7ns"),
            (999, "999ns"),
            (999_600, "1ms"),
            (105_000, "105us"),
            (5_234_000, "5.23ms"),
            (12_000_000, "12ms"),
            (99_960_000, "100ms"),
            (412_300_000, "412ms"),
            (1_736_000_000, "1.74s"),
            (3_600_000_000_000, "3600s"),
        ];
        for (ns, want) in cases {
            assert_eq!(latency(Nanos(ns), ""), want, "{ns}");
        }
        assert!(!latency(Nanos(u64::MAX), "").is_empty());
        assert_eq!(margin(-1_500_000, " "), "-1.5 ms");
        assert_eq!(margin(i64::MIN, ""), "-9223372037s");
    }

    #[test]
    fn shares_round_down_and_missing_numbers_are_named() {
        assert_eq!(percent(0.999_6), "99.9%");
        assert_eq!(percent(0.29), "29%");
        assert_eq!(percent(1.0), "100%");
        assert_eq!(percent(f64::NAN), "n/a");
        assert_eq!(rate(Iops(f64::INFINITY)), "n/a");
        assert_eq!(rate(Iops(524.97)), "525");
        assert_eq!(rate(Iops(499.9)), "499.9");
        assert_eq!(rate(Iops(13_330.4)), "13330");
        assert_eq!(latency(Nanos(105_000), " "), "105 µs");
        assert_eq!(count(1_234_567, " "), "1 234 567");
        assert_eq!(count(12, " "), "12");
    }
}
