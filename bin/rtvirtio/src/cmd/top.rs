//! `rtvirtio top`: targets of all VMs, the most trouble first.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _, stdin, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_console::{Global, Ui, show, style};
use rtvirtio_daemon::api::{Client, ClientError};
use rtvirtio_daemon::observe::{ObservedTargets, WaitsObservation};
use rtvirtio_daemon::trouble::{LineOrder, TroubleLine, lines};
use rtvirtio_daemon::{Mode, Snapshot};
use rtvirtio_measure::Verdict;
use rtvirtio_measure::waits::WaitKind;
use rtvirtio_report::text::{Cell, Column, Paint, Style, Table};
use rtvirtio_workflow::Progress as _;
use serde::Serialize;

use super::service::word;
use crate::args::TopArgs;
use keys::{Key, Keys};

mod keys;

/// Schema of the lines as JSON.
const TOP_SCHEMA: &str = "rtvirtio.top.v1";
/// Shortest interval: a shorter one would itself be a load.
const LEAST: Duration = Duration::from_millis(200);
/// Longest wait for an answer of the service: keys wait meanwhile.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest wait for a key between two checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// State of the service at one moment.
#[derive(Serialize)]
struct TopState {
    schema: &'static str,
    mode: Mode,
    lines: Vec<TroubleLine>,
    /// Problems of the service, and sources that could not be read.
    problems: Vec<String>,
}

pub fn run(args: &TopArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let order = args.sort.order();
    if args.once || ui.json || !stdout().is_terminal() || !stdin().is_terminal() {
        let look = read_state(global, order)?;
        show(ui, &look, || text(&look, &style()))?;
        return Ok(ExitCode::SUCCESS);
    }
    // Without a service there is nothing to wait for.
    let first = read_state(global, order)?;
    watch(first, order, Duration::from_nanos(args.delay.0).max(LEAST), global, ui)?;
    Ok(ExitCode::SUCCESS)
}

fn read_state(global: &Global, order: LineOrder) -> Result<TopState, ClientError> {
    let client = Client::running(&global.run_dir)?.with_patience(ANSWER_TIMEOUT);
    let status: Snapshot = client.status()?;
    let seen: ObservedTargets = client.get("/v1/observation")?;
    let waits: WaitsObservation = client.get("/v1/waits")?;
    let lines = lines(&status, &seen, &waits, order);
    let mut problems = status.problems;
    problems.extend(waits.unseen.into_iter().map(|why| format!("who waits for whom: {why}")));
    Ok(TopState { schema: TOP_SCHEMA, mode: status.mode, lines, problems })
}

/// Draws until `q`, Ctrl-C or a signal.
fn watch(
    first: TopState,
    mut order: LineOrder,
    every: Duration,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<()> {
    let keys = Keys::take()?;
    let mut shown = Ok(first);
    loop {
        draw(&shown, order)?;
        let due = Instant::now() + every;
        let key = loop {
            let left = due.saturating_duration_since(Instant::now());
            if ui.is_cancelled() || left.is_zero() {
                break None;
            }
            if let Some(key) = keys.next(left.min(POLL_INTERVAL))? {
                break Some(key);
            }
        };
        match key {
            Some(Key::Quit) => return Ok(()),
            None if ui.is_cancelled() => return Ok(()),
            Some(Key::Order) => order = order.next(),
            Some(Key::Update) | None => {}
        }
        // A service that is started again is found again.
        shown = read_state(global, order);
    }
}

/// Draws one screen: what does not fit below is cut off.
fn draw(shown: &Result<TopState, ClientError>, order: LineOrder) -> anyhow::Result<()> {
    // A terminal that does not know its size has 0 rows.
    let rows = match rustix::termios::tcgetwinsize(stdout())?.ws_row {
        0 => usize::MAX,
        rows => usize::from(rows).saturating_sub(1).max(1),
    };
    let style = style();
    let order = match order {
        LineOrder::Trouble => "trouble",
        LineOrder::Vm => "VM",
        LineOrder::P99 => "p99",
    };
    let text = match shown {
        Ok(look) => text(look, &style),
        Err(e) => style.wrap(&e.to_string(), 0),
    };
    let head = format!("rtvirtio top, by {order}: q ends, space updates, s changes the order\n");
    // Home, and each line erased up to its end; below the last one everything.
    let mut out = "\x1b[H".to_owned();
    for line in (head + &text).lines().take(rows) {
        out.push_str(line);
        out.push_str("\x1b[K\n");
    }
    out.push_str("\x1b[J");
    let mut screen = stdout().lock();
    screen.write_all(out.as_bytes())?;
    Ok(screen.flush()?)
}

fn text(look: &TopState, style: &Style) -> String {
    if look.lines.is_empty() {
        let none = "no contract yet: `sudo rtvirtio contract set VM SPEC.toml`\n";
        return none.to_owned() + &problems(look, style);
    }
    let mut table = Table::new(vec![
        Column::name("VM"),
        Column::name("TASK"),
        Column::word("TARGET"),
        Column::number("P99"),
        Column::word("VERDICT"),
        Column::name("CAUSE"),
        Column::name("WAITS FOR"),
    ]);
    for line in &look.lines {
        let target = line.target.as_ref();
        let (verdict, paint) = verdict(line);
        table.row(vec![
            line.vm.as_str().into(),
            target.map_or("-", |target| &target.task).into(),
            target.map_or_else(|| "-".to_owned(), |t| format!("{} <= {}", t.percentile, t.latency_ns)).into(),
            line.p99_ns.map_or_else(|| "-".to_owned(), |time| time.to_string()).into(),
            Cell::painted(&verdict, paint),
            cause(line).into(),
            waits_for(line).into(),
        ]);
    }
    table.draw(style) + &unseen(&look.lines, style) + &problems(look, style)
}

/// Verdict; the contract's state where there is none, or where that is what is wrong.
fn verdict(line: &TroubleLine) -> (String, Option<Paint>) {
    match line.verdict {
        Some(verdict @ Verdict::Missed) => (word(&verdict), Some(Paint::Bad)),
        Some(verdict @ Verdict::Met) => (word(&verdict), Some(Paint::Good)),
        Some(verdict @ Verdict::Unproven) => (word(&verdict), Some(Paint::Open)),
        None if line.target.is_some() && word(&line.state) != "off" => {
            ("not observed".to_owned(), Some(Paint::Open))
        }
        None => (word(&line.state), None),
    }
}

/// Kinds of the causes of a missed target.
fn cause(line: &TroubleLine) -> String {
    match line.causes.as_deref() {
        None => "-".to_owned(),
        Some([]) => "not seen".to_owned(),
        Some(all) => {
            let kinds: Vec<String> = all.iter().map(|cause| word(&cause.kind)).collect();
            kinds.join(", ")
        }
    }
}

fn waits_for(line: &TroubleLine) -> String {
    line.waits_for.as_ref().map_or_else(
        || "-".to_owned(),
        |wait| {
            let about = if wait.kind == WaitKind::Exact { "" } else { "about " };
            format!("{} {about}{:.0} %", wait.vm, 100.0 * wait.share)
        },
    )
}

/// Reasons why targets are not observed, each once with its VMs.
fn unseen(lines: &[TroubleLine], style: &Style) -> String {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let is_unseen =
        |line: &&TroubleLine| line.verdict.is_none() && line.target.is_some() && word(&line.state) != "off";
    for line in lines.iter().filter(is_unseen) {
        let vms = reasons.entry(line.why.as_deref().unwrap_or("no reason is known")).or_default();
        if vms.last() != Some(&line.vm.as_str()) {
            vms.push(&line.vm);
        }
    }
    let mut out = String::new();
    for (why, vms) in reasons {
        let text = format!("not observed: {}: {why}", vms.join(", "));
        out.push_str(&style.wrap(&text, 0));
    }
    out
}

fn problems(look: &TopState, style: &Style) -> String {
    let one = |problem: &String| style.wrap(problem, 0);
    look.problems.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(vm: &str, value: &serde_json::Value) -> TroubleLine {
        let mut all = json!({ "vm": vm, "state": "observed", "target": { "task": "cycle", "percentile": 99.9, "latency_ns": 20_000_000 },
            "p99_ns": null, "verdict": null, "why": null, "late": null, "causes": null, "causes_unread": [], "waits_for": null });
        for (key, value) in value.as_object().unwrap() {
            all[key] = value.clone();
        }
        serde_json::from_value(all).unwrap()
    }

    fn drawn(lines: Vec<TroubleLine>) -> String {
        let look =
            TopState { schema: TOP_SCHEMA, mode: Mode::Observe, lines, problems: vec!["old".to_owned()] };
        text(&look, &Style::default())
    }

    #[test]
    fn a_line_has_verdict_cause_and_neighbour() {
        let cause = json!([{ "kind": "neighbour", "share": null, "evidence": "e", "remedy": "r" }]);
        let wait = json!({ "vm": "bulk", "share": 0.75, "device": "/dev/sda", "kind": "estimate" });
        let text = drawn(vec![
            line(
                "plc",
                &json!({ "verdict": "missed", "p99_ns": 90_000_000, "causes": cause, "waits_for": wait }),
            ),
            line("hmi", &json!({ "verdict": "missed", "causes": [] })),
        ]);
        let rows: Vec<&str> = text.lines().collect();
        let fields: Vec<&str> =
            rows[2].split("  ").filter(|field| !field.is_empty()).map(str::trim).collect();
        assert_eq!(
            fields,
            ["plc", "cycle", "p99.9 <= 20ms", "90ms", "missed", "neighbour", "bulk about 75 %"]
        );
        assert!(rows[3].contains("not seen"), "{text}");
        assert_eq!(rows.last(), Some(&"old"));
    }

    #[test]
    fn what_is_not_observed_says_why_once() {
        let why = json!({ "why": "set `monitor_of_libvirt = true`" });
        let text = drawn(vec![line("a", &why), line("b", &why)]);
        assert_eq!(text.matches("not observed: a, b: set `monitor_of_libvirt = true`").count(), 1, "{text}");
        assert!(drawn(Vec::new()).contains("contract set"));
    }

    #[test]
    fn names_cannot_move_the_cursor() {
        let text = drawn(vec![line("a\x1b[2Jb\nc", &json!({ "why": "x\x1b]0;t\x07" }))]);
        assert!(!text.contains('\x1b') && !text.contains('\x07'), "{text:?}");
        assert_eq!(text.lines().count(), 5, "{text}");
    }
}
