use super::*;

const MODEL: &str =
    "ctrl=user model=linear rbps=100 rseqiops=20 rrandiops=10 wbps=90 wseqiops=19 wrandiops=9";
const QOS: &str = "enable=1 ctrl=user rpct=99.99 rlat=20000 wpct=0.00 wlat=25000 min=50.00 max=150.00";

#[test]
fn what_the_kernel_shows_is_read_and_printed_again() {
    for text in [MODEL, "ctrl=auto"] {
        assert_eq!(text.parse::<CostModel>().unwrap().to_string(), text);
    }
    for text in [QOS, "enable=0 ctrl=auto", "enable=1 ctrl=auto"] {
        assert_eq!(text.parse::<CostQos>().unwrap().to_string(), text);
    }
    // As `ioc_qos_prfill()` and `ioc_cost_model_prfill()` print the kernel's own values.
    let shown = "enable=0 ctrl=auto rpct=0.00 rlat=25000 wpct=0.00 wlat=25000 min=1.00 max=10000.00";
    assert_eq!(shown.parse::<CostQos>(), Ok(CostQos::default()));
    let shown = "ctrl=auto model=linear rbps=488636629 rseqiops=8932 rrandiops=8518 wbps=427891549 \
                 wseqiops=28755 wrandiops=21940";
    assert_eq!(shown.parse::<CostModel>(), Ok(CostModel::Auto));
}

#[test]
fn other_forms_of_one_meaning_have_one_text() {
    let model = "wrandiops=9 wseqiops=19 wbps=90 rrandiops=10 rseqiops=20  rbps=100";
    assert_eq!(model.parse::<CostModel>().unwrap().to_string(), MODEL);
    let qos = "min=50 max=150.0 rpct=99.99 wpct=0 rlat=20000 wlat=25000 enable=1";
    assert_eq!(qos.parse::<CostQos>().unwrap().to_string(), QOS);
}

#[test]
fn what_the_kernel_would_cut_or_refuse_is_refused_with_its_key() {
    let qos = |from: &str, to: &str| QOS.replace(from, to).parse::<CostQos>().unwrap_err().to_string();
    for (from, to) in [
        ("rpct=99.99", "rpct=99.999"),
        ("rpct=99.99", "rpct=100.01"),
        ("rpct=99.99", "rpct=9."),
        ("rlat=20000", "rlat=4294967296"),
        ("rlat=20000", "rlat=+5"),
        ("min=50.00", "min=0.99"),
        ("max=150.00", "max=10000.01"),
        ("enable=1", "enable=2"),
        ("ctrl=user", "ctrl=mine"),
    ] {
        assert!(qos(from, to).starts_with(&format!("`{to}` is not ")), "{}", qos(from, to));
    }
    assert_eq!(qos("min=50.00", "min=150.01"), "`min` is above `max`");
    assert_eq!(qos("rlat=20000 ", ""), "`rlat=` is missing");
    assert_eq!(qos("enable=1 ", ""), "`enable=` is missing");
    assert_eq!(qos("rlat=20000", "rlat=20000 rlat=1"), "`rlat=1` is no key of it, or is there twice");
    assert_eq!(qos("enable=1", "enable=1 quick"), "`quick` is no key of it, or is there twice");
    let model = |from: &str, to: &str| MODEL.replace(from, to).parse::<CostModel>().unwrap_err().to_string();
    assert_eq!(model("rbps=100 ", ""), "`rbps=` is missing");
    assert!(model("rbps=100", "rbps=18446744073709551616").contains("is not a whole number"));
    assert!(model("model=linear", "model=cubic").contains("`model=cubic` is not"));
    assert!("".parse::<CostModel>().is_err() && "".parse::<CostQos>().is_err());
}
