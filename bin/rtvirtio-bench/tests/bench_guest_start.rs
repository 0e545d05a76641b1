//! Start-ups in a guest, in small: the kernel's plane on a real guest's word, on a twin.

use rtvirtio_testkit::site::{Site, can_run};
use rtvirtio_testkit::{Need, has};
use serde_json::Value;

#[test]
fn a_guests_word_raises_its_weight_and_a_matrix_continues() {
    let test = "a_guests_word_raises_its_weight_and_a_matrix_continues";
    if !can_run(test) || !has(test, &[Need::QEMU, Need::Program("qemu-img")]) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("out");
    let matrix = ["bench", "responsiveness", "twin:emmc", "--out", out.to_str().unwrap()];
    let cells = ["--apps", "small", "--guest-loads", "none", "--host-loads", "1r"];
    let short = ["--starts", "1", "--settle", "2s", "--limit", "30s"];
    let measure = |planes: &str| {
        // Whether the claims are met is not a test's to say.
        let (code, result) = site.json(&[&matrix[..], &cells, &short, &["--planes", planes]].concat());
        assert!(code == 0 || code == 2, "{code}: {result}");
        result["data"][0]["runs"].as_array().unwrap_or_else(|| panic!("{result}")).clone()
    };
    let runs = measure("kernel");
    let [run] = &runs[..] else { panic!("{runs:#?}") };
    let start = &run["starts"][0];
    assert_eq!(start["timed_out"], false, "{run}");
    // bash and its libraries come from the device: the caches are cold.
    assert!(start["read"].as_u64().unwrap() > 1 << 20, "{run}");
    // The word went from the guest to the host, which raised the weight and put it back.
    assert!(run["favoured"].as_f64().unwrap() > 0.0, "{run}");
    assert!(run["throughput"][0].as_f64().unwrap() > 0.0, "the host's reader: {run}");
    // Measured once: the same matrix again has nothing to do.
    let again: Vec<Value> = measure("kernel");
    assert_eq!(again, runs);
    site.assert_clean();
}
