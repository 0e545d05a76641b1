//! Claims of a result: medians of the rounds.

use rtvirtio_learn::statistic::median;

use super::polling::PollingRun;
use super::test_bed::{LINK, System};
use super::{NetData, PathData, Situation, UplinkData, WebData};
use crate::claims::Claim;

/// Claims of the measured parts.
#[must_use]
pub fn claims(data: &NetData) -> Vec<Claim> {
    let parts = [flood, uplink, simulated, frames, tcp, crash, hostile, ping, sv, polling, web];
    parts.into_iter().flat_map(|part| part(data)).filter(|claim| claim.n > 0).collect()
}

pub(super) fn claim(id: &str, what: &str, value: f64, unit: &str, n: usize) -> Claim {
    Claim::new(format!("net.{id}"), what, value, unit, n)
}

fn requests<'a>(paths: impl Iterator<Item = &'a PathData>) -> usize {
    paths.map(|path| path.tails.n as usize).sum()
}

fn lost<'a>(paths: impl Iterator<Item = &'a PathData>) -> f64 {
    paths.map(|path| path.tails.lost as f64).sum()
}

fn flood(data: &NetData) -> Vec<Claim> {
    use Situation::{Flood, Idle};
    let n = data.paths(true, Idle).count();
    let p50 = |p: &PathData| p.tails.p50 as f64;
    let p999 = |p: &PathData| p.tails.p999 as f64;
    let mean = |p: &PathData| p.tails.mean;
    let over_idle =
        |domain, of: fn(&PathData) -> f64| data.path(domain, Flood, of) / data.path(domain, Idle, of);
    let over_tap = |situation, of: fn(&PathData) -> f64| {
        data.path(true, situation, of) / data.path(false, situation, of)
    };
    vec![
        claim(
            "idle.p50_over_tap",
            "idle round trip at 4 kHz, median, to that of tap and bridge",
            over_tap(Idle, p50),
            "ratio",
            n,
        )
        .at_most(1.1),
        claim(
            "flood.lost",
            "requests of the victim lost while its neighbour is flooded",
            lost(data.paths(true, Flood)),
            "requests",
            requests(data.paths(true, Flood)),
        )
        .at_most(0.0),
        claim(
            "flood.p999_over_idle",
            "the victim's p99.9 while its neighbour is flooded, to its own idle one",
            over_idle(true, p999),
            "ratio",
            n,
        )
        .at_most(2.0),
        claim("flood.p999_over_idle_tap", "the same on tap and bridge", over_idle(false, p999), "ratio", n),
        claim(
            "flood.cpu_over_tap",
            "CPU time for the flooded neighbour, to that of tap and bridge",
            over_tap(Flood, |p| p.cpus),
            "ratio",
            n,
        )
        .at_most(0.5),
        claim(
            "flood.kpps",
            "frames of the flood",
            data.path(true, Flood, |p| p.flood.unwrap_or(0.0)) / 1e3,
            "kpps",
            n,
        ),
        claim(
            "flood.mean_over_idle",
            "mean round trip under the flood, to the idle one",
            over_idle(true, mean),
            "ratio",
            n,
        )
        .at_most(1.1),
    ]
}

fn uplink(data: &NetData) -> Vec<Claim> {
    let n = data.uplinks.iter().filter(|u| u.domain && u.udp).count();
    let mut claims = Vec::new();
    for (name, udp) in [("udp", true), ("tcp", false)] {
        for (key, limit, of) in [
            ("p50_ms", 0.3, (|u: &UplinkData| u.tails.p50 as f64 / 1e6) as fn(&UplinkData) -> f64),
            ("p99_ms", 1.0, |u| u.tails.p99 as f64 / 1e6),
            ("p999_ms", 3.0, |u| u.tails.p999 as f64 / 1e6),
        ] {
            let what =
                format!("round trip while the neighbour sends {} through 100 Mbit/s", name.to_uppercase());
            let value = |domain, htb| data.uplink(domain, htb, udp, of);
            let id = |suffix: &str| format!("uplink.{name}.{key}{suffix}");
            claims.push(claim(&id(""), &what, value(true, false), "ms", n).at_most(limit));
            claims.push(claim(&id("_fifo"), &format!("{what}, on taps"), value(false, false), "ms", n));
            claims.push(claim(
                &id("_htb"),
                &format!("{what}, on taps with HTB"),
                value(false, true),
                "ms",
                n,
            ));
        }
    }
    let bounds = data.promises.iter().map(|[bound, worst, _]| *bound as f64 / (*worst).max(1) as f64);
    claims.extend([
        claim(
            "uplink.of_the_rest",
            "share of the link that is used while the neighbour sends UDP",
            data.uplink(true, false, true, |u| u.bits_per_second) / LINK,
            "share",
            n,
        )
        .at_least(0.97),
        claim(
            "delta.bound_over_measured",
            "the computed bound of the victim's frames to the longest one",
            bounds.fold(f64::INFINITY, f64::min),
            "ratio",
            data.promises.len(),
        )
        .at_least(1.0),
        claim(
            "delta.missed",
            "frames of the victim beyond their deadline",
            data.promises.iter().map(|p| p[2] as f64).sum(),
            "frames",
            data.promises.len(),
        ),
    ]);
    claims
}

fn simulated(data: &NetData) -> Vec<Claim> {
    let simulated = &data.simulated;
    let promised = simulated.promised as usize;
    vec![
        claim(
            "simulated.over_bound",
            "simulated frames beyond the computed bound",
            simulated.over_bound as f64,
            "frames",
            promised,
        )
        .at_most(0.0),
        claim(
            "simulated.missed",
            "simulated frames beyond an admitted deadline",
            simulated.missed as f64,
            "frames",
            promised,
        )
        .at_most(0.0),
        claim(
            "simulated.inexact",
            "capped frames that went at another nanosecond than the exact one",
            simulated.inexact as f64,
            "frames",
            simulated.capped as usize,
        )
        .at_most(0.0),
        claim(
            "simulated.rate_error",
            "deviation of the link's rate from the declared one",
            simulated.rate_error,
            "share",
            simulated.cases,
        )
        .at_most(0.001),
    ]
}

fn frames(data: &NetData) -> Vec<Claim> {
    let n = data.frames_one_port.len();
    let one = median(data.frames_one_port.clone());
    let flood = |i: usize, id: &str, what: &str| {
        let rates = data.floods.iter().map(|rates| rates[i] / 1e3);
        claim(id, what, median(rates.collect()), "kpps", data.floods.len())
    };
    vec![
        claim("kpps", "frames of 64 bytes from one port, one core", one / 1e3, "kpps", n).at_least(400.0),
        claim(
            "many.kpps_ratio",
            "the same of a network of 64 ports, to that of one",
            median(data.frames_of_many.clone()) / one,
            "ratio",
            n,
        )
        .at_least(0.8),
        flood(0, "flood.alone_kpps", "frames of the flood into a link that nothing reads, without guests"),
        flood(1, "flood.bridge_kpps", "the same through the bridge"),
    ]
}

fn tcp(data: &NetData) -> Vec<Claim> {
    let cut = data.tcp.iter().zip(&data.tcp_cut).map(|([tap, _], cut)| tap / cut);
    vec![
        claim(
            "tcp_over_tap",
            "TCP from an emulated guest, to tap and bridge",
            median(data.tcp.iter().map(|[tap, domain]| tap / domain).collect()),
            "ratio",
            data.tcp.len(),
        )
        .at_least(0.9),
        claim(
            "tcp_cut_over_tap",
            "the same through a declared link of 10 Gbit/s, where large segments are cut",
            median(cut.collect()),
            "ratio",
            data.tcp_cut.len(),
        ),
    ]
}

fn crash(data: &NetData) -> Vec<Claim> {
    let crashes = &data.crashes;
    vec![
        claim(
            "crash.link_back_s",
            "from kill -9 until the victim answers, the longest",
            crashes.back_s.iter().copied().fold(0.0, f64::max),
            "s",
            crashes.back_s.len(),
        )
        .at_most(1.1),
        claim(
            "crash.broken",
            "kills after which it does not",
            crashes.broken as f64,
            "kills",
            crashes.back_s.len() + crashes.broken as usize,
        )
        .at_most(0.0),
    ]
}

fn hostile(data: &NetData) -> Vec<Claim> {
    let attacked = || data.paths(true, Situation::Attack);
    let what = "requests of the victim lost while another guest attacks";
    vec![claim("hostile.lost", what, lost(attacked()), "requests", requests(attacked())).at_most(0.0)]
}

fn ping(data: &NetData) -> Vec<Claim> {
    use Situation::{Flood, Idle};
    let cells = |domain, situation| {
        data.pings.iter().filter(move |cell| cell.domain == domain && cell.situation == situation)
    };
    let mean = |domain, situation| median(cells(domain, situation).map(|cell| cell.tails.mean).collect());
    let ratio = |domain| mean(domain, Flood) / mean(domain, Idle);
    let n = requests(cells(true, Idle));
    vec![
        claim(
            "ping.mean_over_idle",
            "mean of pings to a VM while its neighbour is flooded, to the idle mean",
            ratio(true),
            "ratio",
            n,
        )
        .at_most(1.1),
        claim("ping.mean_over_idle_tap", "the same on tap and bridge", ratio(false), "ratio", n),
        claim("ping.lost", "pings lost under the flood", lost(cells(true, Flood)), "requests", n)
            .at_most(0.0),
    ]
}

fn sv(data: &NetData) -> Vec<Claim> {
    let Some(sv) = &data.sv else { return Vec::new() };
    let runs = |of: (bool, bool)| sv.runs.iter().filter(move |run| (run.flooded, run.contract) == of);
    let frames = |of| runs(of).map(|run| (run.n + run.lost) as usize).sum::<usize>();
    let lost = |of| runs(of).map(|run| run.lost).sum::<u64>() as f64;
    let over = |of| median(runs(of).map(|run| run.p999 as f64).collect()) / sv.target_ns.0.max(1) as f64;
    let (idle, alone, whole) = ((false, false), (true, false), (true, true));
    let what = "sampled values without an answer next to floods on network and disk";
    let tail = "p99.9 from publisher through client and disk and back next to both floods, to its target";
    let mut claims = Vec::new();
    if runs(whole).next().is_some() {
        let path = "with contracts for network, disk and CPU";
        let claim = |id, what, value, unit| claim(id, &format!("{what}; {path}"), value, unit, frames(whole));
        claims.push(claim("sv.lost", what, lost(whole), "frames").at_most(0.0));
        claims.push(claim("sv.p999_over_target", tail, over(whole), "ratio").at_most(1.0));
    }
    for (of, id, what, value, unit) in [
        (alone, "sv.lost_without_cpu", format!("{what}; without the CPU contract"), lost(alone), "frames"),
        (
            alone,
            "sv.p999_over_target_without_cpu",
            "the same without the CPU contract".to_owned(),
            over(alone),
            "ratio",
        ),
        (idle, "sv.p999_over_target_idle", "the same without floods".to_owned(), over(idle), "ratio"),
    ] {
        if runs(of).next().is_some() {
            claims.push(claim(id, &what, value, unit, frames(of)));
        }
    }
    claims
}

fn web(data: &NetData) -> Vec<Claim> {
    data.web.as_ref().map(WebData::claims).unwrap_or_default()
}

fn polling(data: &NetData) -> Vec<Claim> {
    use Situation::{Flood, Idle};
    let Some(polling) = &data.polling else { return Vec::new() };
    let runs = |system, situation| {
        polling.runs.iter().filter(move |run| run.system == system && run.situation == situation)
    };
    let value =
        |system, situation, of: fn(&PollingRun) -> f64| median(runs(system, situation).map(of).collect());
    let over_dpdk = |situation, of| value(System::Domain, situation, of) / value(System::Dpdk, situation, of);
    let over_idle = |system, of| value(system, Flood, of) / value(system, Idle, of);
    let lost = |system| runs(system, Flood).map(|run| run.tails.lost as f64).sum::<f64>();
    let n = runs(System::Dpdk, Idle).count().min(runs(System::Domain, Idle).count());
    let flooded = |system| runs(system, Flood).map(|run| run.tails.n as usize).sum::<usize>();
    let p50 = |run: &PollingRun| run.tails.p50 as f64;
    let p999 = |run: &PollingRun| run.tails.p999 as f64;
    let cpus = |run: &PollingRun| run.switch_cpus;
    vec![
        claim(
            "idle_polling.p50_over_dpdk",
            "idle round trip at 4 kHz through a polling domain, median, to that of OVS-DPDK",
            over_dpdk(Idle, p50),
            "ratio",
            n,
        )
        .at_most(1.1),
        claim(
            "idle_polling.p999_over_dpdk",
            "the same, 99.9th percentile",
            over_dpdk(Idle, p999),
            "ratio",
            n,
        )
        .at_most(1.5),
        claim(
            "idle_polling.cpus",
            "CPUs of the polling domain meanwhile",
            value(System::Domain, Idle, cpus),
            "CPUs",
            n,
        ),
        claim("idle_polling.cpus_dpdk", "those of OVS-DPDK", value(System::Dpdk, Idle, cpus), "CPUs", n),
        claim(
            "flood.lost_polling",
            "requests of the victim lost while its neighbour is flooded, through a polling domain",
            lost(System::Domain),
            "requests",
            flooded(System::Domain),
        )
        .at_most(0.0),
        claim(
            "flood.lost_dpdk",
            "the same through OVS-DPDK",
            lost(System::Dpdk),
            "requests",
            flooded(System::Dpdk),
        ),
        claim(
            "flood.p999_over_idle_polling",
            "p99.9 under the flood through a polling domain, to its own idle one",
            over_idle(System::Domain, p999),
            "ratio",
            n,
        ),
        claim(
            "flood.p999_over_idle_dpdk",
            "the same through OVS-DPDK",
            over_idle(System::Dpdk, p999),
            "ratio",
            n,
        ),
    ]
}
