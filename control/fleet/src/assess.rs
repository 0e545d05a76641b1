//! What fits where, what each loss does, what to buy.

use rtvirtio_capacity::{Contract, Node, Refused, Scalars, admit};
use serde::Serialize;

use crate::cluster::{Cluster, Search};
use crate::load::Fleet;

/// Version of the JSON of `rtvirtio fleet --json`.
pub const FLEET_SCHEMA: &str = "rtvirtio.fleet.v1";
/// Largest fleet whose hosts are listed one by one for each contract.
pub const MATRIX_HOSTS: usize = 64;
/// Upper limit of the search for hosts of one kind to buy.
const MOST_TO_BUY: u32 = 1 << 16;

/// Answer of [`assess`] for one fleet.
#[derive(Clone, Debug, Serialize)]
pub struct Assessment {
    /// Always [`FLEET_SCHEMA`], for readers of the JSON.
    pub schema: &'static str,
    /// Hosts of the file, with every contract that could be placed.
    pub hosts: Vec<HostRow>,
    /// The contracts, by falling priority.
    pub contracts: Vec<ContractRow>,
    /// Hosts on which the contracts in force are more than they can promise, with the reason.
    pub broken: Vec<(String, Refused)>,
    /// Effect of the loss of each host that has contracts.
    pub losses: Vec<Loss>,
    /// Hosts of each kind that would place every contract and keep all of them over any single
    /// loss; empty where nothing is needed.
    pub buy: Vec<Buy>,
    /// Assumptions behind the numbers, such as a disk that was declared and not measured.
    pub doubts: Vec<String>,
}

/// A host with the contracts placed on it.
#[derive(Clone, Debug, Serialize)]
pub struct HostRow {
    /// Name as in the fleet file.
    pub name: String,
    /// Taken shares, in thousandths; exact admission may take more than 1000 by this count.
    pub taken: Scalars,
    /// Names of contracts in force or placed there.
    pub contracts: Vec<String>,
}

/// A contract with its placement.
#[derive(Clone, Debug, Serialize)]
pub struct ContractRow {
    /// `HOST/VM` when in force, else the VM's name.
    pub name: String,
    /// Higher values are placed first.
    pub priority: i32,
    /// Whether it is in force already.
    pub in_force: bool,
    /// Host where it is in force or would be placed; `None` when no host admits it.
    pub host: Option<String>,
    /// Hosts that admit it beside the contracts in force, before any other is placed.
    pub fits: FitsOn,
    /// Host with the most room and its reason for refusing; `None` for a placed contract.
    pub refused: Option<(String, Refused)>,
    /// Tasks and flows with targets that admission does not cover: their writes are synced, and
    /// nothing bounds a flush; or their frames go to the VM.
    pub unpromised: Vec<String>,
}

/// Hosts that admit a contract.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FitsOn {
    /// The contract is in force already.
    InForce,
    Hosts(Vec<String>),
    /// Number of hosts, in a fleet of more than [`MATRIX_HOSTS`].
    Count(usize),
}

/// The loss of one host.
#[derive(Clone, Debug, Serialize)]
pub struct Loss {
    /// Name of the lost host; `a new host` for one not in the file.
    pub host: String,
    pub contracts: usize,
    /// Names of the contracts that no other host admits.
    pub lost: Vec<String>,
}

/// Hosts of one kind to buy.
#[derive(Clone, Debug, Serialize)]
pub struct Buy {
    /// Name of the fleet file's entry with such hosts.
    pub like: String,
    /// Least number that is enough; `None` where hosts of this kind do not help.
    pub hosts: Option<u32>,
}

/// A fleet with every contract placed that fits.
pub(crate) struct Placed {
    pub(crate) cluster: Cluster,
    /// Host number of each contract; `None` when no host admits it.
    pub(crate) at: Vec<Option<usize>>,
}

/// Search that asks every host.
const EXACT: Search = Search::Exact { tries: usize::MAX };

/// Places the contracts that are in force nowhere, by falling priority, and looks at every single
/// loss. `cancelled` ends it early.
#[must_use]
pub fn assess(fleet: &Fleet, cancelled: &dyn Fn() -> bool) -> Assessment {
    let order = order(fleet);
    let empty = in_force(fleet);
    let fits: Vec<FitsOn> = order.iter().map(|c| fits_on(fleet, &empty, *c)).collect();
    let mut placed = place(fleet, empty, &order);
    let losses = losses(fleet, &mut placed, cancelled);
    let enough = placed.at.iter().all(Option::is_some) && losses.iter().all(|l| l.lost.is_empty());
    let buy = if enough || cancelled() { Vec::new() } else { buy(fleet, &order, cancelled) };
    let contracts = order.iter().zip(fits).map(|(c, fits)| row(fleet, &placed, *c, fits)).collect();
    Assessment {
        schema: FLEET_SCHEMA,
        hosts: hosts(fleet, &placed),
        contracts,
        broken: broken(fleet),
        losses,
        buy,
        doubts: fleet.doubts.clone(),
    }
}

/// The fleet with every contract placed as [`assess`] does.
pub(crate) fn placed(fleet: &Fleet) -> Placed {
    place(fleet, in_force(fleet), &order(fleet))
}

/// The host of each contract after the loss of its own, when no other is lost.
pub(crate) fn takeovers(
    fleet: &Fleet,
    placed: &mut Placed,
    cancelled: &dyn Fn() -> bool,
) -> Vec<Option<usize>> {
    let mut to = vec![None; fleet.contracts.len()];
    each_loss(fleet, placed, cancelled, |_, moved| moved.iter().for_each(|(c, host)| to[*c] = *host));
    to
}

/// Contracts by falling priority, then those that ask for most of their best host first.
fn order(fleet: &Fleet) -> Vec<usize> {
    let size = |kind: &Contract| {
        let largest = fleet.classes.iter().map(|n| n.scalars(kind).largest());
        largest.min()
    };
    let sizes: Vec<_> = fleet.kinds.iter().map(size).collect();
    let mut order: Vec<usize> = (0..fleet.contracts.len()).collect();
    order.sort_by_key(|c| {
        let of = &fleet.contracts[*c];
        (std::cmp::Reverse(of.priority), std::cmp::Reverse(sizes[of.kind]))
    });
    order
}

fn in_force(fleet: &Fleet) -> Placed {
    let classes: Vec<usize> = fleet.hosts.iter().map(|h| h.class).collect();
    let mut cluster = Cluster::new(fleet.classes.clone(), &classes, &fleet.kinds);
    let at: Vec<_> = fleet.contracts.iter().map(|c| c.host).collect();
    for contract in &fleet.contracts {
        if let Some(host) = contract.host {
            cluster.put(host, contract.kind);
        }
    }
    Placed { cluster, at }
}

fn place(fleet: &Fleet, mut placed: Placed, order: &[usize]) -> Placed {
    for &c in order {
        if placed.at[c].is_none() {
            placed.at[c] = placed.cluster.place(fleet.contracts[c].kind, EXACT);
        }
    }
    placed
}

fn fits_on(fleet: &Fleet, placed: &Placed, contract: usize) -> FitsOn {
    let of = &fleet.contracts[contract];
    if of.host.is_some() {
        return FitsOn::InForce;
    }
    let hosts = (0..fleet.hosts.len()).filter(|h| placed.cluster.admits(*h, of.kind));
    if fleet.hosts.len() <= MATRIX_HOSTS {
        FitsOn::Hosts(hosts.map(|h| fleet.hosts[h].name.clone()).collect())
    } else {
        FitsOn::Count(hosts.count())
    }
}

fn losses(fleet: &Fleet, placed: &mut Placed, cancelled: &dyn Fn() -> bool) -> Vec<Loss> {
    let mut all = Vec::new();
    each_loss(fleet, placed, cancelled, |host, moved| {
        let lost = moved.iter().filter(|(_, to)| to.is_none());
        let lost = lost.map(|(c, _)| fleet.contracts[*c].name.clone()).collect();
        let host = fleet.hosts.get(host).map_or_else(|| "a new host".to_owned(), |h| h.name.clone());
        all.push(Loss { host, contracts: moved.len(), lost });
    });
    all
}

/// Loses each host with contracts once and restores it. `seen` receives the host, and the new host
/// of each of its contracts.
fn each_loss(
    fleet: &Fleet,
    placed: &mut Placed,
    cancelled: &dyn Fn() -> bool,
    mut seen: impl FnMut(usize, &[(usize, Option<usize>)]),
) {
    let mut on: Vec<Vec<usize>> = vec![Vec::new(); placed.cluster.hosts()];
    for (contract, host) in placed.at.iter().enumerate() {
        if let Some(host) = host {
            on[*host].push(contract);
        }
    }
    for (host, mut contracts) in on.into_iter().enumerate().filter(|(_, c)| !c.is_empty()) {
        if cancelled() {
            break;
        }
        contracts.sort_by_key(|c| std::cmp::Reverse(fleet.contracts[*c].priority));
        seen(host, &lose(fleet, &mut placed.cluster, host, &contracts));
    }
}

/// New host of each contract of a lost host; `None` when no other admits it. The cluster is left
/// unchanged.
fn lose(
    fleet: &Fleet,
    cluster: &mut Cluster,
    host: usize,
    contracts: &[usize],
) -> Vec<(usize, Option<usize>)> {
    cluster.lose_host(host);
    let moved: Vec<(usize, Option<usize>)> =
        contracts.iter().map(|c| (*c, cluster.place(fleet.contracts[*c].kind, EXACT))).collect();
    for (c, to) in moved.iter().rev() {
        if let Some(to) = to {
            cluster.remove(*to, fleet.contracts[*c].kind);
        }
    }
    cluster.return_host(host);
    moved
}

/// For each kind of host the least number of new ones with which every contract is placed and
/// survives any single loss.
fn buy(fleet: &Fleet, order: &[usize], cancelled: &dyn Fn() -> bool) -> Vec<Buy> {
    let enough = |class: usize, n: u32| {
        let mut empty = in_force(fleet);
        (0..n).for_each(|_| empty.cluster.add_host(class));
        let mut placed = place(fleet, empty, order);
        placed.at.iter().all(Option::is_some)
            && losses(fleet, &mut placed, cancelled).iter().all(|l| l.lost.is_empty())
    };
    let least = |class: usize| -> Option<u32> {
        // A contract that neither an empty host of this kind nor one of the fleet's can promise.
        let hopeless = |k: &Contract| !fleet.classes.iter().any(|n| admit(n, &[], k).is_admitted());
        if fleet.kinds.iter().any(hopeless) {
            return None;
        }
        let mut high = 1;
        while !enough(class, high) {
            high = high.checked_mul(2).filter(|h| *h <= MOST_TO_BUY && !cancelled())?;
        }
        let mut low = high / 2;
        // Invariant: `low` hosts are too few, `high` are enough.
        while high - low > 1 && !cancelled() {
            let middle = low + (high - low) / 2;
            if enough(class, middle) { high = middle } else { low = middle }
        }
        Some(high)
    };
    let names = fleet.class_names.iter().enumerate();
    names.map(|(class, name)| Buy { like: name.clone(), hosts: least(class) }).collect()
}

fn hosts(fleet: &Fleet, placed: &Placed) -> Vec<HostRow> {
    let mut rows: Vec<HostRow> = fleet
        .hosts
        .iter()
        .enumerate()
        .map(|(i, h)| HostRow {
            name: h.name.clone(),
            taken: placed.cluster.taken(i).clone(),
            contracts: Vec::new(),
        })
        .collect();
    for (contract, at) in fleet.contracts.iter().zip(&placed.at) {
        if let Some(at) = at {
            rows[*at].contracts.push(contract.name.clone());
        }
    }
    rows
}

/// Hosts whose contracts in force are not admitted together.
fn broken(fleet: &Fleet) -> Vec<(String, Refused)> {
    let mut all = Vec::new();
    for (i, host) in fleet.hosts.iter().enumerate() {
        let on = fleet.contracts.iter().filter(|c| c.host == Some(i)).map(|c| &fleet.kinds[c.kind]);
        let on: Vec<&Contract> = on.collect();
        if let Some(refused) = refused_together(&fleet.classes[host.class], &on) {
            all.push((host.name.clone(), refused));
        }
    }
    all
}

/// Refusal of one of these contracts alone, or of all together.
fn refused_together(node: &Node, on: &[&Contract]) -> Option<Refused> {
    let (last, others) = on.split_last()?;
    let alone = on.iter().find_map(|c| admit(node, &[], c).refused);
    alone.or_else(|| admit(node, others, last).refused)
}

fn row(fleet: &Fleet, placed: &Placed, contract: usize, fits: FitsOn) -> ContractRow {
    let of = &fleet.contracts[contract];
    let at = placed.at[contract];
    let kind = &fleet.kinds[of.kind];
    ContractRow {
        name: of.name.clone(),
        priority: of.priority,
        in_force: of.host.is_some(),
        host: at.map(|h| fleet.hosts[h].name.clone()),
        fits,
        refused: if at.is_none() { why(fleet, placed, kind) } else { None },
        unpromised: kind.unpromised().into_iter().map(|u| u.task).collect(),
    }
}

/// The reason of the host with most room, of each kind of host the one that asks least of it.
fn why(fleet: &Fleet, placed: &Placed, kind: &Contract) -> Option<(String, Refused)> {
    let roomiest = placed.cluster.roomiest();
    let host = roomiest.min_by_key(|h| fleet.classes[fleet.hosts[*h].class].scalars(kind).largest())?;
    let on = fleet.contracts.iter().zip(&placed.at).filter(|(_, at)| **at == Some(host));
    let on: Vec<&Contract> = on.map(|(c, _)| &fleet.kinds[c.kind]).collect();
    let node = &fleet.classes[fleet.hosts[host].class];
    let refused = admit(node, &on, kind).refused.or_else(|| refused_together(node, &on));
    refused.map(|refused| (fleet.hosts[host].name.clone(), refused))
}
