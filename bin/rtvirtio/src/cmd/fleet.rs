//! `rtvirtio fleet`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_console::{INFEASIBLE, Ui, show, style};
use rtvirtio_fleet::{
    Assessment, ContractRow, FitsOn, HostRow, Kubernetes, Loss, NoRule, OpenStack, Proxmox, assess,
    load_named,
};
use rtvirtio_kernel::detached::Detached;
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Paint, Style, Table, notes};
use rtvirtio_workflow::Progress as _;
use serde::Serialize;

use crate::args::FleetArgs;

/// Rows of each table without `--all`.
const SHOWN: usize = 20;

/// `rtvirtio fleet`. Changes nothing and contacts no host.
pub fn run(args: &FleetArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let file = args.fleet.clone();
    let fleet = until_cancelled(ui, move |_| load_named(&file))?.context("the fleet cannot be read")?;
    if args.openstack {
        return print(ui, &until_cancelled(ui, move |_| OpenStack::from_fleet(&fleet))?);
    }
    if args.kubernetes {
        return print(ui, &until_cancelled(ui, move |_| Kubernetes::from_fleet(&fleet))?);
    }
    if let Some(version) = args.proxmox {
        let told = until_cancelled(ui, move |end| Proxmox::from_fleet(&fleet, version.into(), end))??;
        show(ui, &told, || commands(&told))?;
        return Ok(ExitCode::SUCCESS);
    }
    let answer = until_cancelled(ui, move |end| assess(&fleet, end))?;
    let shown = if args.all { usize::MAX } else { SHOWN };
    show(ui, &answer, || text(&answer, shown, &style()))?;
    Ok(if is_safe(&answer) { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Runs `work` in a thread, so that a signal ends the command at any time; `work` can test for the
/// cancellation.
fn until_cancelled<T: Send + 'static>(
    ui: &Ui,
    work: impl FnOnce(&dyn Fn() -> bool) -> T + Send + 'static,
) -> anyhow::Result<T> {
    const LOOK: Duration = Duration::from_millis(20);
    let end = Arc::new(AtomicBool::new(false));
    let is_ended = Arc::clone(&end);
    let answer = Detached::call("fleet", move || work(&|| is_ended.load(Ordering::Relaxed)))?;
    loop {
        if ui.is_cancelled() {
            end.store(true, Ordering::Relaxed);
            anyhow::bail!("stopped as asked: nothing was changed");
        }
        if let Some(answer) = answer.wait(LOOK) {
            return answer.context("the fleet's capacity could not be computed");
        }
    }
}

/// Prints JSON, whether `--json` is given or not.
fn print(ui: &Ui, told: &impl Serialize) -> anyhow::Result<ExitCode> {
    let text = serde_json::to_string_pretty(told)? + "\n";
    show(ui, told, || text)?;
    Ok(ExitCode::SUCCESS)
}

/// Shell script with the commands, and a comment for each contract without a rule.
fn commands(told: &Proxmox) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    for rule in &told.rules {
        let _ = writeln!(out, "# {}", terminal(&rule.contract, false));
        rule.commands.iter().for_each(|command| out.push_str(&format!("{command}\n")));
    }
    for of in &told.without {
        let why = match of.why {
            NoRule::NoNumber => "its spec has no `proxmox = NUMBER` of this VM alone",
            NoRule::NoHost => "no host admits it",
        };
        let _ = writeln!(out, "# {}: no rule: {why}", terminal(&of.contract, false));
    }
    out
}

/// Whether every contract has a host, also after any single loss of a host.
fn is_safe(answer: &Assessment) -> bool {
    answer.contracts.iter().all(|c| c.host.is_some())
        && answer.losses.iter().all(|l| l.lost.is_empty())
        && answer.broken.is_empty()
}

fn text(answer: &Assessment, shown: usize, style: &Style) -> String {
    let mut out = summary(answer);
    out.push_str(&contracts(&answer.contracts, shown, style));
    out.push('\n');
    out.push_str(&hosts(&answer.hosts, shown, style));
    out.push('\n');
    out.push_str(&losses(&answer.losses, shown, style));
    out.push_str(&reasons_text(answer));
    out.push_str(&notes(&answer.doubts, style));
    out
}

fn summary(answer: &Assessment) -> String {
    let placed = answer.contracts.iter().filter(|c| c.host.is_some()).count();
    let in_force = answer.contracts.iter().filter(|c| c.in_force).count();
    let kept = answer.losses.iter().filter(|l| l.lost.is_empty()).count();
    format!(
        "{} hosts; {placed} of {} contracts have a host ({in_force} in force); {kept} of {} single losses lose none\n\n",
        answer.hosts.len(),
        answer.contracts.len(),
        answer.losses.len()
    )
}

fn contracts(all: &[ContractRow], shown: usize, style: &Style) -> String {
    let mut t = Table::new(vec![
        Column::name("contract"),
        Column::number("priority"),
        Column::name("host"),
        Column::word(""),
        Column::name("would fit on"),
    ]);
    // Contracts without a host first: they need the reader's attention.
    let mut rows: Vec<&ContractRow> = all.iter().collect();
    rows.sort_by_key(|c| c.host.is_some());
    for c in rows.iter().take(shown) {
        let (word, paint) = match (&c.host, c.in_force) {
            (Some(_), true) => ("in force", None),
            (Some(_), false) => ("fits", Some(Paint::Good)),
            (None, _) => ("NO HOST", Some(Paint::Bad)),
        };
        let fits = match &c.fits {
            FitsOn::InForce => String::new(),
            FitsOn::Hosts(hosts) if hosts.is_empty() => "none".to_owned(),
            FitsOn::Hosts(hosts) => hosts.join(" "),
            FitsOn::Count(n) => format!("{n} hosts"),
        };
        t.row(vec![
            terminal(&c.name, style.ascii).into(),
            c.priority.to_string().into(),
            terminal(c.host.as_deref().unwrap_or("-"), style.ascii).into(),
            Cell::painted(word, paint),
            terminal(&fits, style.ascii).into(),
        ]);
    }
    t.draw(style) + &more(all.len(), shown, "contracts")
}

fn hosts(all: &[HostRow], shown: usize, style: &Style) -> String {
    let mut t = Table::new(vec![
        Column::name("host"),
        Column::number("contracts"),
        Column::number("disk"),
        Column::number("network"),
        Column::number("CPU"),
        Column::word(""),
    ]);
    for h in all.iter().take(shown) {
        let disks: Vec<String> = h.taken.disks.iter().map(|d| d.0.to_string()).collect();
        let networks: Vec<String> = h.taken.networks.iter().map(|n| n.0.to_string()).collect();
        // The sums are conservative: exact admission may take more.
        let over = if h.taken.fit() { "" } else { "by exact admission" };
        t.row(vec![
            terminal(&h.name, style.ascii).into(),
            h.contracts.len().to_string().into(),
            disks.join(" + ").into(),
            if networks.is_empty() { "-".to_owned() } else { networks.join(" + ") }.into(),
            h.taken.cpu.0.to_string().into(),
            over.into(),
        ]);
    }
    format!(
        "taken, in thousandths of what each host can promise\n{}{}",
        t.draw(style),
        more(all.len(), shown, "hosts")
    )
}

fn losses(all: &[Loss], shown: usize, style: &Style) -> String {
    let mut t = Table::new(vec![
        Column::name("loss of"),
        Column::number("contracts"),
        Column::number("lost"),
        Column::name("no other host admits"),
    ]);
    let mut rows: Vec<&Loss> = all.iter().collect();
    rows.sort_by_key(|l| std::cmp::Reverse(l.lost.len()));
    for l in rows.iter().take(shown) {
        let lost = l.lost.len();
        let paint = if lost > 0 { Some(Paint::Bad) } else { Some(Paint::Good) };
        t.row(vec![
            terminal(&l.host, style.ascii).into(),
            l.contracts.to_string().into(),
            Cell::painted(&lost.to_string(), paint),
            terminal(&l.lost.join(" "), style.ascii).into(),
        ]);
    }
    t.draw(style) + &more(all.len(), shown, "losses")
}

fn more(all: usize, shown: usize, what: &str) -> String {
    match all.saturating_sub(shown) {
        0 => String::new(),
        n => format!("and {n} more {what}; --all shows them\n"),
    }
}

/// Reasons and remedies, one line each.
fn reasons_text(answer: &Assessment) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    for (host, why) in &answer.broken {
        let _ = writeln!(out, "{host}: what is in force there is more than it can promise: {why}");
    }
    for c in answer.contracts.iter().filter(|c| c.host.is_none()).take(SHOWN) {
        let _ = match &c.refused {
            Some((host, why)) => writeln!(out, "{}: no host admits it; {host}: {why}", c.name),
            None => writeln!(
                out,
                "{}: no host admits it as its I/O domain is shaped for the others; planned anew (`rtvirtio plan --domain`), the one with most room would",
                c.name
            ),
        };
    }
    for c in answer.contracts.iter().filter(|c| !c.unpromised.is_empty()).take(SHOWN) {
        let tasks = c.unpromised.join(", ");
        let _ = writeln!(
            out,
            "{}: {tasks}: no admission covers a flush of synced writes, nor frames to a VM",
            c.name
        );
    }
    if !answer.buy.is_empty() {
        out.push_str("to place every contract and keep all of them over any single loss, add one of:\n");
    }
    for buy in &answer.buy {
        let _ = match buy.hosts {
            Some(1) => writeln!(out, "  1 host like {}", buy.like),
            Some(n) => writeln!(out, "  {n} hosts like {}", buy.like),
            None => writeln!(out, "  (hosts like {} do not help)", buy.like),
        };
    }
    out
}
