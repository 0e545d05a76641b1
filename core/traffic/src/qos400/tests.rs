use proptest::prelude::*;

use super::*;

#[test]
fn the_papers_ten_settings_come_out() {
    assert_eq!(paper_settings_wrong(PAPER_CLOCK_HZ), 0);
    // The clocks that fit, and those on either side.
    for mhz in [247.25, 247.9] {
        assert_eq!(paper_settings_wrong(mhz * 1e6), 0, "{mhz}");
    }
    for mhz in [247.1, 248.1, 250.0] {
        assert_ne!(paper_settings_wrong(mhz * 1e6), 0, "{mhz}");
    }
    let words: Vec<u32> = PAPER_SETTINGS
        .iter()
        .filter_map(|(field, _)| Some(Fields { rate: (*field)?, burst: 1, peak: 1 }.to_words().rate))
        .collect();
    assert_eq!(words[0], 0x1000_0000);
    assert_eq!(words[8], 0x0010_0000);
    assert!(words.windows(2).all(|pair| pair[1] * 2 == pair[0]), "each halves the one before: {words:x?}");
}

#[test]
fn a_fraction_of_the_clock_is_exact_in_its_field() {
    let f = Fields::new(62.5e6, 100.0, Some(125e6), 250e6).unwrap();
    assert_eq!(f, Fields { rate: 0x400, burst: 100, peak: 0x80 });
    assert_eq!(f.to_words(), Words { peak: 0x8000_0000, burst: 100, rate: 0x4000_0000 });
    let rates = f.rates(250e6);
    assert_eq!((rates.rate, rates.burst, rates.peak), (62.5e6, 100.0, 125e6));
}

#[test]
fn what_no_field_holds_is_refused() {
    let clock = 250e6;
    for (rate, burst, peak, what) in [
        (clock / 4097.0, 1.0, None, "a rate"),
        (clock, 1.0, None, "a rate"),
        (1e6, 65_536.0, None, "a burst"),
        (1e6, 0.5, None, "a burst"),
        (1e6, 1.0, Some(clock / 257.0), "a peak"),
    ] {
        match Fields::new(rate, burst, peak, clock) {
            Err(CompileError::Range { what: found, .. }) => assert_eq!(found, what),
            other => panic!("{other:?}"),
        }
    }
    let bad = Words { peak: 1, burst: 0, rate: 0 };
    assert_eq!(bad.fields(), Err(WordError { register: "a peak", word: 1, extra: 1 }));
    assert!(Words { peak: 0, burst: 1 << 16, rate: 0 }.fields().is_err());
    assert!(Words { peak: 0, burst: 0, rate: 0xf_ffff }.fields().is_err());
}

#[test]
fn the_ethernet_of_the_paper_is_behind_the_iou() {
    assert_eq!(Soc::Zynqmp.base("gem"), Some(0xFE14_A100));
    assert_eq!(Soc::Zynqmp.base("INTIOU"), Some(0xFE14_A100));
    assert_eq!(Soc::Zynqmp.base("lpd_dma"), Some(0xFE14_4100));
    assert_eq!(Soc::Zynqmp.base("sata"), Some(0xFD75_0100));
    assert_eq!(Soc::Zynqmp.base("none"), None);
    assert_eq!(Soc::S32.base("0x42080"), Some(0x4005_2080));
    assert_eq!(Soc::S32.base("0x42100"), None);
    let mut masters = Soc::Zynqmp.masters();
    assert!(masters.iter().all(|m| m.base & 0xfff == 0x100));
    masters.sort_by_key(|m| m.name);
    masters.dedup_by_key(|m| m.name);
    assert_eq!(masters.len(), Soc::Zynqmp.masters().len(), "names are unique");
}

#[test]
fn clocks_have_units() {
    assert_eq!("247.5MHz".parse::<Hertz>().unwrap(), Hertz(247.5e6));
    assert_eq!("1 GHz".parse::<Hertz>().unwrap().to_string(), "1000MHz");
    for bad in ["247.5", "MHz", "-1MHz", "0Hz", "1e30Hz"] {
        assert!(bad.parse::<Hertz>().is_err(), "{bad}");
    }
}

proptest! {
    /// Every value of the fields survives encoding and decoding, as words and as rates.
    #[test]
    fn decoding_is_the_inverse(rate in 1u16..4096, burst in 1u16.., peak in 1u8.., clock in 1e6f64..2e9) {
        let fields = Fields { rate, burst, peak };
        prop_assert_eq!(fields.to_words().fields(), Ok(fields));
        let r = fields.rates(clock);
        prop_assert_eq!(Fields::new(r.rate, r.burst, Some(r.peak), clock), Ok(fields));
    }

    /// The encoded limit is never above the asked one, and less than a step below it.
    #[test]
    fn a_limit_is_rounded_down(rate in 3e5f64..2e8, clock in 2.5e8f64..1e9) {
        let fields = Fields::new(rate, 1.0, None, clock).unwrap();
        let got = fields.rates(clock).rate;
        prop_assert!(got <= rate * (1.0 + 2e-9) && rate - got < clock / 4096.0);
    }
}
