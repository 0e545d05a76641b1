//! The service: arguments, log, systemd notifications.

mod args;
mod journal;

use std::io::{Write as _, stderr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_arguments::Section;
use rtvirtio_console::{finish, need_root};
use rtvirtio_daemon::api::Listeners;
use rtvirtio_daemon::linux::Places;
use rtvirtio_daemon::{Config, Event, EventKind, Mode, Service, ServiceEvent, ServiceOptions, socket};
use rtvirtio_kernel::sched;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use args::Cli;
use journal::Journal;

/// Time for the step at hand when the service is to end: systemd and a host that shuts down wait
/// for no more than some seconds.
const LAST_STEP: Duration = Duration::from_millis(1500);

/// Time to log that a step was cut off.
const LOG_TIME: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    let cli: Cli = match rtvirtio_arguments::parse(Section::Admin) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    finish(run(&cli), cli.global.json)
}

fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    need_root("rtvirtiod")?;
    let mut config = Config::load(&cli.config)?;
    match cli.mode.as_deref() {
        Some("observe") => config.mode = Mode::Observe,
        Some("ask") => config.mode = Mode::Ask,
        Some(_) => config.mode = Mode::Auto,
        None => {}
    }
    let dirs = cli.global.dirs();
    let options = ServiceOptions {
        listeners: Listeners { socket: socket(&dirs.run), group: Some(cli.group.clone()), tcp: cli.listen },
        places: Places { dirs, contracts: cli.contracts.clone(), specs: cli.specs.clone() },
        config,
    };
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("signals")?;
    }
    let has_ended = Arc::new(AtomicBool::new(false));
    end_in_time(Arc::clone(&has_ended))?;
    let mut service = Service::start(options)?;
    let log = Log::new(cli.global.json, cli.global.quiet);
    let mut ready = false;
    service.run(&stop, &mut |told| match told {
        ServiceEvent::Event(event) => log.line(event),
        ServiceEvent::Alive => {
            // systemd may be absent, and need not be notified each time. The service is ready after
            // its first pass: applying settings may take longer than the start timeout.
            let _ = match ready {
                false => sd_notify::notify(false, &[NotifyState::Ready]),
                true => sd_notify::notify(false, &[NotifyState::Watchdog]),
            };
            ready = true;
        }
    });
    has_ended.store(true, Ordering::Relaxed);
    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
    // The next service may give threads reservations at once. It waits for the locks.
    let _locks = service.end();
    sched::settle();
    Ok(ExitCode::SUCCESS)
}

/// Ends the process after [`LAST_STEP`], where a step takes longer than that: thousands of threads
/// that are put back, a disk or a monitor that does not answer. The journal is written before each
/// change, so what is cut off goes on at the next start, and `rtvirtio revert` puts it back.
/// Reservations that were taken back are waited for in any case, see [`sched::settle`].
fn end_in_time(has_ended: Arc<AtomicBool>) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals")?;
    let wait = move || {
        if signals.forever().next().is_some() {
            std::thread::sleep(LAST_STEP);
            if !has_ended.load(Ordering::Relaxed) {
                // The log may be full and block its writers.
                std::thread::spawn(|| {
                    let text =
                        "ended in the middle of a step: the next start, or `rtvirtio revert`, finishes it";
                    let _ = writeln!(stderr(), "{text}");
                    let _ = sd_notify::notify(false, &[NotifyState::Stopping]);
                });
                std::thread::sleep(LOG_TIME);
            }
            sched::settle();
            std::process::exit(0);
        }
    };
    std::thread::Builder::new().name("end".to_owned()).spawn(wait).context("a thread")?;
    Ok(())
}

/// Prints events as lines on standard error, as entries of systemd's journal if that is the
/// journal, or as JSON on standard output.
struct Log {
    json: bool,
    quiet: bool,
    /// Whether standard error is the journal, which takes a priority prefix on a line.
    is_journal: bool,
    journal: Option<Journal>,
}

impl Log {
    fn new(json: bool, quiet: bool) -> Self {
        let is_journal = journal::is_stream(std::env::var("JOURNAL_STREAM").ok().as_deref(), stderr());
        // Lines are the fallback when journald's socket is not available.
        let journal = is_journal.then(Journal::new).and_then(Result::ok);
        Self { json, quiet, is_journal, journal }
    }

    fn line(&self, event: &Event) {
        if self.json {
            // A closed output must not stop the service.
            let _ = writeln!(std::io::stdout(), "{}", event.to_json());
            return;
        }
        let priority = match event.kind {
            EventKind::Failed => 3,
            EventKind::Drift | EventKind::Refused | EventKind::Fault => 4,
            EventKind::Waiting | EventKind::Changed => 5,
            EventKind::Started | EventKind::Appeared | EventKind::Gone | EventKind::Note => 6,
        };
        if self.quiet && priority > 4 {
            return;
        }
        // A VM that arrives has its name in libvirt, which may be any text.
        let vm = event.vm.as_ref().map_or_else(String::new, |vm| format!("{vm}: "));
        let line = rtvirtio_report::terminal(&format!("{vm}{}", event.text), false);
        self.write(event, priority, &line, None);
        for change in &event.changes {
            let old = change.old.as_deref().unwrap_or("(absent)");
            let line = format!("{}: {old} -> {} ({})", change.knob, change.new, change.path);
            let line = format!("  {}", rtvirtio_report::terminal(&line, false));
            self.write(event, priority, &line, Some(&change.knob));
        }
    }

    fn write(&self, event: &Event, priority: u8, line: &str, setting: Option<&str>) {
        // A stuck journal would block standard error too, which leads to it.
        if self.journal.as_ref().is_some_and(|j| j.write(event, priority, line, setting).is_ok()) {
            return;
        }
        let prefix = if self.is_journal { format!("<{priority}>") } else { String::new() };
        let _ = writeln!(stderr().lock(), "{prefix}{line}");
    }
}
