use rtvirtio_units::{Iops, Nanos, Percentile};

use super::*;
use crate::fixture;

fn report<'a>(
    result: &'a ResultFile,
    plan: Option<&'a Plan>,
    profile: Option<&'a Profile>,
) -> ReportInput<'a> {
    ReportInput {
        title: "rtvirtio-lab demo",
        result,
        plan,
        profile,
        first: &[],
        notes: &[],
        generated: "rtvirtio 0.1.0",
    }
}

/// Parses as strict XML; every id once; nothing from outside; no broken numbers. Returns the
/// visible text.
fn check(page: &str) -> String {
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let doc = roxmltree::Document::parse_with_options(page, options).unwrap_or_else(|e| panic!("{e}"));
    let mut ids: Vec<_> = doc.descendants().filter_map(|n| n.attribute("id")).collect();
    let before = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(before, ids.len(), "an id is used twice");
    for n in doc.descendants().filter(|n| n.is_element()) {
        let name = n.tag_name().name();
        assert!(!matches!(name, "script" | "link" | "img" | "iframe" | "object"), "{name}");
        for a in n.attributes() {
            assert!(!a.name().starts_with("on") && !matches!(a.name(), "src" | "href"), "{a:?}");
        }
    }
    assert!(!page.contains("http") && !page.contains("url(") && !page.contains("@import"));
    let text: String =
        doc.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect::<Vec<_>>().join("|");
    for bad in ["NaN", "inf|", "infinity"] {
        assert!(!text.contains(bad) && !page.contains("=\"NaN"), "{bad}");
    }
    text
}

#[test]
fn the_page_says_what_matters() {
    let (r, p, d) = (fixture::result(), fixture::plan(), fixture::profile());
    let page = html(&report(&r, Some(&p), Some(&d)));
    let text = check(&page);
    for want in [
        "5 of 6 missed",
        "0 of 6 missed",
        "Under |kernel default|: 5 of 6 targets missed, 1 unproven.",
        "emulated device",
        "QEMU guests under TCG",
        "not missed; 0 of 6000 above 400ms; p99.99 needs 29956 samples",
        "host bfq slice_idle",
        "host: other-vms",
        "throughput at depth 32",
        "the largest ratio of measured to predicted is 1.06 (vm3/medium)",
        "rtvirtio 0.1.0",
    ] {
        assert!(text.contains(want), "{want:?} is missing");
    }
    // The plan is named as such in the sentence.
    assert!(text.contains("Under the plan, |rtvirtio|: 0 of 6 targets missed, 3 met, 3 unproven."));
    assert_eq!(page, html(&report(&r, Some(&p), Some(&d))), "the same input must give the same bytes");
}

/// Nothing of a plan under io.cost is said to be met, or not to fit.
#[test]
fn what_is_not_predicted_is_said_so() {
    let (r, mut p) = (fixture::result(), fixture::infeasible_plan());
    p.infeasible.as_mut().unwrap().reason = "not predicted: io.cost divides the device".into();
    for task in &mut p.tasks {
        task.not_predicted = Some("io.cost divides the device".into());
    }
    let none = "\u{2013}".to_owned();
    for feasible in [false, true] {
        p.feasible = feasible;
        let text = check(&html(&report(&r, Some(&p), None)));
        assert!(text.contains("Not predicted|: io.cost divides the device."), "{text}");
        for bad in ["predicted to be met", "Not every target", "candidates evaluated", "would fit"] {
            assert!(!text.contains(bad), "{bad}: {text}");
        }
        // Prediction, margin and rate of each task.
        assert!(text.matches(&none).count() >= 3 * p.tasks.len(), "{text}");
        assert!(!text.contains("Terms of each task"), "{text}");
    }
}

#[test]
fn a_target_that_depends_on_cpu_time_is_said_to_do_so() {
    let (r, mut p) = (fixture::result(), fixture::plan());
    let text = |p: &Plan| check(&html(&report(&r, Some(p), None)));
    let depends = "predicted to be met where CPU time is not short";
    assert!(!text(&p).contains(depends));
    p.tasks[0].cpu_unknown = Some("they may use different CPUs".into());
    assert!(text(&p).contains(depends));
    p.tasks.iter_mut().for_each(|task| (task.target_ns, task.margin_ns) = (None, None));
    assert!(text(&p).contains("nothing is promised") && !text(&p).contains("to be met"));
}

#[test]
fn all_plots_have_text_alternatives() {
    let (r, p, d) = (fixture::result(), fixture::plan(), fixture::profile());
    let page = html(&report(&r, Some(&p), Some(&d)));
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let doc = roxmltree::Document::parse_with_options(&page, options).unwrap();
    let svgs: Vec<_> = doc.descendants().filter(|n| n.has_tag_name("svg")).collect();
    // Latency, rate and terms twice (wide and narrow), six panels, two of the profile, two legend
    // keys.
    assert_eq!(svgs.len(), 6 + 6 + 2 + 2);
    for s in svgs {
        let named = s.attribute("aria-label").is_some_and(|l| !l.is_empty());
        assert!(named || s.attribute("aria-hidden") == Some("true"));
    }
    // Every verdict in the plot is also text.
    let words = doc.descendants().filter(|n| n.has_tag_name("text") && n.text() == Some("missed")).count();
    assert_eq!(words, 2 * 5);
}

#[test]
fn hostile_text_stays_text() {
    let evil = "</td></svg><script>alert(1)</script><img src=x onerror=\"y\">'&amp;\u{0}\u{1b}]\u{202e}";
    let (mut r, mut p, mut d) = (fixture::result(), fixture::plan(), fixture::profile());
    for run in &mut r.runs {
        run.scheme.push_str(evil);
        for t in &mut run.tasks {
            t.vm = format!("{evil}{}", t.vm);
            t.task.push_str(evil);
            t.why = evil.into();
        }
    }
    r.host.kernel = evil.into();
    r.host.vmm = evil.into();
    r.host.device = evil.into();
    r.host.accelerator = evil.into();
    p.scheme = evil.into();
    for s in &mut p.settings {
        s.value = evil.into();
        s.reason = evil.into();
    }
    for t in &mut p.tasks {
        t.vm = evil.into();
        t.forecast.terms[0].name = evil.into();
    }
    d.device = evil.into();
    d.doubts = vec![evil.into()];
    d.guest.as_mut().unwrap().kind = evil.into();
    let notes = [evil.to_owned()];
    let page = html(&ReportInput {
        title: evil,
        result: &r,
        plan: Some(&p),
        profile: Some(&d),
        first: &notes,
        notes: &notes,
        generated: evil,
    });
    let text = check(&page);
    assert!(text.contains("<script>alert(1)</script>"), "the text itself must still be readable");
    assert!(!page.chars().any(|c| c == '\u{202e}' || (c.is_control() && c != '\n')));
}

#[test]
fn missing_parts_leave_no_holes() {
    let mut r = fixture::result();
    let text = check(&html(&report(&r, None, None)));
    assert!(!text.contains("The plan") && !text.contains("The device|"));
    r.runs[0].tasks.clear();
    check(&html(&report(&r, None, None)));
    r.runs[1].tasks.clear();
    assert!(check(&html(&report(&r, None, None))).contains("No tasks were measured"));
    r.runs.clear();
    let text = check(&html(&report(&r, None, None)));
    assert!(text.contains("Nothing was measured"));
    let mut p = fixture::plan();
    p.settings.clear();
    p.tasks.clear();
    let mut d = fixture::profile();
    d.read.clear();
    d.read_bfq.clear();
    d.write.clear();
    d.guest = None;
    check(&html(&report(&r, Some(&p), Some(&d))));
}

#[test]
fn zero_and_broken_numbers_are_shown_as_such() {
    let mut r = fixture::result();
    for (i, t) in r.runs[0].tasks.iter_mut().enumerate() {
        (t.p50_ns, t.p99_ns, t.p9999_ns, t.max_ns) = (Nanos(0), Nanos(0), Nanos(0), Nanos(0));
        t.n = if i == 0 { 0 } else { 1 };
        t.achieved_rate = Iops(f64::NAN);
        t.declared_rate = Some(Iops(0.0));
        t.predicted_ns = Some(Nanos(0));
    }
    r.runs[0].seconds = f64::INFINITY;
    r.runs[1].tasks[0].percentile = Percentile(100.0);
    r.runs[1].tasks[0].target_ns = Some(Nanos(0));
    let mut p = fixture::plan();
    p.tasks[0].forecast.rate_kept = f64::NAN;
    p.tasks[0].forecast.terms.clear();
    let mut d = fixture::profile();
    d.read[0].iops = Iops(0.0);
    d.read[1].depth = 0;
    d.guest.as_mut().unwrap().cpu_per_request = f64::NAN;
    let text = check(&html(&report(&r, Some(&p), Some(&d))));
    assert!(text.contains("n/a") && text.contains("no data"));
    assert!(text.contains("tail (the target's percentile)"), "a mix of percentiles must be said");
}

#[test]
fn many_vms_keep_plots_short_and_the_table_whole() {
    let r = fixture::many();
    let page = html(&report(&r, None, None));
    let text = check(&page);
    assert!(text.contains("Shown are 24 of 192 tasks") && text.contains("Shown are 12 of 192 tasks"));
    assert_eq!(text.matches("production-database-replica-0063/light|").count(), 2);
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
}

#[test]
fn repeated_runs_of_a_scheme_are_counted_together() {
    let mut r = fixture::result();
    let again = r.runs.clone();
    r.runs.extend(again);
    let text = check(&html(&report(&r, None, None)));
    assert!(text.contains("10 of 12 missed") && text.contains(", 2 runs together"));
}
