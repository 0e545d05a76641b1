//! Contracts of files and of libvirt. libvirt is asked in a thread of its own: a daemon that does
//! not answer holds nothing up, and what it said last counts.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rtvirtio_vmm::VmmError;
use rtvirtio_vmm::libvirt::{DomainContract, Virsh, contracts};

use super::{Places, Waker};
use crate::config::Config;
use crate::desired::{ContractFiles, Desired};
use crate::domain_contracts::DomainContracts;

/// Between two questions, each of which starts programs.
const EVERY: Duration = Duration::from_secs(15);

/// Wherever contracts are.
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

    /// All of them, when any has changed since the last call.
    pub fn changed(&mut self, now: Instant) -> Option<Desired> {
        let of_files = self.files.changed();
        let of_domains = self.domains.as_mut().is_some_and(|domains| domains.look(now));
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

    /// A domain may have come.
    pub fn ask_now(&mut self) {
        if let Some(domains) = &mut self.domains {
            domains.next = None;
        }
    }

    /// Why libvirt does not answer.
    pub fn problem(&self) -> Option<String> {
        self.domains.as_ref().and_then(|domains| domains.problem.clone())
    }
}

type Answer = Result<Vec<DomainContract>, VmmError>;

struct Domains {
    uri: String,
    waker: Waker,
    contracts: DomainContracts,
    sender: Sender<Answer>,
    answers: Receiver<Answer>,
    is_asked: bool,
    next: Option<Instant>,
    /// Why the last question was not answered.
    problem: Option<String>,
}

impl Domains {
    fn new(uri: &str, waker: Waker) -> Self {
        let (sender, answers) = channel();
        let (uri, contracts) = (uri.to_owned(), DomainContracts::new(uri));
        Self { uri, waker, contracts, sender, answers, is_asked: false, next: None, problem: None }
    }

    /// Takes an answer and asks again where that is due; whether contracts have changed.
    fn look(&mut self, now: Instant) -> bool {
        let mut is_new = false;
        while let Ok(answer) = self.answers.try_recv() {
            self.is_asked = false;
            match answer {
                Ok(found) => {
                    self.problem = None;
                    is_new |= self.contracts.take(found);
                }
                Err(e) => {
                    self.problem =
                        Some(format!("contracts in the metadata of libvirt's domains are as last seen: {e}"));
                }
            }
        }
        if !self.is_asked && self.next.is_none_or(|at| now >= at) {
            self.next = Some(now + EVERY);
            let (sender, waker, uri) = (self.sender.clone(), Arc::clone(&self.waker), self.uri.clone());
            let asked = std::thread::Builder::new().name("metadata".to_owned()).spawn(move || {
                // Fails where the service has ended.
                let _ = sender.send(contracts(&Virsh::new(&uri)));
                waker();
            });
            self.is_asked = asked.is_ok();
        }
        is_new
    }
}
