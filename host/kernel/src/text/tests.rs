use super::*;

#[test]
fn scheduler_line() {
    let e = elevators("none mq-deadline kyber [bfq] \n").unwrap();
    assert_eq!(e.current, "bfq");
    assert_eq!(e.available, ["none", "mq-deadline", "kyber", "bfq"]);
    assert_eq!(elevators("none\n").unwrap().current, "none");
}

#[test]
fn scheduler_line_without_one_current_is_refused() {
    for bad in ["", "none bfq", "[none] [bfq]"] {
        assert_eq!(elevators(bad), None, "{bad:?}");
    }
}

/// Measured on Linux 6.18 with HZ=250: written -> read.
#[test]
fn jiffies_as_measured() {
    for (written, read) in
        [(0, 4), (1, 4), (5, 8), (32, 32), (33, 36), (124, 124), (125, 128), (100_000, 100_000)]
    {
        assert!(jiffies_readbacks(written).contains(&read), "{written} -> {read}");
    }
    assert!(!jiffies_readbacks(32).contains(&36));
    assert!(!jiffies_readbacks(125).contains(&124));
    assert_eq!(jiffies_readbacks(u64::MAX).len(), 4, "no overflow");
}

#[test]
fn weights_in_all_forms() {
    let w = weights("default 300\n7:0 400\n259:3 1000\n").unwrap();
    assert_eq!(w.default, Some(300));
    assert_eq!(w.devices, [("7:0".to_owned(), 400), ("259:3".to_owned(), 1000)].into());
    assert_eq!(weights("100\n").unwrap().default, Some(100));
    assert_eq!(weights("").unwrap(), Weights::default());
}

#[test]
fn weights_of_another_form_are_refused() {
    for bad in ["default", "default x", "7:0 x", "a b c", "sda 100"] {
        assert_eq!(weights(bad), None, "{bad:?}");
    }
}

#[test]
fn limits_by_device() {
    assert_eq!(throttle_limit("7:0 1000\n17:0 5\n", "7:0"), Some(1000));
    assert_eq!(throttle_limit("17:0 5\n", "7:0"), None);
    assert_eq!(throttle_limit("", "7:0"), None);
    let max = "7:0 rbps=max wbps=1048576 riops=100 wiops=max\n";
    assert_eq!(io_max_limit(max, "7:0", "wbps"), Some(1_048_576));
    assert_eq!(io_max_limit(max, "7:0", "rbps"), None);
    assert_eq!(io_max_limit(max, "7:1", "wbps"), None);
}

#[test]
fn words_and_device_numbers() {
    assert!(has_word("cpu io memory\n", "io"));
    assert!(!has_word("cpu memory cpuio\n", "io"));
    assert!(is_dev("259:12"));
    assert!(!is_dev("259"));
    assert!(!is_dev("a:b"));
}

#[test]
fn lists_of_cpus() {
    let list = |text| super::cpu_list(text).map(|s| s.into_iter().collect::<Vec<_>>());
    assert_eq!(list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
    assert_eq!(list(""), Some(vec![]));
    for bad in ["x", "(null)", "3-1", "0-", "0-4000000000", "0;1"] {
        assert_eq!(list(bad), None, "{bad}");
    }
}

#[test]
fn a_limit_that_is_not_understood_is_not_no_limit() {
    assert_eq!(throttle_value("7:0 500\n", "7:0"), Some(Some(500)));
    assert_eq!(throttle_value("7:1 500\n", "7:0"), Some(None));
    assert_eq!(throttle_value("7:0 many\n", "7:0"), None);
    let line = "7:0 rbps=max wbps=4096 riops=? wiops=max\n";
    assert_eq!(io_max_value(line, "7:0", "rbps"), Some(None));
    assert_eq!(io_max_value(line, "7:0", "wbps"), Some(Some(4096)));
    assert_eq!(io_max_value(line, "7:0", "riops"), None);
    assert_eq!(io_max_value("7:0 rbps=max\n", "7:0", "wbps"), None);
    assert_eq!(io_max_value("", "7:0", "wbps"), Some(None));
}

#[test]
fn cpus_are_read_from_masks_and_shown_as_ranges() {
    for (mask, list) in
        [("0", ""), ("3\n", "0-1"), ("d", "0,2-3"), ("80000001,00000000", "32,63"), ("ff", "0-7")]
    {
        let cpus = cpu_mask(mask).unwrap();
        assert_eq!(cpu_ranges(&cpus), list, "{mask}");
        assert_eq!(cpu_list(list), Some(cpus));
    }
    let long = ["1"; 257].join(",");
    for bad in ["", "x", "1,,1", "100000000", "1 2", long.as_str()] {
        assert_eq!(cpu_mask(bad), None, "{bad}");
    }
}
