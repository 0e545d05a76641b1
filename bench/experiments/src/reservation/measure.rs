//! Throughput and web requests of two guests on one core.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_cpu::Contract;
use rtvirtio_learn::statistic::median;
use rtvirtio_measure::http::Load;
use rtvirtio_stats::Random;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Progress, generated};

use super::guest_pair::{GuestPair, SERVER, Step, WARM_UP, share_of_core};
use super::kills::KillCommand;
use super::{
    Alone, BUDGETS, DEADLINE_OVER_RESPONSE, LOAD_CONNECTIONS, NEIGHBOUR_BUDGETS, ReservationData, WEB_SHARE,
    Web, WithNeighbour, web,
};
use crate::saved::Saved as _;
use rtvirtio_harness::cores::{keep_awake, on_one_core};

/// Length of the pieces of a measurement.
const SLICE: Duration = Duration::from_secs(2);
/// Requests that measure the unloaded response.
const CALIBRATION: usize = 30;

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct ReservationOptions {
    /// Length of each measurement of throughput, made in pieces of 2 s that alternate with those of
    /// all others.
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Measurements of throughput at each budget.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// Web requests under each condition; 0 leaves them out.
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub requests: usize,
    /// Period of the contracts for throughput.
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    pub period: Nanos,
    /// While its budget grows, the neighbour computes in a loop without memory accesses instead of
    /// serving clients.
    #[arg(long)]
    pub neighbour_computes: bool,
    /// Budgets of one VM alone, in percent of a core, such as 20,50,80 [default: 10 to 90 in tens].
    #[arg(long, value_delimiter = ',', value_name = "PERCENT")]
    pub budgets: Vec<u64>,
    /// vCPUs of the loaded neighbour of the web requests, each of which computes.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub neighbour_vcpus: u16,
    /// Keep idle CPUs from sleeping, as on a real-time host.
    #[arg(long)]
    pub awake: bool,
}

/// Measures the kills of a result again.
///
/// # Errors
/// When the result is of another host, a guest does not boot, or a contract cannot be applied.
pub fn with_kills(
    mut data: ReservationData,
    kill_command: &KillCommand,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<ReservationData> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-cpu-").tempdir()?;
    let contracts = on_one_core(labs, progress)?;
    let mut pair = GuestPair::boot(&contracts, 1, dir.path(), labs, progress)?;
    if pair.facts != data.host {
        bail!(
            "--kills: the result is of another host (Linux {}, {}): give another --out, or measure all anew",
            data.host.kernel,
            data.host.vmm
        );
    }
    data.kills = pair.kills(kill_command, dir.path(), progress)?;
    pair.stop()?;
    Ok(data)
}

/// Measures throughput, web requests and kills.
///
/// # Errors
/// A budget or period out of range, a guest that does not boot or answer, and cancellation.
pub fn measure(
    options: &ReservationOptions,
    kill_command: &KillCommand,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<ReservationData> {
    let budgets = if options.budgets.is_empty() { BUDGETS.to_vec() } else { options.budgets.clone() };
    if let Some(wrong) = budgets.iter().find(|b| !(1..=95).contains(*b)) {
        bail!("a budget of {wrong} %: it is 1 to 95 % of a core; the kernel keeps 5 % for others");
    }
    share_of_core(1, options.period).with_context(|| format!("--period {}", options.period))?;
    let dir = tempfile::Builder::new().prefix("rtvirtio-cpu-").tempdir()?;
    let contracts = on_one_core(labs, progress)?;
    let awake = if options.awake { keep_awake(progress) } else { None };
    // Throughput is the paper's, between two guests of one vCPU each.
    let mut pair = GuestPair::boot(&contracts, 1, dir.path(), labs, progress)?;
    progress.step("warming up");
    pair.throughput(&[true, true], Duration::from_secs(2), progress)?;
    let (alone, beside) = throughputs(&mut pair, &budgets, options, progress)?;
    let facts = pair.facts.clone();
    let kills = pair.kills(kill_command, dir.path(), progress)?;
    pair.stop()?;
    let (mut response_ms, mut deadline_ms, mut web) = (0.0, 0.0, Vec::new());
    if options.requests > 0 {
        let mut pair = GuestPair::boot(&contracts, options.neighbour_vcpus, dir.path(), labs, progress)?;
        pair.throughput(&[true, false], Duration::from_secs(2), progress)?;
        let (responses, _) = web::periodic(pair.ports[0], CALIBRATION, Duration::from_millis(100), progress)?;
        if responses.is_empty() {
            bail!("the guest answers no request");
        }
        response_ms = median(responses);
        // Whole milliseconds are easier to read.
        deadline_ms = (response_ms * DEADLINE_OVER_RESPONSE).ceil();
        web = requests(&mut pair, deadline_ms, options, progress)?;
        pair.stop()?;
    }
    Ok(ReservationData {
        schema: ReservationData::SCHEMA.to_owned(),
        host: facts,
        command: format!(
            "rtvirtio-bench reservation --for {} --repeat {} --requests {} --period {} --neighbour-vcpus {}{}{}",
            options.length,
            options.repeat,
            options.requests,
            options.period,
            options.neighbour_vcpus,
            if options.neighbour_computes { " --neighbour-computes" } else { "" },
            if options.awake { " --awake" } else { "" }
        ),
        generated: generated(),
        awake: awake.is_some(),
        backend: contracts.backend().to_string(),
        neighbour_vcpus: options.neighbour_vcpus,
        length: options.length.as_secs_f64(),
        slices: slices(options.length).0,
        period_us: options.period.0 / 1000,
        neighbour_computes: options.neighbour_computes,
        alone,
        beside,
        response_ms,
        deadline_ms,
        web,
        kills,
    })
}

/// Throughput over budget: of one guest alone, and with its neighbour.
///
/// Each measurement is the mean of short pieces. The pieces of all measurements and rounds are made
/// in one random order, so that a host that becomes slower for a minute affects all of them alike.
fn throughputs(
    pair: &mut GuestPair<'_>,
    budgets: &[u64],
    options: &ReservationOptions,
    progress: &dyn Progress,
) -> anyhow::Result<(Vec<Alone>, Vec<WithNeighbour>)> {
    let steps = steps(budgets, options.repeat);
    let (slices, slice) = slices(options.length);
    let mut order: Vec<usize> = (0..slices).flat_map(|_| 0..steps.len()).collect();
    Random::new(1).shuffle(&mut order);
    let mut sums = vec![([0.0; 2], 0.0); steps.len()];
    let mut bar = progress.bar("throughput over budget", order.len() as u64);
    for (done, i) in order.into_iter().enumerate() {
        bar.set(done as u64);
        let (mb_per_s, used) =
            pair.run_step(steps[i].1, options.period, options.neighbour_computes, slice, progress)?;
        let (sum, of_used) = &mut sums[i];
        sum.iter_mut().zip(mb_per_s).for_each(|(sum, mb)| *sum += mb / slices as f64);
        *of_used += used / slices as f64;
    }
    pair.contracts.release()?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for ((round, step), ([mb_per_s, neighbour_mb_per_s], used)) in steps.into_iter().zip(sums) {
        match step {
            Step::Alone(budget) => alone.push(Alone { budget, mb_per_s, used }),
            Step::WithNeighbour(neighbour, all_threads) => {
                beside.push(WithNeighbour {
                    round,
                    neighbour,
                    all_threads,
                    mb_per_s,
                    neighbour_mb_per_s,
                    used,
                });
            }
        }
    }
    Ok((alone, beside))
}

/// All measurements, each with its round.
fn steps(budgets: &[u64], rounds: usize) -> Vec<(usize, Step)> {
    let ends = [NEIGHBOUR_BUDGETS[0], NEIGHBOUR_BUDGETS[NEIGHBOUR_BUDGETS.len() - 1]];
    let alone = budgets.iter().map(|b| Step::Alone(*b));
    let all = NEIGHBOUR_BUDGETS.iter().map(|n| Step::WithNeighbour(*n, true));
    let vcpus_only = ends.iter().map(|n| Step::WithNeighbour(*n, false));
    let of_round: Vec<Step> = alone.chain(all).chain(vcpus_only).collect();
    (0..rounds).flat_map(|round| of_round.iter().map(move |s| (round, *s))).collect()
}

/// Number and length of the pieces of a measurement of this length.
fn slices(length: Nanos) -> (usize, Duration) {
    let length = Duration::from_nanos(length.0);
    let n = (length.as_secs_f64() / SLICE.as_secs_f64()).round().max(1.0);
    (n as usize, length.div_f64(n))
}

/// Web requests with an idle and a loaded neighbour, without and with a contract.
fn requests(
    pair: &mut GuestPair<'_>,
    deadline_ms: f64,
    options: &ReservationOptions,
    progress: &dyn Progress,
) -> anyhow::Result<Vec<Web>> {
    let period = Duration::from_secs_f64(deadline_ms / 1e3);
    let budget = period.mul_f64(WEB_SHARE);
    let nanos = |d: Duration| Nanos(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
    let reserved = Contract::new(nanos(budget), nanos(period)).context("the deadline leaves no budget")?;
    let mut all = Vec::new();
    // Contract, load, and whether each guest has a group of its own.
    let conditions = [
        (false, false, false),
        (true, false, false),
        (false, true, false),
        (false, true, true),
        (true, true, false),
    ];
    let mut bar = progress.bar("web requests", conditions.len() as u64);
    for (i, (contract, loaded, apart)) in conditions.into_iter().enumerate() {
        bar.set(i as u64);
        pair.contracts.release()?;
        pair.group(apart)?;
        if contract {
            pair.set_contracts(&[(0, reserved)], true)?;
        }
        let load = loaded.then(|| Load::start(&web::request(pair.ports[1]), LOAD_CONNECTIONS));
        if loaded {
            web::spin(&mut pair.vms[1], options.neighbour_vcpus)?;
        }
        progress.pause(WARM_UP)?;
        let (ms, failed) = web::periodic(pair.ports[0], options.requests, period, progress)?;
        if loaded {
            web::stop_spinning(&mut pair.vms[1])?;
        }
        load.map(Load::finish).transpose().context(SERVER)?;
        all.push(Web { loaded, contract, apart, ms, failed });
    }
    pair.contracts.release()?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_measures_everything() {
        let all = steps(&[10, 90], 2);
        assert_eq!(all.len(), 2 * (2 + 4 + 2));
        let of = |round| all.iter().filter(|s| s.0 == round).map(|s| s.1).collect::<Vec<_>>();
        assert_eq!(of(0), of(1));
        assert!(
            of(0).contains(&Step::WithNeighbour(40, false))
                && !of(0).contains(&Step::WithNeighbour(20, false))
        );
    }

    #[test]
    fn a_measurement_falls_into_equal_pieces() {
        for (length, n) in [(1, 1), (2, 1), (5, 3), (12, 6)] {
            let (slices, slice) = slices(Nanos(length * 1_000_000_000));
            assert_eq!(slices, n);
            assert!((slice.as_secs_f64() * n as f64 - length as f64).abs() < 1e-6);
        }
    }
}
