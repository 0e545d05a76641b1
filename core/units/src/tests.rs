use super::*;

#[test]
fn every_documented_form_parses() {
    assert_eq!("300ms".parse(), Ok(Nanos::from_millis(300)));
    assert_eq!("50us".parse(), Ok(Nanos::from_micros(50)));
    assert_eq!("1.5 s".parse(), Ok(Nanos(1_500_000_000)));
    assert_eq!("4KiB".parse(), Ok(Bytes(4096)));
    assert_eq!("4kB".parse(), Ok(Bytes(4000)));
    assert_eq!("500/s".parse(), Ok(Iops(500.0)));
    assert_eq!("600/min".parse(), Ok(Iops(10.0)));
    for iops in ["300 IOPS", "300iops", "300 Iops", "300Hz", "300 hz", "0.3/ms"] {
        assert_eq!(iops.parse(), Ok(Iops(300.0)), "{iops}");
    }
    assert_eq!("70MB/s".parse(), Ok(BytesPerSec(70e6)));
    assert_eq!("100Mbit/s".parse(), Ok(BytesPerSec(12.5e6)));
    assert_eq!("30%".parse(), Ok(Ratio(0.3)));
    assert_eq!("p99.99".parse(), Ok(Percentile(99.99)));
}

#[test]
fn what_is_wrong_is_said() {
    let problem = |r: Result<Nanos, UnitError>| r.unwrap_err().to_string();
    assert!(problem("300".parse()).contains("has no unit"));
    assert!(problem("-3ms".parse()).contains("is negative"));
    assert!(problem("3 lightyears".parse()).contains("not a known unit"));
    assert!(problem("ms".parse()).contains("does not start with a number"));
    assert!(problem("1.2.3ms".parse()).contains("is not a number"));
    assert!(problem("9999999999999s".parse()).contains("too large"));
    let endless = "9".repeat(400);
    assert!(format!("{endless}/s").parse::<Iops>().is_err());
    assert!(format!("{endless}GB/s").parse::<BytesPerSec>().is_err());
    assert!("p100".parse::<Percentile>().is_err());
    assert!("p0.999".parse::<Percentile>().is_err());
    assert!("99.99".parse::<Percentile>().is_err());
    assert!("4K".parse::<Bytes>().is_err());
}

#[test]
fn no_end_is_the_longest_time() {
    let of = |seconds: f64| Nanos::from_secs_f64(seconds).0;
    assert_eq!((of(1.6e-9), of(2.0), of(-1.0), of(-0.0)), (2, 2_000_000_000, 0, 0));
    assert_eq!([of(f64::INFINITY), of(f64::NAN), of(1e30)], [u64::MAX; 3]);
    assert_eq!(of(f64::NEG_INFINITY), 0);
}

#[test]
fn printed_values_read_back() {
    for ns in [0, 1, 999, 1_000, 60_000, 1_500_000, 300_000_000, 2_000_000_000] {
        assert_eq!(Nanos(ns).to_string().parse(), Ok(Nanos(ns)));
    }
    for b in [0, 512, 4096, 1 << 20, 3 << 30, 4097] {
        assert_eq!(Bytes(b).to_string().parse(), Ok(Bytes(b)));
    }
    assert_eq!(Percentile::P9999.to_string(), "p99.99");
    assert_eq!(Iops(100.0).to_string(), "100/s");
    let nothing: f64 = std::iter::empty::<f64>().sum();
    for none in [nothing, -0.0, -1e-9] {
        assert_eq!(Ratio(none).to_string(), "0%");
    }
    assert_eq!(serde_json::to_string(&Ratio(-0.0)).unwrap(), "0.0");
}

#[test]
fn an_enforcement_has_one_name_in_text_and_json() {
    let all = [Enforcement::Guarantee, Enforcement::Cap, Enforcement::Hint];
    for (kind, name) in all.into_iter().zip(["guarantee", "cap", "hint"]) {
        assert_eq!((kind.to_string(), kind.name()), (name.to_owned(), name));
        assert_eq!(serde_json::to_value(kind).unwrap(), name);
        assert_eq!(serde_json::from_value::<Enforcement>(name.into()).unwrap(), kind);
    }
    assert!(serde_json::from_str::<Enforcement>("\"bound\"").is_err());
}
