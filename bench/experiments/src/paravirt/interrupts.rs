//! Requests from outside for an urgent task of a guest that computes, with and without promotion of
//! its vCPU by KVM's interrupts.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rtvirtio_stats::Random;
use rtvirtio_testbed::qemu::GUEST_PORT;
use rtvirtio_urgency_host::Raises;
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use super::Setup;
use super::guests::Guests;
use super::measure::{GUEST_TIMEOUT, WARM_UP, rate, start_work, work};
use crate::claims::Claim;
use crate::cyclictest::Latencies;
use crate::guest;
use crate::page::Section;
use crate::page::xy::table;
use crate::reservation::web::USER_NETWORK;

/// Pause between two requests: this long and up to twice that, so that they are not in phase with
/// the host's timers.
const PAUSE: Duration = Duration::from_millis(5);

/// Latencies of requests in one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// Whether KVM's interrupts raise A's vCPU.
    pub kvm: bool,
    /// From a request to its answer, as the host sees it.
    pub latencies: Latencies,
    /// Pieces of work a second of B.
    pub batch: f64,
    /// Causes and delays of the promotions of A's vCPU.
    pub raises: Raises,
    /// CPU time that A's vCPU had above its floor, in s.
    pub boosted: f64,
    /// Seconds in which A's budget was used up.
    pub exhausted: u64,
}

/// Sends requests to A's urgent task, while A and B compute.
pub fn run(
    guests: &mut Guests<'_>,
    (kvm, port): (bool, u16),
    length: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<Answers> {
    guests.kvm_interrupts = kvm;
    guests.set(Setup::Urgency, progress)?;
    guests.start_reporter(progress)?;
    guest::run_command(&mut guests.vms[0], &["sh", "-c", USER_NETWORK])?;
    guests.vms[0].spawn(&["rtvirtio-guestload", "pong", &GUEST_PORT.to_string()])?;
    start_work(&mut guests.vms[0])?;
    start_work(&mut guests.vms[1])?;
    progress.pause(WARM_UP)?;
    progress.step(if kvm { "requests, raised by KVM's interrupts" } else { "requests without" });
    let mut stream = connect(port, progress)?;
    let before = work(&mut guests.vms[1], progress)?;
    let mut random = Random::new(1);
    let mut latencies = Latencies::default();
    let begin = Instant::now();
    while begin.elapsed() < length {
        progress.check_cancelled()?;
        std::thread::sleep(PAUSE.mul_f64(1.0 + random.unit()));
        let (sent, mut byte) = (Instant::now(), [7]);
        stream.write_all(&byte).and_then(|()| stream.read_exact(&mut byte)).context("the guest's answer")?;
        latencies.add(sent.elapsed().as_micros() as u64 + 1);
    }
    latencies.seconds = begin.elapsed().as_secs_f64();
    let after = work(&mut guests.vms[1], progress)?;
    let status = guests.unfollow()?;
    guests.kill(0, &["rtvirtio-guestload", "rtvirtio-guest"])?;
    guests.kill(1, &["rtvirtio-guestload"])?;
    guests.set(Setup::None, progress)?;
    guests.kvm_interrupts = false;
    let raises = status.iter().flat_map(|(s, _)| &s.vcpus).map(|v| v.raises);
    let raises = raises.fold(Raises::default(), |sum, of| sum.with(&of));
    let counters = || status.iter().flat_map(|(s, _)| &s.vcpus).map(|v| v.counters);
    let boosted = counters().map(|c| c.boosted.as_secs_f64()).sum();
    let exhausted = counters().map(|c| c.exhausted).sum();
    Ok(Answers { kvm, latencies, batch: rate(before, after), raises, boosted, exhausted })
}

/// Connects once the guest listens: QEMU takes a connection before that.
fn connect(port: u16, progress: &dyn Progress) -> anyhow::Result<TcpStream> {
    let begin = Instant::now();
    loop {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(GUEST_TIMEOUT))?;
        let mut byte = [7];
        match stream.write_all(&byte).and_then(|()| stream.read_exact(&mut byte)) {
            Ok(()) => return Ok(stream),
            Err(e) if begin.elapsed() > GUEST_TIMEOUT => return Err(e).context("the guest does not answer"),
            Err(_) => progress.pause(Duration::from_millis(100))?,
        }
    }
}

fn all(runs: &[Answers], kvm: bool) -> (Latencies, Raises) {
    let (mut latencies, mut raises) = (Latencies::default(), Raises::default());
    for run in runs.iter().filter(|run| run.kvm == kvm) {
        latencies.merge(&run.latencies);
        raises = raises.with(&run.raises);
    }
    (latencies, raises)
}

/// Latency with promotion by KVM's interrupts over that without.
pub fn claims(runs: &[Answers]) -> Vec<Claim> {
    if runs.is_empty() {
        return Vec::new();
    }
    let [(with, _), (without, _)] = [true, false].map(|kvm| all(runs, kvm));
    let n = usize::try_from(with.n().min(without.n())).unwrap_or(usize::MAX);
    let claim = |share: f64, name: &str| {
        let what = format!(
            "{name} from a request over TCP to the answer of A's urgent task while A computes, where KVM's interrupts raise A, over where they do not"
        );
        let value = with.at(share) as f64 / without.at(share).max(1) as f64;
        Claim::new(format!("paravirt.interrupts.{name}_over_without"), &what, value, "times", n)
    };
    vec![claim(0.5, "p50"), claim(0.99, "p99")]
}

/// The runs as a part of the page.
pub fn section(runs: &[Answers]) -> Section {
    let row = |kvm: bool| {
        let (latencies, raises) = all(runs, kvm);
        let of = || runs.iter().filter(|run| run.kvm == kvm);
        let mean = |value: fn(&Answers) -> f64| of().map(value).sum::<f64>() / of().count().max(1) as f64;
        let late = raises.interrupts.counts.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
        vec![
            if kvm { "interrupts = \"kvm\"" } else { "without" }.to_owned(),
            of().count().to_string(),
            latencies.n().to_string(),
            format!("{:.0}", latencies.mean()),
            latencies.at(0.5).to_string(),
            latencies.at(0.99).to_string(),
            latencies.max_us.to_string(),
            late,
            raises.look.n().to_string(),
            format!("{:.1}", mean(|run| run.batch)),
            format!("{:.1}", mean(|run| run.boosted / run.latencies.seconds.max(1e-9) * 100.0)),
            of().map(|run| run.exhausted).sum::<u64>().to_string(),
        ]
    };
    let head = [
        "",
        "rounds",
        "requests",
        "mean us",
        "p50",
        "p99",
        "longest",
        "raised for an interrupt, since KVM made it pending: below 25, 50, 100, 200, 400, 800, 1600, 3200 us, above",
        "raised by a look",
        "B, pieces/s",
        "above the floor, % of a core",
        "seconds in which the budget was used up",
    ];
    Section {
        title: "A request for an urgent task of a guest that computes".to_owned(),
        text: vec![
            "A has a background job and an urgent task that answers a byte over TCP; B computes on the same core. Each request brings A an interrupt of its network card that no \
             timer announced."
                .to_owned(),
        ],
        plots: Vec::new(),
        tables: vec![table("answers", &head, vec![row(true), row(false)])],
    }
}
