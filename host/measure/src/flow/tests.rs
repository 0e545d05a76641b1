use std::sync::Arc;

use rtvirtio_spec::{Direction, Target};
use rtvirtio_units::Bytes;

use super::*;

const MS: u64 = 1_000_000;

fn load(echo: SocketAddr, rate: f64, target: Option<Target>) -> FlowLoad {
    let flow = Flow {
        name: "sv".into(),
        nic: 0,
        direction: Direction::Tx,
        frame: Bytes(140),
        rate: Iops(rate),
        burst: 1,
        mark: Some(Mark::Dscp(46)),
        target,
    };
    let peer = Peer { namespace: None, interface: "lo".into() };
    FlowLoad { vm: "relay".into(), flow, peer, echo, mtu: 1_500 }
}

fn target(percentile: f64, latency: Nanos) -> Option<Target> {
    Some(Target { percentile: Percentile(percentile), latency })
}

/// Echo server on the loopback that leaves out the frame numbers which `answers` rejects.
struct Echo {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Vec<usize>>>,
}

impl Echo {
    fn start(answers: fn(u64) -> bool) -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_read_timeout(Some(LOOK)).unwrap();
        let (address, stop) = (socket.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let serve = move || {
            let (mut buffer, mut lengths) = ([0; 2_048], Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
                lengths.push(len);
                let number = u64::from_be_bytes(buffer[8..HEAD].try_into().unwrap());
                if answers(number) {
                    socket.send_to(&buffer[..len], from).unwrap();
                }
            }
            lengths
        };
        Self { address, stop, thread: Some(std::thread::spawn(serve)) }
    }

    /// Stops it; returns the lengths of all datagrams received.
    fn end(mut self) -> Vec<usize> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn run_of(load: &FlowLoad) -> Result<TaskResult, MeasureError> {
    let length = Duration::from_millis(300);
    let all = run(std::slice::from_ref(load), Duration::from_millis(50), length, &|| false)?;
    Ok(all[0].result(load))
}

#[test]
fn every_frame_is_answered_and_judged() {
    let echo = Echo::start(|_| true);
    let long = Nanos(3_600_000 * MS);
    let met = run_of(&load(echo.address, 2_000.0, target(99.0, long))).unwrap();
    // On a busy machine the last ones may be lost.
    assert!(met.n > 590 && met.verdict == Some(Verdict::Met), "{met:?}");
    assert!(met.p50_ns > Nanos(0) && met.fio_p9999_ns <= met.max_ns, "{met:?}");
    let facts = met.flow.unwrap();
    assert_eq!((facts.lost + facts.unsent + met.n, facts.peer.as_str()), (600, "lo"), "{facts:?}");
    // Too few frames for this percentile.
    let open = run_of(&load(echo.address, 2_000.0, target(99.99, long))).unwrap();
    assert_eq!(open.verdict, Some(Verdict::Unproven), "{open:?}");
    assert!(open.why.contains("needs 29956 samples"), "{}", open.why);
    // No datagram makes the round trip in a nanosecond, also counted from its send.
    let missed = run_of(&load(echo.address, 2_000.0, target(50.0, Nanos(1)))).unwrap();
    assert_eq!(missed.verdict, Some(Verdict::Missed), "{missed:?}");
    assert!(missed.why.contains(" above 1ns"), "{}", missed.why);
    let none = run_of(&load(echo.address, 2_000.0, None)).unwrap();
    assert_eq!((none.verdict, none.why.as_str()), (None, "no target"));
    // 140 bytes with the headers of Ethernet, IPv4 and UDP.
    assert!(echo.end().iter().all(|len| *len == 98));
}

#[test]
fn what_is_lost_is_above_every_target() {
    let echo = Echo::start(|number| number % 10 != 3);
    let result = run_of(&load(echo.address, 2_000.0, target(95.0, Nanos(3_600_000 * MS)))).unwrap();
    assert_eq!(result.verdict, Some(Verdict::Missed), "{result:?}");
    let (n, lost) = (result.n, result.flow.as_ref().unwrap().lost);
    assert!((500..=540).contains(&n) && lost >= 60 && result.why.contains(" lost"), "{result:?}");
    assert!((result.achieved_rate.0 - n as f64 / 0.3).abs() < 1.0, "{result:?}");
    // The lost frame has waited until the end.
    assert!(result.max_ns >= Nanos(1_000 * MS), "{result:?}");
}

#[test]
fn a_flow_that_nothing_answers_is_an_error_with_its_remedy() {
    let silent = Echo::start(|_| false);
    let error = run_of(&load(silent.address, 1_000.0, None)).unwrap_err().to_string();
    assert!(error.contains("relay/sv") && error.contains("answers nothing"), "{error}");
    let closed = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let error = run_of(&load(closed, 1_000.0, None)).unwrap_err().to_string();
    assert!(error.contains("nothing listens on this port") && error.contains("--network-echo"), "{error}");
    let mut gone = load(silent.address, 1_000.0, None);
    gone.peer.interface = "no-such-if".into();
    let error = run_of(&gone).unwrap_err().to_string();
    assert!(error.contains("interface no-such-if"), "{error}");
    let stopped = run(&[load(silent.address, 1_000.0, None)], LOOK, LATE, &|| true).unwrap_err();
    assert!(matches!(stopped, MeasureError::Cancelled), "{stopped}");
    let many = load(silent.address, 1e8, None);
    let error = run(&[many], LOOK, Duration::from_secs(60), &|| false).unwrap_err().to_string();
    assert!(error.contains("measure for at most"), "{error}");
}

/// Frames that the host sent late are evidence neither against the network nor for it.
#[test]
fn frames_that_were_sent_late_prove_nothing() {
    let load = load(SocketAddr::from(([127, 0, 0, 1], 7)), 1_000.0, target(50.0, Nanos(MS)));
    let schedule =
        Schedule { begin: Instant::now(), rate: 1_000.0, burst: 1, count: 100, first: 0, run: [0; 8] };
    let due = |n: u64| schedule.due(n).as_nanos() as u64;
    let result = |sent_late: u64, on_the_way: u64| {
        let sent: Vec<u64> = (0..100).map(|n| due(n) + sent_late).collect();
        let received: Vec<u64> = sent.iter().map(|at| at + on_the_way).collect();
        measurement(&schedule, Some(Nanos(MS)), &sent, &received).result(&load)
    };
    assert_eq!(result(0, MS / 2).verdict, Some(Verdict::Met));
    assert_eq!(result(0, 2 * MS).verdict, Some(Verdict::Missed));
    let late = result(2 * MS, MS / 2);
    assert_eq!(late.verdict, Some(Verdict::Unproven), "{late:?}");
    assert!(late.why.contains("100 of these this host itself sent late, by up to 2"), "{}", late.why);
    assert_eq!((late.max_ns.0 / MS, late.fio_p9999_ns.0 / MS), (2, 0), "{late:?}");
    // Frames that were never sent: not the declared flow.
    let unsent = measurement(&schedule, Some(Nanos(MS)), &[due(0); 1], &[due(0) + 1]);
    assert_eq!(unsent.result(&load).verdict, Some(Verdict::Unproven));
    let mut half: Vec<u64> = (0..100).map(due).collect();
    half[50..].fill(0);
    let half = measurement(&schedule, Some(Nanos(MS)), &half, &[due(99); 100]).result(&load);
    assert!(half.why.contains("this host sent 50 of 100 frames"), "{}", half.why);
}

/// The guest can forge the following frames from the first one.
#[test]
fn an_answer_to_a_frame_that_was_not_sent_yet_is_none() {
    let load = load(SocketAddr::from(([127, 0, 0, 1], 7)), 1_000.0, target(50.0, Nanos(MS)));
    let schedule =
        Schedule { begin: Instant::now(), rate: 1_000.0, burst: 1, count: 100, first: 0, run: [0; 8] };
    let sent: Vec<u64> = (0..100).map(|n| schedule.due(n).as_nanos() as u64 + MS).collect();
    let received: Vec<u64> = sent.iter().map(|at| at - MS / 2).collect();
    let measured = measurement(&schedule, Some(Nanos(MS)), &sent, &received);
    assert_eq!((measured.answered, measured.lost), (0, 100));
    assert_eq!(measured.result(&load).verdict, Some(Verdict::Missed));
}

/// Frames of a burst are due at once, and the next burst by the rate.
#[test]
fn bursts_keep_the_rate() {
    let mut load = load(SocketAddr::from(([127, 0, 0, 1], 7)), 1_000.0, None);
    load.flow.burst = 4;
    let warm_up = Duration::from_millis(50);
    let schedule = Schedule::new(&load.flow, Instant::now(), warm_up, Duration::from_secs(1), [0; 8]);
    assert_eq!((schedule.first, schedule.count), (52, 1_052));
    let ms = |n: u64| (schedule.due(n) - LEAD).as_millis();
    assert_eq!([0, 3, 4, 7, 8].map(ms), [0, 0, 4, 4, 8]);
    // Short frames are padded by the network; the datagram still has its number.
    load.flow.frame = Bytes(20);
    assert_eq!(payload(&load), 18);
    load.flow.frame = Bytes(9_000);
    assert_eq!(payload(&load), 1_472);
    load.echo = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 7));
    assert_eq!(payload(&load), 1_452);
}
