//! VMs that are favoured while something starts in them, as their guests say.
//!
//! A guest writes `start ID MS` and `end ID` to a virtio-serial port
//! ([`rtvirtio_startup::PORT`]), which `rtvirtio-guest start` does. The host raises the VM's BFQ
//! weight meanwhile, and lets the device wait longer for its next request, for as long as its
//! budget lasts ([`FavourLimits`]). All values are in the journal before anything is changed, so
//! `rtvirtio revert` restores the first ones whenever this is cut off.

mod raise;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Binding, Raised};
use rtvirtio_startup::{Favour, FavourCounters, FavourLimits, SLICE_IDLE, StartMessage};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::{PortState, StartPort};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

pub use raise::{Change, Raise};
use watch::Watch;

use crate::dirs::Dirs;
use crate::error::{Result, bail};
use crate::progress::Progress;

/// Largest weight that BFQ accepts.
pub const LARGEST_WEIGHT: u32 = 1000;
/// Longest wait for words: cancellation and VMs that come back are noticed after it.
const LONGEST_WAIT: Duration = Duration::from_millis(200);
/// Interval of checks whether the weights are still in force.
const LOOK: Duration = Duration::from_secs(1);
/// Pause before a failed change is tried again.
const RETRY_INTERVAL: Nanos = Nanos::from_millis(1000);
/// Interval between raises of one VM in the long run: a guest that alternates starts and ends does
/// not switch weights all the time.
const BETWEEN_RAISES: Nanos = Nanos::from_millis(250);
/// Depth of that token bucket in time: some short starts come one after the other.
const RAISES_AT_ONCE: Nanos = Nanos::from_millis(2000);
/// Shortest time between two reads of the ports, so that a guest that says words without end
/// costs little.
const SHORTEST_WAIT: Duration = Duration::from_millis(2);

/// A VM and the port of its guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartVm {
    /// Name of the VM in the spec.
    pub name: String,
    /// QEMU's socket of the port.
    pub socket: PathBuf,
}

/// Options of favouring VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartsOptions {
    /// Settings of a VM while something starts in it; a weight up to [`LARGEST_WEIGHT`].
    pub raised: Raised,
    /// Limits on the time for which a VM is favoured.
    pub limits: FavourLimits,
    /// Whether starts are also recognised without the guest's word, by
    /// [`rtvirtio_startup::Recogniser`]. A job that wakes up and reads small files is taken for
    /// one.
    pub recognise: bool,
}

impl Default for StartsOptions {
    fn default() -> Self {
        let raised = Raised { weight: LARGEST_WEIGHT, slice_idle: Some(SLICE_IDLE) };
        Self { raised, limits: FavourLimits::default(), recognise: false }
    }
}

/// Something that happened to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StartEvent {
    pub vm: String,
    /// Kind of the event.
    #[serde(flatten)]
    pub what: StartEventKind,
}

/// Kinds of events of a followed VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum StartEventKind {
    /// The guest's port is connected.
    Connected,
    /// The guest's port was closed: the VM has ended.
    Closed,
    /// The VM's settings were raised.
    Raised,
    /// Settings are as before the raise.
    Lowered(FavourCounters),
}

/// Reason for the end of following.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartsEnded {
    /// The user stopped it; the weights are as before.
    Cancelled,
    /// The settings were put back by another program.
    PutBack,
}

/// A VM whose starts are followed.
struct Followed {
    name: String,
    port: StartPort,
    favour: Favour,
    watch: Option<Watch>,
    /// State that was last set or tried.
    raised: bool,
    /// Time of the next try after a failure.
    again: Option<Nanos>,
    pace: RaiseBucket,
    /// Whether it was last reported as raised.
    shown: bool,
    /// Last reported failure of each subject.
    reported: BTreeMap<Subject, String>,
}

/// Time at which a VM's raises so far would be over at their long-term rate: a token bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RaiseBucket(Nanos);

impl RaiseBucket {
    /// Whether it is to be raised now.
    fn is_raised(&mut self, wanted: bool, raised: bool, now: Nanos) -> bool {
        if wanted && !raised {
            if now.0.saturating_add(RAISES_AT_ONCE.0) < self.0.0.saturating_add(BETWEEN_RAISES.0) {
                return false;
            }
            *self = Self(Nanos(self.0.max(now).0.saturating_add(BETWEEN_RAISES.0)));
        }
        wanted
    }
}

/// Subject of a warning about a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Port,
    Recogniser,
    Weight,
}

impl Followed {
    fn warn_once(&mut self, subject: Subject, why: String, progress: &dyn Progress) {
        if self.reported.get(&subject) != Some(&why) {
            progress.warn(&format!("{}: {why}", self.name));
            self.reported.insert(subject, why);
        }
    }
}

/// Follows VMs until it is stopped, or what it has applied is put back. `report` gets each event.
///
/// # Errors
/// As [`Raise::begin`]; [`Kind::NotPutBack`](crate::Kind::NotPutBack) when a weight remains at the
/// end.
pub fn follow_starts(
    vms: &[StartVm],
    binding: &Binding,
    options: &StartsOptions,
    dirs: &Dirs,
    progress: &dyn Progress,
    report: &mut dyn FnMut(StartEvent) -> Result<()>,
) -> Result<StartsEnded> {
    if let Some(unknown) = vms.iter().find(|vm| !binding.vms.contains_key(&vm.name)) {
        let known: Vec<&str> = binding.vms.keys().map(String::as_str).collect();
        bail!(Argument, "no VM `{}`: there is {}", unknown.name, known.join(", "));
    }
    let names: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
    let mut raise = Raise::begin(&names, options.raised, binding, dirs)?;
    let begin = Instant::now();
    let followed = |vm: &StartVm| -> Result<Followed> {
        let watch = options.recognise.then(|| Watch::new(&vm.name, binding, Nanos(0))).transpose()?;
        Ok(Followed {
            name: vm.name.clone(),
            port: StartPort::new(&vm.socket),
            favour: Favour::new(options.limits, Nanos(0)),
            watch,
            raised: false,
            again: None,
            pace: RaiseBucket::default(),
            shown: false,
            reported: BTreeMap::new(),
        })
    };
    let mut all = vms.iter().map(followed).collect::<Result<Vec<_>>>()?;
    let mut next_look = begin + LOOK;
    while !progress.is_cancelled() {
        if Instant::now() >= next_look {
            next_look = Instant::now() + LOOK;
            if !raise.is_in_force()? {
                return Ok(StartsEnded::PutBack);
            }
        }
        for vm in &mut all {
            let now = now_since(begin);
            listen(vm, now, progress, report)?;
            sample_counters(vm, now, options.limits.longest, progress);
            if step(vm, now, &mut raise, progress, report)? == Change::PutBack {
                return Ok(StartsEnded::PutBack);
            }
        }
        std::thread::sleep(SHORTEST_WAIT);
        let longest = if options.recognise { LONGEST_WAIT / 4 } else { LONGEST_WAIT };
        wait(&all, now_since(begin), longest)?;
    }
    raise.end()?;
    Ok(StartsEnded::Cancelled)
}

fn now_since(begin: Instant) -> Nanos {
    Nanos(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

/// Reads the guest's words from the port.
fn listen(
    vm: &mut Followed,
    now: Nanos,
    progress: &dyn Progress,
    report: &mut dyn FnMut(StartEvent) -> Result<()>,
) -> Result<()> {
    let favour = &mut vm.favour;
    let state = vm.port.poll(&mut |word: StartMessage| favour.hear(word, now));
    let what = match state {
        PortState::Connected => StartEventKind::Connected,
        PortState::Closed => {
            vm.favour.forget(now);
            StartEventKind::Closed
        }
        PortState::Same | PortState::Absent => return Ok(()),
        PortState::Failed(e) => {
            let why = format!("its port {} cannot be used: {e}", vm.port.path().display());
            vm.warn_once(Subject::Port, why, progress);
            return Ok(());
        }
    };
    report(StartEvent { vm: vm.name.clone(), what })
}

/// Samples the counters of a VM whose starts are to be recognised.
fn sample_counters(vm: &mut Followed, now: Nanos, longest: Nanos, progress: &dyn Progress) {
    let Some(watch) = &mut vm.watch else { return };
    match watch.poll(now, longest) {
        Ok(Some(word)) => vm.favour.hear(word, now),
        Ok(None) => {}
        // Also for a VM that has ended.
        Err(e) => vm.warn_once(Subject::Recogniser, format!("starts are not recognised: {e:#}"), progress),
    }
}

/// Sets the weight according to the budget.
fn step(
    vm: &mut Followed,
    now: Nanos,
    raise: &mut Raise,
    progress: &dyn Progress,
    report: &mut dyn FnMut(StartEvent) -> Result<()>,
) -> Result<Change> {
    let wanted = vm.favour.is_favoured(now);
    let wanted = vm.pace.is_raised(wanted, vm.raised, now);
    if wanted == vm.raised && vm.again.is_none_or(|again| now < again) {
        return Ok(Change::Done);
    }
    match raise.set(&vm.name, wanted) {
        Ok(Change::Done) => vm.again = None,
        Ok(other) => return Ok(other),
        Err(e) => {
            // What another program has set stays until that program takes it back. What failed in
            // passing must not stay raised.
            vm.warn_once(Subject::Weight, format!("{e:#}"), progress);
            vm.again = Some(Nanos(now.0.saturating_add(RETRY_INTERVAL.0)));
            vm.raised = wanted;
            return Ok(Change::Done);
        }
    }
    vm.raised = wanted;
    if std::mem::replace(&mut vm.shown, wanted) == wanted {
        return Ok(Change::Done);
    }
    let what = if wanted { StartEventKind::Raised } else { StartEventKind::Lowered(vm.favour.counters()) };
    report(StartEvent { vm: vm.name.clone(), what })?;
    Ok(Change::Done)
}

/// Waits for a word, or until a budget or a start ends.
fn wait(all: &[Followed], now: Nanos, longest: Duration) -> Result<()> {
    let next = all.iter().filter_map(|vm| vm.favour.until()).map(|until| until.0.saturating_sub(now.0)).min();
    let longest = next.map_or(longest, |ns| Duration::from_nanos(ns).min(longest));
    let time = Timespec { tv_sec: 0, tv_nsec: longest.subsec_nanos().into() };
    let mut fds: Vec<PollFd<'_>> = all
        .iter()
        .filter_map(|vm| vm.port.descriptor())
        .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
        .collect();
    match poll(&mut fds, Some(&time)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_and_ends_in_turn_switch_no_weight_all_the_time() {
        let (mut pace, mut raised, mut raises) = (RaiseBucket::default(), false, 0);
        // 100 starts and ends in a second, as often as words are read.
        for i in 0..700 {
            let now = Nanos(i * 10_000_000);
            let next = pace.is_raised(i % 2 == 0, raised, now);
            raises += u32::from(next && !raised);
            raised = next;
        }
        assert!((30..=36).contains(&raises), "{raises} raises in 7 s");
        // Some come at once, and one that lasts is not taken back.
        let mut pace = RaiseBucket::default();
        let at_once = (0..100).filter(|_| pace.is_raised(true, false, Nanos(0))).count();
        assert_eq!((at_once, pace.is_raised(true, true, Nanos(1))), (8, true));
        assert!(!pace.is_raised(false, true, Nanos(2)) && !pace.is_raised(true, false, Nanos(3)));
        assert!(pace.is_raised(true, false, BETWEEN_RAISES));
    }
}
