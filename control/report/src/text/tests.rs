use std::collections::BTreeMap;

use rtvirtio_measure::Verdict;
use rtvirtio_planner::{BfqTunable, Knob};
use rtvirtio_units::{Iops, Nanos, Percentile};
use unicode_width::UnicodeWidthStr;

use super::*;
use crate::fixture;

const PLAIN: Style = Style { colour: false, ascii: false, width: 100 };
const ASCII: Style = Style { colour: false, ascii: true, width: 100 };
const COLOUR: Style = Style { colour: true, ascii: false, width: 100 };

fn everything(style: &Style) -> String {
    let r = fixture::result();
    [
        results(&r, style),
        compare(&r.runs[0], &r.runs[1], style),
        plan(&fixture::plan(), &BTreeMap::new(), style),
        plan(&fixture::infeasible_plan(), &BTreeMap::new(), style),
        forecast(&fixture::plan().tasks, true, style),
        profile(&fixture::profile(), style),
        results(&fixture::many(), style),
        compare(&fixture::many().runs[0], &fixture::many().runs[1], style),
    ]
    .concat()
}

#[test]
fn compare_is_the_table_a_user_expects() {
    let r = fixture::result();
    assert_eq!(compare(&r.runs[0], &r.runs[1], &PLAIN), GOLDEN.trim_start_matches('\n'));
}

#[test]
fn one_line_says_what_changed() {
    let r = fixture::result();
    let line = before_after(&r.runs[0], &r.runs[1], &PLAIN);
    assert_eq!(
        line,
        "before → after: p99 150ms → 6.62ms, p99.99 902ms → 39.7ms; missed 5 → 0, met 0 → 3, unproven 1 → 3\nof 6\n"
    );
    assert!(before_after(&r.runs[0], &r.runs[1], &ASCII).is_ascii());
}

#[test]
fn columns_are_aligned() {
    let r = fixture::result();
    let got = run(&r.runs[0], &PLAIN);
    let lines: Vec<&str> = got.lines().collect();
    // The rule under the titles marks each column; no row may have text in a gap.
    let rule: Vec<char> = lines[1].chars().collect();
    for line in &lines[2..8] {
        for (i, c) in line.chars().enumerate() {
            assert!(rule.get(i) == Some(&'─') || c == ' ', "column {i} of {line:?}\n{got}");
        }
    }
    // Numbers are right-aligned: the last digit of the widest rate is below the end of its rule.
    let end = |l: &str, what: &str| l.find(what).map(|i| l[..i].chars().count() + what.len());
    assert_eq!(end(lines[3], "491.5/500"), end(lines[2], "98.3/100"), "{got}");
}

#[test]
fn no_line_is_wider_than_asked() {
    for style in [PLAIN, ASCII] {
        for line in everything(&style).lines() {
            assert!(line.width() <= 100, "{} columns: {line}", line.width());
        }
    }
}

#[test]
fn long_names_do_not_widen_lines() {
    let long = "n".repeat(32);
    let (mut r, mut p, mut d) = (fixture::result(), fixture::infeasible_plan(), fixture::profile());
    r.host.vmm = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u16)".into();
    r.host.device.push_str(&" long".repeat(30));
    r.runs[0].scheme = "a-scheme-with-a-name-that-a-user-has-made-far-too-long".into();
    for t in r.runs.iter_mut().flat_map(|r| &mut r.tasks) {
        (t.vm, t.task) = (long.clone(), format!("{}{}", long, t.vm));
    }
    for t in &mut p.tasks {
        (t.vm, t.task) = (long.clone(), long.clone());
        t.forecast.terms[0].name = long.clone().into();
    }
    p.settings.push(p.settings[6].clone());
    p.settings[8].knob = Knob::GuestBfq { vm: long.clone(), tunable: BfqTunable::StrictGuarantees };
    d.doubts.push(long.repeat(2) + " " + &long.repeat(3));
    let text = [
        results(&r, &PLAIN),
        compare(&r.runs[0], &r.runs[1], &PLAIN),
        forecast(&p.tasks, true, &PLAIN),
        plan(&p, &BTreeMap::new(), &PLAIN),
        profile(&d, &PLAIN),
    ]
    .concat();
    for line in text.lines() {
        assert!(line.width() <= 100, "{} columns: {line}", line.width());
    }
}

#[test]
fn ascii_is_ascii_and_has_the_same_words() {
    let text = everything(&ASCII);
    assert!(text.is_ascii(), "{:?}", text.chars().find(|c| !c.is_ascii()));
    for word in ["met", "missed", "unproven", "->", "##"] {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn colour_only_when_asked_and_never_alone() {
    assert!(!everything(&PLAIN).contains('\x1b'));
    let text = everything(&COLOUR);
    assert!(text.contains("\x1b[1;31mmissed\x1b[0m") && text.contains("\x1b[32mmet\x1b[0m"));
    let mut stripped = String::new();
    let mut rest = text.as_str();
    while let Some(i) = rest.find('\x1b') {
        stripped.push_str(&rest[..i]);
        rest = &rest[i..];
        rest = &rest[rest.find('m').unwrap() + 1..];
    }
    stripped.push_str(rest);
    assert_eq!(stripped, everything(&PLAIN), "colour must not change the text or its alignment");
}

#[test]
fn empty_and_odd_inputs_read_well() {
    let mut r = fixture::result();
    r.runs[0].tasks.clear();
    assert!(run(&r.runs[0], &PLAIN).contains("no tasks"));
    let t = &mut r.runs[1].tasks[0];
    t.n = 0;
    t.verdict = None;
    t.target_ns = None;
    t.declared_rate = Some(Iops(0.0));
    t.achieved_rate = Iops(0.0);
    let text = format!("{}{}", run(&r.runs[1], &PLAIN), compare(&r.runs[0], &r.runs[1], &PLAIN));
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    assert!(text.contains("not run"), "{text}");
    r.runs.clear();
    assert!(results(&r, &PLAIN).contains("no runs"));
    assert!(forecast(&[], true, &PLAIN).contains("no tasks"));
}

#[test]
fn a_forecast_shows_each_thing_once_and_what_it_is() {
    use rtvirtio_model::{Side, Term};
    let mut tasks = fixture::plan().tasks;
    let term = |side, name: &'static str, ms| Term {
        side,
        name: name.into(),
        latency_ns: Nanos::from_millis(ms),
        statistic: None,
    };
    for t in &mut tasks {
        t.forecast.terms = vec![
            term(Side::Guest, "virtualization", 4),
            term(Side::Host, "own-service", 1),
            term(Side::Host, "backlog", 0),
        ];
    }
    // Of one task nothing but the time of its target differs, of another the terms.
    tasks[0].forecast.latency_ns = tasks[1].forecast.latency_ns;
    (tasks[0].target_ns, tasks[0].margin_ns) = (tasks[1].target_ns, tasks[1].margin_ns);
    tasks[5].forecast.terms[2].latency_ns = Nanos::from_millis(70);
    let text = forecast(&tasks, false, &PLAIN);
    assert_eq!(text.matches("  guest  virtualization (assumed)").count(), 2, "{text}");
    assert!(text.starts_with("vm1/light, vm1/medium  p99.99 24ms"), "{text}");
    assert_eq!(text.matches("  host   backlog").count(), 1, "no row of no time: {text}");
    for what in [
        "virtualization: guest kernel and VMM; no guest was measured",
        "own-service: ",
        "backlog: ",
        "no bound",
    ] {
        assert_eq!(text.matches(what).count(), 1, "{what}: {text}");
    }
    assert!(!text.contains("other-vms"), "only what is shown is explained: {text}");
    let measured = forecast(&tasks, true, &PLAIN);
    assert!(!measured.contains("assum"), "{measured}");
}

#[test]
fn hostile_names_cannot_act_on_the_terminal() {
    let mut r = fixture::result();
    r.runs[0].scheme = "x\x1b]0;owned\x07".into();
    r.runs[0].tasks[0].vm = "\x1b[2J\u{202e}vm\n1".into();
    r.runs[0].tasks[0].why = "a\rb".into();
    r.host.device = "\x1b[31m漢字\x1b[0m".into();
    let text = format!("{}{}", results(&r, &PLAIN), compare(&r.runs[0], &r.runs[1], &PLAIN));
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    assert!(results(&r, &ASCII).is_ascii());
}

#[test]
fn wide_characters_are_counted_as_two_columns() {
    let mut t = Table::new(vec![Column::name("name"), Column::number("v")]);
    t.row(vec!["漢字".into(), "1".into()]);
    t.row(vec!["abcde".into(), "22".into()]);
    assert_eq!(t.draw(&PLAIN), "name    v\n─────  ──\n漢字    1\nabcde  22\n");
}

#[test]
fn names_are_cut_in_the_middle() {
    assert_eq!(PLAIN.shorten("production-db-01", 9), "prod…b-01");
    assert_eq!(ASCII.shorten("production-db-01", 9), "pro..b-01");
    assert_eq!(PLAIN.shorten("short", 9), "short");
    assert_eq!(PLAIN.shorten("漢字漢字", 5), "漢…字");
    assert_eq!(PLAIN.shorten("abc", 1), "…");
    assert_eq!(PLAIN.shorten("abc", 0), "");
}

#[test]
fn bars_are_proportional() {
    assert_eq!(PLAIN.bar(0.5, 8), "████    ");
    assert_eq!(PLAIN.bar(1.0 / 16.0, 8), "▌       ");
    assert_eq!(PLAIN.bar(7.0, 4), "████");
    assert_eq!(PLAIN.bar(f64::NAN, 4), "    ");
    assert_eq!(ASCII.bar(0.5, 8), "####    ");
}

#[test]
fn a_plan_shows_old_and_new() {
    let old = BTreeMap::from([
        (Knob::HostBfq(BfqTunable::SliceIdle), "8".to_owned()),
        (Knob::HostElevator, "bfq".to_owned()),
    ]);
    let text = plan(&fixture::plan(), &old, &PLAIN);
    assert!(text.contains("2. host bfq slice_idle: 8 ms → 0 ms  [hint]\n   Three VMs are busy"), "{text}");
    assert!(text.contains("1. host elevator: bfq (as it is)  [hint]"), "{text}");
    assert!(text.contains("vm3 read rate limit: → 660/s  [cap]"), "{text}");
    assert!(text.contains("every target is predicted to be met"), "{text}");
}

#[test]
fn an_infeasible_plan_names_the_price() {
    let text = plan(&fixture::infeasible_plan(), &BTreeMap::new(), &PLAIN);
    assert!(text.contains("given up, least urgent first: vm3"), "{text}");
    assert!(text.contains("vm3/medium would fit with 22ms instead of 10ms"), "{text}");
    assert!(text.lines().any(|l| l.contains("-12ms") && l.contains("misses")), "{text}");
}

/// Neither by io.cost, whose plan has no forecasts, nor while io.cost is on.
#[test]
fn what_is_not_predicted_is_not_said_to_hold() {
    let mut p = fixture::infeasible_plan();
    let reason = "not predicted: io.cost divides the device";
    p.infeasible.as_mut().unwrap().reason = reason.into();
    let mut forecasts = p.tasks.clone();
    p.tasks.clear();
    let by_io_cost = rtvirtio_planner::Setting {
        knob: Knob::HostIoCost(rtvirtio_planner::IoCostFile::Qos),
        value: "enable=1 ctrl=auto".into(),
        ..p.settings[0].clone()
    };
    p.settings.push(by_io_cost);
    forecasts.iter_mut().for_each(|task| task.not_predicted = Some("io.cost divides the device".into()));
    for tasks in [Vec::new(), forecasts.clone()] {
        p.tasks = tasks;
        let text = plan(&p, &BTreeMap::new(), &PLAIN);
        let first = text.lines().next().unwrap();
        assert!(first.ends_with(": not predicted") && text.contains(reason), "{text}");
        assert!(!text.contains("holds") && !text.contains("does not fit"), "{text}");
        assert!(!text.contains("candidates evaluated"), "{text}");
    }
    let text = forecast(&forecasts, true, &PLAIN);
    assert!(text.contains("not predicted: io.cost divides the device, without it p99.99"), "{text}");
    assert!(!text.contains("margin"), "{text}");
}

#[test]
fn a_profile_shows_what_bfq_costs_and_every_doubt() {
    let text = profile(&fixture::profile(), &PLAIN);
    assert!(
        text.lines().any(|l| l.starts_with("   16 ") && l.contains("13330") && l.ends_with("86%")),
        "{text}"
    );
    assert!(text.contains("- throughput at depth 32"), "{text}");
    assert!(text.contains("121 us of host CPU"), "{text}");
}

#[test]
fn tasks_with_the_same_reason_share_a_line() {
    let mut r = fixture::result();
    for t in &mut r.runs[1].tasks {
        if t.verdict == Some(Verdict::Unproven) {
            t.why = "0 of 6000 above target".into();
        }
    }
    let text = run(&r.runs[1], &PLAIN);
    assert!(
        text.contains("\n  unproven vm1/light, vm2/light, vm3/light: not missed; 0 of 6000 above target\n"),
        "{text}"
    );
}

#[test]
fn a_verdict_without_a_reason_is_still_honest() {
    let mut r = fixture::result();
    let t = &mut r.runs[1].tasks[0];
    t.why.clear();
    assert_eq!(t.verdict, Some(Verdict::Unproven));
    let text = run(&r.runs[1], &PLAIN);
    assert!(
        text.contains("not missed; 0 of 6000 above target, proof needs about 30000 without one"),
        "{text}"
    );
    r.runs[1].tasks[0].percentile = Percentile(99.0);
    r.runs[1].tasks[0].target_ns = Some(Nanos::from_millis(20));
    assert!(run(&r.runs[1], &PLAIN).contains("p99 20ms"));
}

const GOLDEN: &str = "
                     ───── kernel default ──────  ────────────── rtvirtio ───────────────
vm   task    target  p99.99  rate kept  verdict    p99.99  rate kept  verdict   predicted
───  ──────  ──────  ──────  ─────────  ────────  ───────  ─────────  ────────  ─────────
vm1  light    400ms  628ms*      98.3%  missed    14.9ms*      99.9%  unproven       18ms
vm1  medium   300ms  412ms       98.3%  missed    21.9ms       99.9%  met            24ms
vm2  light    800ms  828ms*      98.3%  missed    16.9ms*      99.9%  unproven       23ms
vm2  medium   500ms  871ms       98.3%  missed     5.2ms       99.9%  met            31ms
vm3  light    900ms  286ms*      99.9%  unproven  11.8ms*      99.9%  unproven       29ms
vm3  medium   700ms  902ms       98.3%  missed    39.7ms       99.9%  met          37.5ms
* max of 6000: below 10000 samples p99.99 is not known and the largest replaces it

kernel default: 5 of 6 targets missed, 1 unproven
  missed vm1/light: 14 of 6000 above 400ms; 98.3/s instead of 100/s
  missed vm1/medium: 14 of 30000 above 300ms; 491.5/s instead of 500/s
  missed vm2/light: 14 of 6000 above 800ms; 98.3/s instead of 100/s
  missed vm2/medium: 14 of 30000 above 500ms; 491.5/s instead of 500/s
  unproven vm3/light: not missed; 0 of 6000 above 900ms; p99.99 needs 29956 samples
  missed vm3/medium: 14 of 30000 above 700ms; 491.5/s instead of 500/s

rtvirtio: 0 of 6 targets missed, 3 met, 3 unproven
  unproven vm1/light: not missed; 0 of 6000 above 400ms; p99.99 needs 29956 samples
  unproven vm2/light: not missed; 0 of 6000 above 800ms; p99.99 needs 29956 samples
  unproven vm3/light: not missed; 0 of 6000 above 900ms; p99.99 needs 29956 samples
";

#[test]
fn each_target_of_a_task_has_its_row_and_its_reason() {
    let mut run = fixture::result().runs[0].clone();
    let mut second = run.tasks[0].clone();
    second.percentile = Percentile(99.9);
    second.target_ns = Some(Nanos::from_millis(900));
    second.at_target_ns = Some(Nanos::from_millis(7));
    second.verdict = Some(Verdict::Unproven);
    let name = format!("{}/{}", second.vm, second.task);
    assert!(!super::run(&run, &PLAIN).contains("at target"));
    run.tasks[0].verdict = Some(Verdict::Missed);
    run.tasks.insert(1, second);
    let text = super::run(&run, &Style { width: 200, ..PLAIN });
    // What the verdict is about stands in a column where no other shows it.
    let row = text.lines().find(|l| l.contains("p99.9 900ms")).unwrap_or_else(|| panic!("{text}"));
    assert!(text.contains("at target") && row.contains(" 7ms "), "{text}");
    for of in [format!("missed {name} {}", run.tasks[0].percentile), format!("unproven {name} p99.9")] {
        assert!(text.contains(&of), "{of}:\n{text}");
    }
}
