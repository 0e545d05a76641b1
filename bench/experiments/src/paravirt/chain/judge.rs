//! The steps of each cycle, from the records of the guest, the host and the I/O domain.

use std::collections::BTreeMap;

use rtvirtio_units::Nanos;
use rtvirtio_urgency::{GuestClock, Level};
use rtvirtio_urgency_host::{Event, Moment};
use serde::Deserialize;

use super::{RAISE, Span, Step, StepKind};

/// Class of urgent requests in the I/O domain's trace.
const URGENT: &str = "real-time";
/// Largest difference of a read's time between the guest's record and the I/O domain's: the host's
/// estimate of the guest's clock has an error. Cycles are further apart.
const SLACK: u64 = 1_000_000;

/// Times in a cycle of the guest's task, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// Time at which the timer fires.
    pub due: u64,
    /// Time at which the task runs.
    pub woke: u64,
    /// Time just before the read.
    pub asked: u64,
    /// Time at which the data are read.
    pub answered: u64,
}

impl Cycle {
    /// Parses a line of the guest's program.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let mut word = || words.next()?.ok();
        Some(Self { due: word()?, woke: word()?, asked: word()?, answered: word()? })
    }
}

/// A request in the I/O domain's trace, times on the host's clock.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Request {
    /// Name of the disk.
    pub vm: String,
    pub class: String,
    /// Time at which it was fetched.
    pub at_ns: u64,
    /// From fetching to submission.
    pub wait_ns: u64,
    /// From submission to completion.
    pub device_ns: u64,
}

impl Request {
    fn submitted(&self) -> u64 {
        self.at_ns.saturating_add(self.wait_ns)
    }

    fn completed(&self) -> u64 {
        self.submitted().saturating_add(self.device_ns)
    }
}

/// Results of the recorded cycles.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Cycles of which all steps are recorded.
    pub seen: u64,
    /// Steps over the judged cycles, in order.
    pub steps: Vec<Step>,
    /// For each judged cycle, requests of others at the device when its own was submitted.
    pub ahead: Vec<u64>,
}

/// The levels of a thread over time.
struct Levels(Vec<(u64, Level)>);

impl Levels {
    fn from_moments(moments: &[Moment]) -> Self {
        let level = |m: &Moment| match m.event {
            Event::Level(level, _) => Some((m.at.0, level)),
            Event::Report(_) => None,
        };
        Self(moments.iter().filter_map(level).collect())
    }

    /// Level at a time; `None` before the first record.
    fn at(&self, time: u64) -> Option<Level> {
        let after = self.0.partition_point(|(at, _)| *at <= time);
        Some(self.0.get(after.checked_sub(1)?)?.1)
    }

    /// Time from `from` to `to` in which it is an ordinary thread.
    fn ordinary(&self, from: u64, to: u64) -> u64 {
        let first = self.0.partition_point(|(at, _)| *at <= from).saturating_sub(1);
        let mut sum = 0;
        for (i, (at, level)) in self.0.iter().enumerate().skip(first).take_while(|(_, (at, _))| *at < to) {
            let end = self.0.get(i + 1).map_or(to, |(next, _)| (*next).min(to));
            sum += if level.priority == 0 { end.saturating_sub((*at).max(from)) } else { 0 };
        }
        sum
    }
}

fn text(level: Level) -> String {
    match level {
        Level { priority: 0, .. } => "ordinary".to_owned(),
        Level { priority, round_robin: false } => format!("fifo {priority}"),
        Level { priority, round_robin: true } => format!("rr {priority}"),
    }
}

/// Lengths, priorities and inversions of one step in all cycles.
#[derive(Default)]
struct Sums {
    lengths: Vec<u64>,
    priorities: BTreeMap<String, u64>,
    behind: u64,
    longest: u64,
    inversions: u64,
}

impl Sums {
    /// Counts a step of a cycle. `behind` is its waiting time for work that is not urgent.
    fn add(&mut self, length: u64, priority: String, behind: u64, is_inversion: bool) {
        self.lengths.push(length);
        *self.priorities.entry(priority).or_default() += 1;
        self.behind += u64::from(behind > 0);
        self.longest = self.longest.max(behind);
        self.inversions += u64::from(is_inversion);
    }

    fn step(self, kind: StepKind) -> Step {
        Step {
            kind,
            length: Span::from_lengths(self.lengths),
            priorities: self.priorities,
            behind: self.behind,
            longest_behind: Nanos(self.longest),
            inversions: self.inversions,
        }
    }
}

/// Judges all cycles. `moments` are those of the guest's only vCPU, `own` is its disk.
pub fn judge(cycles: &[Cycle], moments: &[Moment], requests: &[Request], own: &str) -> Judged {
    let levels = Levels::from_moments(moments);
    let (mut ours, mut others): (Vec<&Request>, Vec<&Request>) =
        requests.iter().partition(|request| request.vm == own);
    ours.sort_by_key(|request| request.at_ns);
    others.retain(|request| request.class != URGENT);
    others.sort_by_key(|request| request.submitted());
    let longest = others.iter().map(|request| request.device_ns).max().unwrap_or(0);
    let mut sums: [Sums; 6] = Default::default();
    let mut ahead = Vec::new();
    for cycle in in_host_time(cycles, moments).into_iter().flatten() {
        // One read a cycle: the last one before the answer.
        let before = ours.partition_point(|request| request.at_ns < cycle.answered);
        let request = before.checked_sub(1).and_then(|last| ours.get(last));
        let is_its = |request: &&&Request| {
            request.at_ns.saturating_add(SLACK) >= cycle.asked
                && request.completed() <= cycle.answered.saturating_add(SLACK)
        };
        let Some(request) = request.filter(is_its) else { continue };
        let at = [cycle.due, cycle.woke, cycle.asked, request.completed()].map(|time| levels.at(time));
        let [Some(at_due), Some(at_woke), Some(at_read), Some(at_completion)] = at else { continue };
        let [timer, ask, kick, domain, device, answer] = &mut sums;
        let of_vcpu = |sums: &mut Sums, level: Level, from: u64, to: u64| {
            let behind = levels.ordinary(from, to);
            sums.add(to.saturating_sub(from), text(level), behind, behind > RAISE.0);
        };
        of_vcpu(timer, at_due, cycle.due, cycle.woke);
        of_vcpu(ask, at_woke, cycle.woke, cycle.asked);
        of_vcpu(kick, at_read, cycle.asked, request.at_ns);
        let submitted = request.submitted();
        let from = others.partition_point(|other| other.submitted() <= request.at_ns);
        let to = others.partition_point(|other| other.submitted() < submitted);
        let is_overtaken = from < to;
        let behind = if is_overtaken { request.wait_ns } else { 0 };
        domain.add(request.wait_ns, request.class.clone(), behind, is_overtaken);
        let before = others[..to].iter().rev();
        let before = before.take_while(|other| other.submitted() + longest > submitted);
        ahead.push(before.filter(|other| other.completed() > submitted).count() as u64);
        // Requests at the device cannot be recalled, so no inversion can be counted there.
        device.add(request.device_ns, request.class.clone(), 0, false);
        of_vcpu(answer, at_completion, request.completed(), cycle.answered);
    }
    let steps = StepKind::ALL.into_iter().zip(sums).map(|(kind, sums)| sums.step(kind)).collect();
    Judged { seen: ahead.len() as u64, steps, ahead }
}

/// Cycles on the host's clock, each by the reports that were read up to it; `None` without any.
fn in_host_time(cycles: &[Cycle], moments: &[Moment]) -> Vec<Option<Cycle>> {
    let mut clock = GuestClock::default();
    let reports = moments.iter().filter_map(|m| match m.event {
        Event::Report(written) => Some((m.at, written)),
        Event::Level(..) => None,
    });
    let mut reports = reports.peekable();
    let mut convert = |cycle: &Cycle| {
        while let Some((read, written)) = reports.next_if(|(_, written)| written.0 <= cycle.answered) {
            clock.observe(read, written);
        }
        let host = |guest: u64| clock.to_host(Nanos(guest)).map(|host| host.0);
        Some(Cycle {
            due: host(cycle.due)?,
            woke: host(cycle.woke)?,
            asked: host(cycle.asked)?,
            answered: host(cycle.answered)?,
        })
    };
    cycles.iter().map(&mut convert).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_urgency::Reason;

    use super::*;

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;
    /// Start of the guest's clock after the host's.
    const OFFSET: u64 = 5_000 * MS;

    fn moment(at: u64, event: Event) -> Moment {
        Moment { at: Nanos(at), vcpu: 0, event }
    }

    fn level(at: u64, priority: u32) -> Moment {
        moment(at, Event::Level(Level::fifo(priority), Reason::Floor))
    }

    fn request(vm: &str, class: &str, at: u64, wait: u64, device: u64) -> Request {
        Request { vm: vm.to_owned(), class: class.to_owned(), at_ns: at, wait_ns: wait, device_ns: device }
    }

    /// A cycle that is due at `due` of the host's clock, in the guest's.
    fn cycle(due: u64) -> Cycle {
        let guest = due - OFFSET;
        Cycle { due: guest, woke: guest + 50 * US, asked: guest + 60 * US, answered: guest + 500 * US }
    }

    /// Records of a cycle without waiting: raised before the timer, lowered during the read, raised
    /// again afterwards.
    fn records(due: u64) -> (Vec<Moment>, Vec<Request>) {
        let moments = vec![
            moment(due - MS, Event::Report(Nanos(due - MS - OFFSET))),
            level(due - 40 * US, 90),
            level(due + 150 * US, 0),
            level(due + 399 * US, 90),
            level(due + 600 * US, 0),
        ];
        let requests = vec![
            // Submitted before ours, and at the device meanwhile.
            request("b", "best-effort", due, 20 * US, 200 * US),
            request("a", URGENT, due + 80 * US, 20 * US, 300 * US),
            request("b", "best-effort", due + 70 * US, 100 * US, 100 * US),
        ];
        (moments, requests)
    }

    fn inversions(judged: &Judged) -> Vec<u64> {
        judged.steps.iter().map(|step| step.inversions).collect()
    }

    #[test]
    fn a_chain_without_inversion() {
        let dues = [OFFSET + 1_000 * MS, OFFSET + 1_010 * MS];
        let (mut moments, mut requests) = (vec![level(OFFSET, 0)], Vec::new());
        for due in dues {
            let (m, r) = records(due);
            moments.extend(m);
            requests.extend(r);
        }
        let judged = judge(&dues.map(cycle), &moments, &requests, "a");
        assert_eq!((judged.seen, inversions(&judged)), (2, vec![0; 6]));
        assert_eq!(judged.ahead, [1, 1], "one of the neighbour's is at the device");
        let [timer, ask, kick, domain, device, answer] = &judged.steps[..] else { panic!("{judged:?}") };
        let high = BTreeMap::from([("fifo 90".to_owned(), 2)]);
        let class = BTreeMap::from([(URGENT.to_owned(), 2)]);
        for step in [timer, ask, kick, answer] {
            assert_eq!((&step.priorities, step.behind), (&high, 0), "{step:?}");
        }
        assert_eq!((&domain.priorities, &device.priorities), (&class, &class));
        let lengths = judged.steps.iter().map(|step| step.length.max.0);
        assert_eq!(lengths.collect::<Vec<_>>(), [50 * US, 10 * US, 20 * US, 20 * US, 300 * US, 100 * US]);
    }

    #[test]
    fn each_inversion_is_found_in_its_step() {
        let due = OFFSET + 1_000 * MS;
        let begin = || vec![level(OFFSET, 0)];
        // Raised 140 us after the timer, with a task that runs only then.
        let (mut late, mut after) = records(due);
        late[1] = level(due + 140 * US, 90);
        let slow = Cycle { woke: cycle(due).due + 140 * US, asked: cycle(due).due + 145 * US, ..cycle(due) };
        after[1].at_ns = due + 160 * US;
        after.truncate(2);
        let judged = judge(&[slow], &[begin(), late].concat(), &after, "a");
        assert_eq!(inversions(&judged), [1, 0, 0, 0, 0, 0]);
        assert_eq!((judged.steps[0].behind, judged.steps[0].longest_behind), (1, Nanos(140 * US)));
        assert_eq!(judged.steps[0].priorities, BTreeMap::from([("ordinary".to_owned(), 1)]));
        // A request of another VM that is not urgent is submitted while ours waits; an urgent one
        // may be.
        let (moments, mut requests) = records(due);
        let moments = [begin(), moments].concat();
        requests.push(request("b", "best-effort", due + 85 * US, 5 * US, MS));
        let judged = judge(&[cycle(due)], &moments, &requests, "a");
        assert_eq!((inversions(&judged), judged.ahead), (vec![0, 0, 0, 1, 0, 0], vec![2]));
        requests.last_mut().unwrap().class = URGENT.to_owned();
        assert_eq!(inversions(&judge(&[cycle(due)], &moments, &requests, "a")), [0; 6]);
        // Lowered before the read has left the guest.
        let (mut lowered, mut requests) = records(due);
        lowered[2] = level(due + 65 * US, 0);
        requests[1].at_ns = due + 200 * US;
        requests.truncate(2);
        requests[1].device_ns = 100 * US;
        let judged = judge(&[cycle(due)], &[begin(), lowered].concat(), &requests, "a");
        assert_eq!(inversions(&judged)[..3], [0, 0, 1]);
        // 100 us at the floor are allowed for a promotion; then there is no promotion.
        let (mut moments, requests) = records(due);
        moments[3] = level(due + 500 * US, 90);
        let judged = judge(&[cycle(due)], &[begin(), moments].concat(), &requests, "a");
        assert_eq!((judged.steps[5].inversions, judged.steps[5].behind), (0, 1));
        let (mut moments, requests) = records(due);
        moments.truncate(3);
        let later = Cycle { answered: cycle(due).answered + US, ..cycle(due) };
        let judged = judge(&[later], &[begin(), moments].concat(), &requests, "a");
        assert_eq!(inversions(&judged), [0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn what_is_not_recorded_is_not_judged() {
        let due = OFFSET + 1_000 * MS;
        let (moments, requests) = records(due);
        let all = [vec![level(OFFSET, 0)], moments.clone()].concat();
        assert_eq!(judge(&[cycle(due)], &all, &requests, "a").seen, 1);
        // No request, none of ours, no level, no clock.
        assert_eq!(judge(&[cycle(due)], &all, &[], "a").seen, 0);
        assert_eq!(judge(&[cycle(due)], &all, &requests, "c").seen, 0);
        assert_eq!(judge(&[cycle(due)], &moments[..1], &requests, "a").seen, 0);
        assert_eq!(judge(&[cycle(due)], &all[2..], &requests, "a").seen, 0);
        // Nor does a cycle take another one's request.
        assert_eq!(judge(&[cycle(due + 10 * MS)], &all, &requests, "a").seen, 0);
    }

    #[test]
    fn lines_of_the_guest() {
        let cycle = Cycle { due: 1, woke: 2, asked: 3, answered: 4 };
        assert_eq!(Cycle::parse("1 2 3 4"), Some(cycle));
        assert_eq!((Cycle::parse("1 2 3"), Cycle::parse("1 2 3 x")), (None, None));
    }
}
