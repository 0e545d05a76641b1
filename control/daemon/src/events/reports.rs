//! Events of VMs and their managers: of libvirt's VMs, and of the QMP monitors that QEMU has for
//! events alone.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;

use rtvirtio_vmm::libvirt::DomainEvents;
use rtvirtio_vmm::{MonitorEvents, VmmError};

use super::retry::Retry;
use crate::host::Millis;

/// Most daemons and monitors that are listened to; scans find what changes at others.
const MAX_SOURCES: usize = 256;
/// Time without an answer, in ms, after which a source is reported as not heard. A libvirt daemon
/// that has just started takes 12 s.
const SILENT: u64 = 15_000;

/// Source of events: libvirt or a QMP monitor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reporter {
    /// The libvirt daemon at this URI.
    Libvirt(String),
    /// The QMP monitor of a VM with these processes.
    Monitor { socket: PathBuf, pids: Vec<u32> },
}

impl Reporter {
    /// Likely reason why it has not answered.
    fn silence(&self) -> &'static str {
        match self {
            Self::Libvirt(_) => "it has not answered yet",
            Self::Monitor { .. } => "it has not answered yet; another client may be connected to it",
        }
    }
}

/// Summary of the events that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reported {
    /// Number of events that may concern a contract.
    pub events: u64,
    /// Whether any may be about contracts themselves.
    pub contracts: bool,
}

impl Reported {
    fn add(&mut self, other: Self) {
        self.events += other.events;
        self.contracts |= other.contracts;
    }
}

#[derive(Debug)]
enum Stream {
    Libvirt(DomainEvents),
    Monitor(MonitorEvents),
}

impl Stream {
    fn open(reporter: &Reporter) -> Result<Self, String> {
        let words = |e: VmmError| e.to_string();
        match reporter {
            Reporter::Libvirt(uri) => DomainEvents::start(uri).map(Self::Libvirt).map_err(words),
            Reporter::Monitor { socket, pids } => {
                let monitor = MonitorEvents::connect(socket).map_err(words)?;
                match monitor.listener().map_err(words)? {
                    Some(pid) if pids.contains(&pid) => Ok(Self::Monitor(monitor)),
                    Some(pid) => Err(format!("{} is process {pid}'s, not the VM's", socket.display())),
                    None => Err(format!(
                        "the owner of socket {} cannot be determined from here",
                        socket.display()
                    )),
                }
            }
        }
    }

    fn read(&mut self) -> Result<Reported, String> {
        match self {
            Self::Libvirt(events) => events
                .read()
                .map(|heard| Reported { events: heard.events, contracts: heard.contracts })
                .map_err(|e| e.to_string()),
            Self::Monitor(events) => {
                events.read().map(|events| Reported { events, contracts: false }).map_err(|e| e.to_string())
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Libvirt(events) => events.as_fd(),
            Self::Monitor(events) => events.as_fd(),
        }
    }
}

/// Connection to an event source.
#[derive(Debug, Default)]
struct Listener {
    stream: Option<Stream>,
    retry: Retry,
    /// Time at which the stream was opened.
    opened: Millis,
    /// Whether it has answered.
    is_heard: bool,
    /// Reason why it is not heard, for clients.
    problem: Option<String>,
}

impl Listener {
    fn failed(&mut self, why: String, now: Millis) {
        // A source that was heard is retried before it is reported: a VM that ends is no problem.
        self.problem = (!self.is_heard).then_some(why);
        (self.stream, self.is_heard) = (None, false);
        self.retry.failed(now);
    }
}

/// All event sources; no call blocks.
#[derive(Debug, Default)]
pub(super) struct Reports {
    listeners: BTreeMap<Reporter, Listener>,
}

impl Reports {
    /// Listens to these sources and to no others; retries failed ones after a delay.
    pub fn set(&mut self, wanted: BTreeSet<Reporter>, now: Millis) {
        self.listeners.retain(|reporter, _| wanted.contains(reporter));
        for reporter in wanted.into_iter().take(MAX_SOURCES) {
            let listener = self.listeners.entry(reporter.clone()).or_default();
            if listener.stream.is_some() {
                if !listener.is_heard && now.since(listener.opened) >= SILENT {
                    listener.problem = Some(reporter.silence().to_owned());
                }
                continue;
            }
            if !listener.retry.is_due(now) {
                continue;
            }
            listener.retry.begins(now);
            match Stream::open(&reporter) {
                Ok(stream) => (listener.stream, listener.opened) = (Some(stream), now),
                Err(why) => listener.failed(why, now),
            }
        }
    }

    /// Descriptors to poll for input.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.listeners.values().filter_map(|listener| listener.stream.as_ref()).map(Stream::fd).collect()
    }

    /// Reads what has arrived. The end of a stream that was heard counts as an event too.
    pub fn read(&mut self, now: Millis) -> Reported {
        let mut reported = Reported::default();
        for listener in self.listeners.values_mut() {
            match listener.stream.as_mut().map(Stream::read) {
                None => {}
                Some(Ok(of)) => {
                    if of.events > 0 {
                        (listener.is_heard, listener.problem) = (true, None);
                    }
                    reported.add(of);
                }
                Some(Err(why)) => {
                    if listener.is_heard {
                        reported.add(Reported { events: 1, contracts: true });
                    }
                    listener.failed(why, now);
                }
            }
        }
        reported
    }

    /// Messages about sources that are not heard, with the reason.
    pub fn problems(&self) -> Vec<String> {
        let one = |(reporter, listener): (&Reporter, &Listener)| {
            let why = listener.problem.as_ref()?;
            let of = match reporter {
                Reporter::Libvirt(uri) => format!("events of libvirt's domains at {uri}"),
                Reporter::Monitor { socket, .. } => format!("events of the monitor {}", socket.display()),
            };
            Some(format!("{of} are not received, so only scans find changes there: {why}"))
        };
        self.listeners.iter().filter_map(one).collect()
    }

    /// Number of daemons and monitors that are heard.
    pub fn heard(&self) -> usize {
        self.listeners.values().filter(|listener| listener.is_heard).count()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command, Stdio};
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    use rtvirtio_testkit::{HANG, Need, has};
    use rtvirtio_vmm::EVENTS_CHARDEV;
    use rtvirtio_vmm::probe::QEMU;

    use super::*;

    struct Ends(Child);

    impl Drop for Ends {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Reads until `holds` returns true; returns the sum of the reports.
    fn read_until(
        reports: &mut Reports,
        now: Millis,
        holds: impl Fn(&Reports, Reported) -> bool,
    ) -> Reported {
        let (start, mut all) = (Instant::now(), Reported::default());
        loop {
            all.add(reports.read(now));
            if holds(reports, all) {
                return all;
            }
            assert!(start.elapsed() < HANG, "{all:?} {reports:?}");
            sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_daemon_that_is_not_there_is_said_and_tried_again() {
        if !has("a daemon that is not there", &[Need::Program("virsh")]) {
            return;
        }
        let uri = "qemu+unix:///system?socket=/nonexistent/libvirt-sock";
        let wanted = || BTreeSet::from([Reporter::Libvirt(uri.to_owned())]);
        let mut reports = Reports::default();
        for (now, tries_again) in [(0, true), (999, false), (1_000, true), (2_999, false)] {
            reports.set(wanted(), Millis(now));
            assert_eq!(reports.fds().len(), usize::from(tries_again), "{now}");
            let all = read_until(&mut reports, Millis(now), |reports, _| reports.fds().is_empty());
            assert_eq!((all, reports.heard()), (Reported::default(), 0), "it was never heard");
            let problems = reports.problems();
            assert!(problems[0].contains(uri) && problems[0].contains("was not reached"), "{problems:?}");
        }
        reports.set(BTreeSet::new(), Millis(5_000));
        assert!(reports.problems().is_empty());
    }

    /// A QEMU without a guest, with a monitor for events and one for commands.
    #[test]
    fn a_real_monitor_is_heard_and_another_one_stays_free() {
        if !has("a real monitor", &[Need::Program(QEMU)]) {
            return;
        }
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let (events, commands) = (dir.path().join("events"), dir.path().join("qmp"));
        let mut qemu = Command::new(QEMU);
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "none", "-S"])
            .arg("-chardev")
            .arg(format!("socket,id={EVENTS_CHARDEV},path={},server=on,wait=off", events.display()))
            .args(["-mon", &format!("chardev={EVENTS_CHARDEV},mode=control"), "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", commands.display()))
            .stdin(Stdio::null());
        let mut qemu = Ends(qemu.spawn().unwrap());
        let of = |pid| {
            let reporter = Reporter::Monitor { socket: events.clone(), pids: vec![pid] };
            BTreeSet::from([reporter])
        };
        let mut reports = Reports::default();
        let (mut now, start) = (Millis(0), Instant::now());
        // The path is there before QEMU listens.
        while reports.fds().is_empty() {
            assert!(start.elapsed() < HANG, "{:?}", reports.problems());
            reports.set(of(qemu.0.id()), now);
            now.0 += 60_000;
            sleep(Duration::from_millis(10));
        }
        read_until(&mut reports, now, |reports, all| reports.heard() == 1 && all.events == 1);
        assert!(reports.problems().is_empty());
        // Commands use the other monitor, and events that they cause are reported.
        let mut qmp = rtvirtio_vmm::Qmp::connect(&commands, HANG).unwrap();
        qmp.execute("cont", None).unwrap();
        qmp.execute("stop", None).unwrap();
        let all = read_until(&mut reports, now, |_, all| all.events >= 2);
        assert_eq!(all, Reported { events: 2, contracts: false }, "RESUME and STOP");
        qmp.quit().unwrap();
        let all = read_until(&mut reports, now, |reports, _| reports.fds().is_empty());
        assert!(all.contracts && reports.heard() == 0 && reports.problems().is_empty());
        qemu.0.wait().unwrap();
        reports.set(of(qemu.0.id()), Millis(now.0 + 60_000));
        assert_eq!(reports.problems().len(), 1, "nothing listens any more");
    }

    #[test]
    fn a_socket_of_another_process_and_a_silent_one_are_said() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let socket = dir.path().join("events");
        let of = |pid| BTreeSet::from([Reporter::Monitor { socket: socket.clone(), pids: vec![pid] }]);
        let _listener = UnixListener::bind(&socket).unwrap();
        let mut reports = Reports::default();
        reports.set(of(u32::MAX), Millis(0));
        assert!(reports.problems()[0].contains("not the VM's"), "{:?}", reports.problems());
        // As where another client is connected to the monitor: no greeting comes.
        let own = std::process::id();
        reports.set(of(own), Millis(10));
        assert_eq!((reports.read(Millis(20)), reports.problems().len()), (Reported::default(), 0));
        reports.set(of(own), Millis(10 + SILENT));
        assert!(reports.problems()[0].contains("another client may be"), "{:?}", reports.problems());
        assert_eq!(reports.fds().len(), 1, "it still waits for its turn");
    }
}
