//! Contracts of files and of libvirt. Both are read in threads of their own: a file delays only
//! itself, and a libvirt that does not answer delays nothing, its last answer counts. The latter's
//! thread writes the states of contracts into the live metadata of VMs, where these differ.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_kernel::detached::Detached;
use rtvirtio_spec::LibvirtDomain;
use rtvirtio_vmm::VmmError;
use rtvirtio_vmm::libvirt::{DomainContract, Virsh, metadata, set_status};

use super::{LinuxHost, Places, Waker};
use crate::config::Config;
use crate::daemon::Daemon;
use crate::desired::{ContractFiles, Desired};
use crate::domain_contracts::DomainContracts;
use crate::domain_status::{self, Statuses};
use crate::history;
use crate::snapshot::Snapshot;

/// Interval of queries, each of which starts programs.
const EVERY: Duration = Duration::from_secs(15);
/// Shortest interval of queries that write the states of contracts: one that keeps changing costs
/// one write for its VM in this time.
const STATUS_EVERY: Duration = Duration::from_secs(2);

/// Files and libvirt, as sources of contracts.
pub(super) struct ContractSources {
    files: ContractFiles,
    /// The contracts of files alone.
    of_files: Desired,
    domains: Option<Domains>,
}

impl ContractSources {
    pub fn new(places: &Places, config: &Config, waker: &Waker) -> Self {
        let specs = [places.specs.as_slice(), &config.specs].concat();
        Self {
            files: ContractFiles::new(&places.contracts, specs),
            of_files: Desired::default(),
            domains: config.libvirt.as_deref().map(|uri| Domains::new(uri, Arc::clone(waker))),
        }
    }

    /// Contracts of all sources, when any has changed since the last call.
    pub fn changed(&mut self, now: Instant) -> Option<Desired> {
        let of_files = self.files.changed();
        let of_domains = self.domains.as_mut().is_some_and(|domains| domains.poll(now));
        if of_files.is_none() && !of_domains {
            return None;
        }
        if let Some(files) = of_files {
            self.of_files = files;
        }
        let files = self.of_files.clone();
        Some(match &mut self.domains {
            Some(domains) => domains.contracts.joined(files, self.files.specs()),
            None => files,
        })
    }

    /// Queries libvirt at the next look, as a VM may have started.
    pub fn ask_now(&mut self) {
        if let Some(domains) = &mut self.domains {
            domains.next = None;
        }
    }

    /// Whether the metadata of libvirt's VMs are read.
    pub fn asks_libvirt(&self) -> bool {
        self.domains.is_some()
    }

    /// URI of the libvirt daemon that is queried; the system's where none is.
    pub fn uri_or_default(&self) -> &str {
        self.domains.as_ref().map_or(LibvirtDomain::DEFAULT_URI, |domains| &domains.uri)
    }

    /// Problems of the files, and of the last query or write, for clients.
    pub fn problems(&self) -> impl Iterator<Item = String> + use<> {
        let of_domains = self.domains.as_ref().and_then(|domains| domains.problem.clone());
        self.files.problem().into_iter().chain(of_domains)
    }
}

impl Daemon<LinuxHost> {
    /// Schedules writing the states of contracts into libvirt's metadata, where libvirt is queried.
    pub(crate) fn show_in_domains(&mut self, snapshot: &Snapshot) {
        let now = history::now();
        let of = |uri: &str| domain_status::statuses(self.desired(), snapshot, uri, &now);
        let wanted = self.host_ref().contracts.domains.as_ref().and_then(|domains| of(&domains.uri));
        if let (Some(domains), Some(wanted)) = (&mut self.host().contracts.domains, wanted) {
            let before = domains.wanted.take().unwrap_or_default();
            domains.wanted = Some(domain_status::since(wanted, &before));
        }
    }
}

/// Result of a query to libvirt.
struct Answer {
    contracts: Result<Vec<DomainContract>, String>,
    /// Last error of writing a status; `None` if all were written.
    unwritten: Option<VmmError>,
}

struct Domains {
    uri: String,
    waker: Waker,
    contracts: DomainContracts,
    /// Query under way.
    query: Option<Detached<Answer>>,
    next: Option<Instant>,
    /// Start of the last query.
    asked: Option<Instant>,
    /// Problem of the last query or of its writes, for clients.
    problem: Option<String>,
    /// Statuses to be written; `None` while they are not known.
    wanted: Option<Statuses>,
    /// Statuses that the last query was given.
    written: Option<Statuses>,
}

impl Domains {
    fn new(uri: &str, waker: Waker) -> Self {
        let (uri, contracts) = (uri.to_owned(), DomainContracts::new(uri));
        let (query, next, asked, problem, wanted, written) = (None, None, None, None, None, None);
        Self { uri, waker, contracts, query, next, asked, problem, wanted, written }
    }

    /// Takes an answer, and queries again where that is due; returns whether contracts have
    /// changed.
    fn poll(&mut self, now: Instant) -> bool {
        let mut is_new = false;
        if let Some(answer) = self.query.as_ref().and_then(|query| query.wait(Duration::ZERO)) {
            self.query = None;
            let failed = |e: std::io::Error| Answer { contracts: Err(e.to_string()), unwritten: None };
            let Answer { contracts, unwritten } = answer.unwrap_or_else(failed);
            self.problem = unwritten.map(|e| format!("the state of contracts is not in every domain: {e}"));
            match contracts {
                Ok(found) => is_new = self.contracts.take(found),
                Err(e) => {
                    self.problem =
                        Some(format!("contracts in the metadata of libvirt's domains are as last seen: {e}"));
                }
            }
        }
        // A status that could not be written is retried with the next query that is due.
        let may_write = self.asked.is_none_or(|at| now.duration_since(at) >= STATUS_EVERY);
        let has_news = may_write && self.wanted != self.written;
        if self.query.is_none() && (has_news || self.next.is_none_or(|at| now >= at)) {
            (self.next, self.asked) = (Some(now + EVERY), Some(now));
            self.written.clone_from(&self.wanted);
            let (waker, uri) = (Arc::clone(&self.waker), self.uri.clone());
            let (wanted, before) = (self.wanted.clone(), self.contracts.found().cloned());
            let query = Detached::start("metadata", move |answers| {
                let answer = ask(&Virsh::new(&uri), wanted.as_ref());
                // Only contracts that differ wake the loop; statuses that were written do not.
                let is_news = answer.contracts.as_ref().ok() != before.as_ref();
                // Fails where the service has ended.
                let _ = answers.send(answer);
                if is_news {
                    waker();
                }
            });
            self.query = query.ok();
        }
        is_new
    }
}

/// Reads contracts, and writes the statuses that differ.
fn ask(daemon: &Virsh, wanted: Option<&Statuses>) -> Answer {
    let found = match metadata(daemon) {
        Ok(found) => found,
        Err(e) => return Answer { contracts: Err(e.to_string()), unwritten: None },
    };
    let mut unwritten = None;
    for (uuid, status) in wanted.into_iter().flat_map(|all| domain_status::changes(all, &found.running)) {
        match set_status(daemon, uuid, status) {
            Ok(()) => {}
            // The VM ended meanwhile, and its live metadata with it.
            Err(VmmError::Libvirt { message, .. })
                if message.contains("not running") || message.contains("no domain with") => {}
            // libvirt refuses this VM; others may succeed.
            Err(e @ VmmError::Libvirt { .. }) => unwritten = Some(e),
            Err(e) => {
                unwritten = Some(e);
                break;
            }
        }
    }
    Answer { contracts: Ok(found.contracts), unwritten }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_that_panics_is_a_problem_and_is_not_waited_for() {
        let mut domains = Domains::new("test:///default", Arc::new(|| {}));
        let panics = Detached::call("test", || -> Answer { panic!("as a query might") });
        domains.query = Some(panics.unwrap());
        // No other is due.
        let now = Instant::now();
        (domains.next, domains.asked) = (Some(now + EVERY), Some(now));
        rtvirtio_testkit::site::wait_for("its end", || {
            assert!(!domains.poll(now), "nothing is taken for no contracts");
            domains.query.is_none()
        });
        assert!(domains.problem.unwrap().contains("as last seen: its thread has ended"));
    }
}
