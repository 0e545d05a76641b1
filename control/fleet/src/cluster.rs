//! Hosts with what is placed on them, and the search for one that admits another contract.

use rtvirtio_capacity::{Contract, Ledger, Node, Reserve, Scalars, WHOLE, fits};

use crate::buckets::Buckets;

/// Search for a host that admits a contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// By sums of integers, as cluster engines do: the fullest host that still has room.
    Sums,
    /// Like `Sums`, and where no sum has room the exact admission of up to `tries` hosts of each
    /// class, those with most room first.
    Exact {
        /// Hosts asked per class.
        tries: usize,
    },
}

/// Hosts of several classes with the contracts placed on them. Contracts are of *kinds*: all of a
/// kind ask for the same.
#[derive(Clone, Debug)]
pub struct Cluster {
    classes: Vec<Node>,
    kinds: Vec<Kind>,
    hosts: Vec<Host>,
    /// Hosts by free amount, per class.
    index: Vec<Buckets>,
}

#[derive(Clone, Debug)]
struct Kind {
    cpu: f64,
    /// By class.
    needs: Vec<Need>,
}

/// Demand of a contract on a host of one class.
#[derive(Clone, Debug)]
struct Need {
    scalars: Scalars,
    /// `None` where a host of the class refuses the contract even alone.
    promise: Option<Promise>,
}

#[derive(Clone, Debug)]
struct Promise {
    reserves: Vec<Option<Reserve>>,
    /// Reserved bandwidth, per network of the class.
    links: Vec<Vec<Reserve>>,
}

#[derive(Clone, Debug)]
struct Host {
    class: u32,
    /// Place in its bucket; `None` for a host that is lost.
    position: Option<u32>,
    free: u32,
    ledgers: Vec<Ledger>,
    /// Bandwidth taken, per network of the class.
    links: Vec<Ledger>,
    taken: Scalars,
    cpu: f64,
    /// Contracts in force that the host refuses even alone: nothing else is admitted there.
    unpromised: u32,
}

impl Cluster {
    /// Empty hosts, each of one of the classes, and the kinds of contracts that may be placed on
    /// them.
    #[must_use]
    pub fn new(classes: Vec<Node>, hosts: &[usize], kinds: &[Contract]) -> Self {
        let kind = |c: &Contract| Kind {
            cpu: c.cpu.map_or(0.0, |r| r.0),
            needs: classes.iter().map(|node| need(node, c)).collect(),
        };
        let kinds = kinds.iter().map(kind).collect();
        let index = classes.iter().map(|_| Buckets::new()).collect();
        let mut cluster = Self { classes, kinds, hosts: Vec::new(), index };
        hosts.iter().for_each(|class| cluster.add_host(*class));
        cluster
    }

    /// Adds an empty host of a class; it has the next number.
    pub fn add_host(&mut self, class: usize) {
        let node = &self.classes[class];
        let host = Host {
            class: class as u32,
            position: None,
            free: WHOLE.0,
            ledgers: vec![Ledger::default(); node.disks.len()],
            links: vec![Ledger::default(); node.networks.len()],
            taken: node.nothing(),
            cpu: 0.0,
            unpromised: 0,
        };
        self.hosts.push(host);
        self.return_host(self.hosts.len() - 1);
    }

    /// Number of hosts, lost ones included.
    #[must_use]
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Shares taken of a host, in thousandths. Exact admission may take more than a whole by this
    /// count.
    #[must_use]
    pub fn taken(&self, host: usize) -> &Scalars {
        &self.hosts[host].taken
    }

    /// Shares that a contract of a kind takes of a host; `None` where it is refused even alone.
    #[must_use]
    pub fn takes(&self, kind: usize, host: usize) -> Option<&Scalars> {
        self.need(kind, self.hosts[host].class as usize).map(|(scalars, _)| scalars)
    }

    #[must_use]
    pub fn class_of(&self, host: usize) -> (usize, &Node) {
        let class = self.hosts[host].class as usize;
        (class, &self.classes[class])
    }

    /// The host of each class with most room.
    pub fn roomiest(&self) -> impl Iterator<Item = usize> + '_ {
        self.index.iter().filter_map(|b| b.most_first().next()).map(|h| h as usize)
    }

    /// Excludes this host from further placement; its contracts stay.
    pub fn lose_host(&mut self, host: usize) {
        self.unlink(host);
    }

    /// Makes a lost host eligible for placement again.
    pub fn return_host(&mut self, host: usize) {
        if self.hosts[host].position.is_none() {
            self.link(host);
        }
    }

    /// Whether a host admits one more contract of a kind: the exact test.
    #[must_use]
    pub fn admits(&self, host: usize, kind: usize) -> bool {
        let of = &self.hosts[host];
        let class = of.class as usize;
        let Some((_, need)) = self.need(kind, class) else { return false };
        let node = &self.classes[class];
        of.unpromised == 0
            && fits(of.cpu + self.kinds[kind].cpu, node.cpu.0)
            && need.reserves.iter().zip(&of.ledgers).zip(&node.disks).all(|((reserve, ledger), disk)| {
                reserve.as_ref().is_none_or(|r| ledger.fits(disk.capacity().room(), r))
            })
            && need
                .links
                .iter()
                .zip(&of.links)
                .zip(&node.networks)
                .all(|((reserves, ledger), network)| ledger.fit(network.room(), reserves))
    }

    /// A host for one more contract of a kind: of the class of which it takes least, the fullest
    /// host that has room by its sums, so that room for large ones stays.
    #[must_use]
    pub fn find(&self, kind: usize, search: Search) -> Option<usize> {
        let sums = |class: usize| {
            let takes = self.need(kind, class)?.0.largest().0;
            let (free, host) = self.index[class].least(takes)?;
            Some((takes, free, host as usize))
        };
        let best = (0..self.classes.len()).filter_map(sums).min();
        match (best, search) {
            (Some((.., host)), _) => Some(host),
            (None, Search::Sums) => None,
            (None, Search::Exact { tries }) => self.find_exact(kind, tries),
        }
    }

    fn find_exact(&self, kind: usize, tries: usize) -> Option<usize> {
        (0..self.classes.len()).find_map(|class| {
            let least = self.need(kind, class)?.0.largest().0;
            let mut hosts = self.index[class].below(least).take(tries).map(|h| h as usize);
            hosts.find(|host| self.admits(*host, kind))
        })
    }

    /// Finds a host and places a contract of a kind there.
    pub fn place(&mut self, kind: usize, search: Search) -> Option<usize> {
        let host = self.find(kind, search)?;
        self.put(host, kind);
        Some(host)
    }

    /// Places a contract on a host without asking whether it fits: one that is in force.
    pub fn put(&mut self, host: usize, kind: usize) {
        self.change(host, kind, true);
    }

    /// Removes a contract that is placed.
    pub fn remove(&mut self, host: usize, kind: usize) {
        self.change(host, kind, false);
    }

    fn change(&mut self, host: usize, kind: usize, add: bool) {
        let linked = self.hosts[host].position.is_some();
        if linked {
            self.unlink(host);
        }
        let of = &mut self.hosts[host];
        let Kind { cpu, needs } = &self.kinds[kind];
        of.cpu = (of.cpu + if add { *cpu } else { -cpu }).max(0.0);
        let Need { scalars, promise } = &needs[of.class as usize];
        if add {
            of.taken.add(scalars)
        } else {
            of.taken.subtract(scalars)
        }
        match (promise, add) {
            (Some(promise), _) => of.reserve(promise, add),
            (None, true) => of.unpromised += 1,
            (None, false) => of.unpromised = of.unpromised.saturating_sub(1),
        }
        of.free = WHOLE.0.saturating_sub(of.taken.largest().0);
        if linked {
            self.link(host);
        }
    }

    /// Demand of a kind on a host of a class; `None` where it is refused even alone.
    fn need(&self, kind: usize, class: usize) -> Option<(&Scalars, &Promise)> {
        let Need { scalars, promise } = &self.kinds[kind].needs[class];
        Some((scalars, promise.as_ref()?))
    }

    fn link(&mut self, host: usize) {
        let of = &mut self.hosts[host];
        of.position = Some(self.index[of.class as usize].insert(host as u32, of.free));
    }

    fn unlink(&mut self, host: usize) {
        let of = &mut self.hosts[host];
        let Some(position) = of.position.take() else { return };
        let moved = self.index[of.class as usize].remove(of.free, position);
        if let Some(moved) = moved {
            self.hosts[moved as usize].position = Some(position);
        }
    }
}

impl Host {
    /// Adds the reservations of a contract to the host's, or removes them.
    fn reserve(&mut self, Promise { reserves, links }: &Promise, add: bool) {
        let disks = self.ledgers.iter_mut().zip(reserves.iter().map(Option::as_slice));
        let networks = self.links.iter_mut().zip(links.iter().map(Vec::as_slice));
        for (ledger, reserves) in disks.chain(networks) {
            for r in reserves {
                if add {
                    ledger.insert(r);
                } else {
                    ledger.remove(r);
                }
            }
        }
    }
}

fn need(node: &Node, contract: &Contract) -> Need {
    let scalars = node.scalars(contract);
    let promise = node.needs(contract).zip(node.link_needs(contract));
    let promise = promise.filter(|_| scalars.fit()).map(|(reserves, links)| Promise { reserves, links });
    Need { scalars, promise }
}
