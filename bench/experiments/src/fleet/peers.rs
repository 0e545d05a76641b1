//! Placement by other engines, which know capacity as integers and add them up.

use rtvirtio_capacity::{Scalars, WHOLE};

use super::instance::Instance;

/// Disk, link and CPU, in thousandths.
pub type Amount = [u32; 3];

const NONE: Amount = [0; 3];
/// Whole capacity of a host.
pub const FULL: Amount = [WHOLE.0; 3];

fn amount(s: &Scalars) -> Amount {
    [s.disks[0].0, s.networks[0].0, s.cpu.0]
}

fn fits(need: Amount, free: Amount) -> bool {
    need.iter().zip(&free).all(|(need, free)| need <= free)
}

fn most(a: Amount, b: Amount) -> Amount {
    std::array::from_fn(|i| a[i].max(b[i]))
}

fn less(free: Amount, need: Amount) -> Amount {
    std::array::from_fn(|i| free[i] - need[i])
}

/// Demand of each kind of contract on each class of host.
fn needs(instance: &Instance) -> Vec<Vec<Amount>> {
    let of = |k| instance.classes.iter().map(|n| amount(&n.scalars(k))).collect();
    instance.kinds.iter().map(of).collect()
}

/// Contracts by falling size: the smallest demand over the classes of hosts.
pub fn decreasing(instance: &Instance) -> Vec<u16> {
    let needs = needs(instance);
    let size = |kind: u16| needs[usize::from(kind)].iter().map(|n| n.iter().copied().max()).min();
    let mut order: Vec<u16> = instance.vms.iter().map(|vm| vm.0).collect();
    order.sort_by_key(|kind| std::cmp::Reverse(size(*kind)));
    order
}

/// First fit: the first host in their order that has room. Returns how many were placed.
pub fn first_fit(instance: &Instance, order: &[u16]) -> usize {
    let needs = needs(instance);
    let mut hosts = FreeTree::new(instance);
    // A kind that does not fit once never fits: no contract is removed.
    let mut full = vec![false; needs.len()];
    let mut placed = 0;
    for &kind in order {
        let kind = usize::from(kind);
        if full[kind] {
            continue;
        }
        match hosts.first(&needs[kind]) {
            Some(host) => {
                hosts.take(host, needs[kind][instance.hosts[host]]);
                placed += 1;
            }
            None => full[kind] = true,
        }
    }
    placed
}

/// Demand of each kind in Pacemaker's CIB: the largest over the classes of hosts that could admit
/// it.
pub fn demands(instance: &Instance) -> Vec<Amount> {
    let of = |needs: &Vec<Amount>| {
        let possible = needs.iter().copied().filter(|n| fits(*n, FULL));
        possible.fold(NONE, most)
    };
    needs(instance).iter().map(of).collect()
}

/// Pacemaker's rule with `placement-strategy=balanced`: by falling priority, each to the host with
/// the most capacity left, and one demand for all hosts: the largest over the classes of hosts.
pub fn pacemaker(instance: &Instance) -> usize {
    let needs = needs(instance);
    let demands = demands(instance);
    let mut order: Vec<(u16, u8)> = instance.vms.clone();
    order.sort_by_key(|vm| std::cmp::Reverse(vm.1));
    let mut free = vec![FULL; instance.hosts.len()];
    let room = |f: Amount| f.into_iter().min().unwrap_or_default();
    let mut by_room: std::collections::BTreeSet<(u32, usize)> =
        free.iter().enumerate().map(|(h, f)| (room(*f), h)).collect();
    let mut full = vec![false; needs.len()];
    let mut placed = 0;
    for (kind, _) in order {
        let kind = usize::from(kind);
        if full[kind] {
            continue;
        }
        let need = demands[kind];
        // A veto where a host of this kind refuses it even alone.
        let allowed = |h: usize| fits(needs[kind][instance.hosts[h]], FULL);
        let found = by_room.iter().rev().find(|(_, h)| allowed(*h) && fits(need, free[*h])).copied();
        let Some((key, host)) = found else {
            full[kind] = true;
            continue;
        };
        by_room.remove(&(key, host));
        free[host] = less(free[host], need);
        by_room.insert((room(free[host]), host));
        placed += 1;
    }
    placed
}

/// Hosts in their order; each node holds the most capacity left in its range of hosts, by class.
struct FreeTree {
    classes: usize,
    leaves: usize,
    free: Vec<Amount>,
    class_of: Vec<usize>,
    /// For node n of the tree and class c the most of each resource, at `n * classes + c`.
    most: Vec<Amount>,
}

impl FreeTree {
    fn new(instance: &Instance) -> Self {
        let (classes, hosts) = (instance.classes.len(), instance.hosts.len());
        let leaves = hosts.next_power_of_two();
        let most = vec![NONE; 2 * leaves * classes];
        let free = vec![FULL; hosts];
        let mut tree = Self { classes, leaves, free, class_of: instance.hosts.clone(), most };
        for host in 0..hosts {
            let at = (leaves + host) * classes + instance.hosts[host];
            tree.most[at] = FULL;
        }
        (1..leaves).rev().for_each(|n| tree.pull(n));
        tree
    }

    fn pull(&mut self, node: usize) {
        for c in 0..self.classes {
            let (a, b) =
                (self.most[2 * node * self.classes + c], self.most[(2 * node + 1) * self.classes + c]);
            self.most[node * self.classes + c] = most(a, b);
        }
    }

    fn first(&self, need: &[Amount]) -> Option<usize> {
        self.first_below(1, need)
    }

    fn first_below(&self, node: usize, need: &[Amount]) -> Option<usize> {
        let may = (0..self.classes).any(|c| fits(need[c], self.most[node * self.classes + c]));
        if !may {
            return None;
        }
        if node >= self.leaves {
            let host = node - self.leaves;
            return fits(need[self.class_of[host]], self.free[host]).then_some(host);
        }
        self.first_below(2 * node, need).or_else(|| self.first_below(2 * node + 1, need))
    }

    fn take(&mut self, host: usize, need: Amount) {
        let free = &mut self.free[host];
        *free = less(*free, need);
        let mut node = self.leaves + host;
        self.most[node * self.classes + self.class_of[host]] = *free;
        while node > 1 {
            node /= 2;
            self.pull(node);
        }
    }
}
