//! The process that a test's name belongs to.

use std::fs;
use std::sync::OnceLock;

/// Prefix of the process in every name.
const MARK: &str = "test-";
/// Prefixes in names of directories that the laboratory's library makes.
const OF_LIBRARIES: [&str; 2] = ["box-", "probe-"];

/// A process by id and start time, in 1/100 s since boot (proc_pid_stat(5), field 22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) pid: u32,
    pub(crate) start: u64,
}

impl Owner {
    /// Owner of this process's names.
    pub(crate) fn this() -> Self {
        static THIS: OnceLock<Owner> = OnceLock::new();
        *THIS.get_or_init(|| {
            let pid = std::process::id();
            Self { pid, start: start_of(pid).expect("this process's own /proc") }
        })
    }

    /// The process that a name contains; `None` for a name that is not of a test.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let after = |mark: &str| {
            let at_start = |at: usize| at == 0 || name.as_bytes()[at - 1] == b'-';
            name.match_indices(mark).filter(|(at, _)| at_start(*at)).find_map(|(at, _)| {
                let mut parts = name[at + mark.len()..].split('-');
                let (pid, start) = (parts.next()?, parts.next()?);
                Some(Self { pid: pid.parse().ok()?, start: start.parse().ok()? })
            })
        };
        std::iter::once(MARK).chain(OF_LIBRARIES).find_map(after)
    }

    /// Whether the process has ended. A zombie has.
    pub(crate) fn is_gone(self) -> bool {
        start_of(self.pid) != Some(self.start)
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{MARK}{}-{}", self.pid, self.start)
    }
}

/// Start time of a process, in 1/100 s since boot; `None` when it has ended.
pub(crate) fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields behind the name in brackets: from the state, field 3, to field 22.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X"))) {
        return None;
    }
    fields.get(19)?.parse().ok()
}
