//! `rtvirtio regulator`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use rtvirtio_console::{Global, INFEASIBLE, Ui, show, style};
use rtvirtio_kernel::Root;
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Paint, Style, Table};
use rtvirtio_traffic::qos400::{Fields, Rates, Soc, Words};
use rtvirtio_traffic::{
    AxiPort, Compiled, Direction, Enforcement, Part, Place, Setting, Tspec, Unit, compile,
};
use rtvirtio_units::{Bytes, BytesPerSec, Iops};
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::regulator::{Outcome, RegulatorOptions, VmRegulators, regulators};
use serde::Serialize;

use crate::args::{ChannelName, PortArgs, Qos400Args, RegisterCommand, RegulatorArgs};

/// `rtvirtio regulator`. Changes nothing.
pub fn run(args: &RegulatorArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if let Some(RegisterCommand::Qos400(registers)) = &args.registers {
        return qos400(registers, ui);
    }
    let spec = args.spec.as_deref().context("which spec?")?;
    let options = RegulatorOptions {
        vm: args.vm.clone(),
        actuators: args.actuators.iter().map(|name| (*name).into()).collect(),
        interface: args.interface.clone(),
        full_bandwidth: args.full_bandwidth,
        ways: args.ways,
        port: port(&args.port)?,
        largest: args.largest,
    };
    let found = regulators(&named_host(spec)?, &options, &Root::default(), &global.dirs())?;
    let any = found.iter().flat_map(|vm| &vm.outcomes).any(|o| matches!(o, Outcome::Compiled(_)));
    show(ui, &found, || found.iter().map(|vm| text(vm, &style())).collect())?;
    Ok(if any { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Port for the regulator in the arguments; `None` without a clock.
fn port(args: &PortArgs) -> anyhow::Result<Option<AxiPort>> {
    let Some(clock) = args.clock else {
        anyhow::ensure!(args.soc.is_none() && args.master.is_none(), "give --clock with --soc and --master");
        return Ok(None);
    };
    let base = match (args.soc, &args.master) {
        (None, None) => 0,
        (Some(soc), Some(master)) => {
            let soc = Soc::from(soc);
            soc.base(master).with_context(|| {
                let names: Vec<&str> = soc.masters().iter().map(|m| m.name).collect();
                match names.as_slice() {
                    [] => format!("no regulator {master}: give the offset of its block, such as 0x42080"),
                    names => format!("no master {master}: it has {}", names.join(", ")),
                }
            })?
        }
        _ => anyhow::bail!("give --soc and --master together"),
    };
    Ok(Some(AxiPort { base, clock_hz: clock.0, transaction: args.transaction.0.max(1) }))
}

fn text(vm: &VmRegulators, style: &Style) -> String {
    let mut table = Table::new(vec![
        Column::name(""),
        Column::name("regulator"),
        Column::number("rate"),
        Column::number("burst"),
        Column::number("peak"),
        Column::number("beyond"),
        Column::word("worth"),
    ]);
    for outcome in &vm.outcomes {
        if let Outcome::Compiled(c) = outcome {
            table.row(row(c));
        }
    }
    let mut out = format!("{}\n{}", terminal(&vm.vm, style.ascii), table.draw(style));
    for outcome in &vm.outcomes {
        match outcome {
            Outcome::Compiled(c) => {
                let _ = writeln!(out, "\n{} by {}", c.direction.name(), c.actuator);
                for setting in &c.settings {
                    let _ = writeln!(out, "  {}", terminal(&setting.to_string(), style.ascii));
                }
                for note in &c.notes {
                    let _ = writeln!(out, "  - {}", terminal(note, style.ascii));
                }
            }
            Outcome::Refused { actuator, direction, why } => {
                let head = format!("{} by {actuator}: not possible", direction.name());
                let _ = writeln!(out, "\n{}: {}", style.paint(&head, Paint::Bad), terminal(why, style.ascii));
            }
        }
    }
    if !vm.uncovered.is_empty() {
        out.push_str("\nNot limited by the settings of its cgroup:\n");
        for of in &vm.uncovered {
            let _ = writeln!(out, "  {}", terminal(&of.to_string(), style.ascii));
        }
    }
    if !vm.unknown.is_empty() {
        out.push_str("\nNot known here:\n");
        for line in &vm.unknown {
            let _ = writeln!(out, "  {}", terminal(line, style.ascii));
        }
    }
    out + "\n"
}

fn row(c: &Compiled) -> Vec<Cell> {
    let unit = c.asked.unit;
    let paint = match c.worth {
        Enforcement::Guarantee => Paint::Good,
        Enforcement::Cap => Paint::Open,
        Enforcement::Hint => Paint::Bad,
    };
    vec![
        c.direction.name().into(),
        c.actuator.name().into(),
        part(&c.rate, unit, true).into(),
        part(&c.burst, unit, false).into(),
        part(&c.peak, unit, true).into(),
        c.excess.map_or_else(|| "no bound".to_owned(), |excess| amount(excess, unit, false)).into(),
        Cell::painted(c.worth.name(), Some(paint)),
    ]
}

/// Enforced value, with its relative error where there is one.
fn part(part: &Part, unit: Unit, per_second: bool) -> String {
    match (part.kept, part.error) {
        (None, _) if part.asked.is_none() => "-".to_owned(),
        (None, _) => "not kept".to_owned(),
        (Some(kept), Some(error)) if error.abs() >= 5e-5 => {
            format!("{} ({:+.2}%)", amount(kept, unit, per_second), error * 100.0)
        }
        (Some(kept), _) => amount(kept, unit, per_second),
    }
}

fn amount(value: f64, unit: Unit, per_second: bool) -> String {
    match (unit, per_second) {
        (Unit::Bytes, true) => BytesPerSec(value).to_string(),
        (Unit::Bytes, false) => Bytes(value.round() as u64).to_string(),
        (Unit::Requests, true) => Iops(value).to_string(),
        (Unit::Requests, false) => format!("{}", value.round()),
    }
}

/// Result of `regulator qos400`.
#[derive(Serialize)]
struct Registers {
    clock_hz: f64,
    /// Bytes per transaction, as configured.
    transaction: u64,
    fields: Fields,
    words: Words,
    /// Rates in transactions per second.
    rates: Rates,
    /// Long-run rate in bytes per second.
    bytes_per_second: f64,
    /// Empty when words were decoded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    compiled: Vec<Compiled>,
    /// Access to the registers, for a known system on a chip.
    #[serde(skip_serializing_if = "Option::is_none")]
    access: Option<&'static str>,
}

fn qos400(args: &Qos400Args, ui: &Ui) -> anyhow::Result<ExitCode> {
    let port = port(&args.port)?
        .context("which clock does the interconnect have? give --clock, such as 247.5MHz")?;
    let (fields, compiled) = match &args.decode {
        Some(words) => (decoded(words)?, Vec::new()),
        None => encoded(args, &port)?,
    };
    let rates = fields.rates(port.clock_hz);
    let registers = Registers {
        clock_hz: port.clock_hz,
        transaction: port.transaction,
        fields,
        words: fields.to_words(),
        rates,
        bytes_per_second: rates.rate * port.transaction as f64,
        compiled,
        access: args.port.soc.map(|soc| Soc::from(soc).access()),
    };
    show(ui, &registers, || registers_text(&registers))?;
    Ok(ExitCode::SUCCESS)
}

fn decoded(words: &[String]) -> anyhow::Result<Fields> {
    let word = |text: &String| {
        let hex = text.strip_prefix("0x").map(|digits| u32::from_str_radix(digits, 16));
        hex.unwrap_or_else(|| text.parse()).with_context(|| format!("{text} is no 32-bit word"))
    };
    let [peak, burst, rate] = words else { anyhow::bail!("--decode takes three words") };
    Ok(Words { peak: word(peak)?, burst: word(burst)?, rate: word(rate)? }.fields()?)
}

/// Parses a rate with its unit: transactions or bytes per second.
fn per_second(text: &str) -> anyhow::Result<(Unit, u64)> {
    let bytes = text.parse::<BytesPerSec>().map(|rate| (Unit::Bytes, rate.0));
    let (unit, rate) = bytes
        .or_else(|_| text.parse::<Iops>().map(|rate| (Unit::Requests, rate.0)))
        .ok()
        .with_context(|| format!("`{text}` is no rate: write 15500000/s or 125MB/s"))?;
    anyhow::ensure!((1.0..1e15).contains(&rate), "`{text}` is out of range");
    Ok((unit, rate as u64))
}

fn encoded(args: &Qos400Args, port: &AxiPort) -> anyhow::Result<(Fields, Vec<Compiled>)> {
    let (unit, rate) = per_second(args.rate.as_deref().context("give --rate")?)?;
    let largest = if unit == Unit::Bytes { port.transaction } else { 1 };
    let burst = match (unit, args.burst.parse::<u64>()) {
        (Unit::Requests, Ok(n)) => n,
        (Unit::Bytes, Ok(n)) => n.saturating_mul(port.transaction),
        (Unit::Bytes, Err(_)) => args.burst.parse::<Bytes>().context("--burst")?.0,
        (Unit::Requests, Err(_)) => {
            anyhow::bail!("--burst {}: a number of transactions, as the rate is", args.burst)
        }
    };
    let peak = args.peak.as_deref().map(per_second).transpose()?;
    anyhow::ensure!(peak.is_none_or(|(of, _)| of == unit), "--peak and --rate count different things");
    let asked = Tspec { unit, rate, burst, peak: peak.map(|(_, peak)| peak), largest };
    let direction = |channel: &ChannelName| match channel {
        ChannelName::Aw => Direction::Read,
        ChannelName::Ar => Direction::Write,
    };
    let place = Place::Qos400(port.clone());
    let compiled: Vec<Compiled> = args
        .channel
        .iter()
        .map(|channel| compile(&asked, direction(channel), &place))
        .collect::<Result<_, _>>()?;
    let of =
        |value: u64| if unit == Unit::Bytes { value as f64 / port.transaction as f64 } else { value as f64 };
    Ok((Fields::new(of(rate), of(burst), asked.peak.map(of), port.clock_hz)?, compiled))
}

fn registers_text(r: &Registers) -> String {
    let mut out = format!(
        "rate   {:#05x} / 4096 of {} MHz: {:.0} transactions/s, {}\nburst  {} transactions\npeak   {:#04x} / 256: {:.0} transactions/s\n\n",
        r.fields.rate,
        r.clock_hz / 1e6,
        r.rates.rate,
        BytesPerSec(r.bytes_per_second),
        r.fields.burst,
        r.fields.peak,
        r.rates.peak,
    );
    if r.compiled.is_empty() {
        let w = r.words;
        let _ = writeln!(out, "p = {:#010x}\nb = {:#010x}\nr = {:#010x}", w.peak, w.burst, w.rate);
    }
    for c in &r.compiled {
        for setting in &c.settings {
            if let Setting::Register { .. } = setting {
                let _ = writeln!(out, "{setting}");
            }
        }
        if let Some(error) = c.rate.error.filter(|error| error.abs() >= 5e-7) {
            let _ = writeln!(out, "rate {:+.4}% of what is asked", error * 100.0);
        }
    }
    if let Some(access) = r.access {
        let _ = writeln!(out, "{access}");
    }
    out
}
