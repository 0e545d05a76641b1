use rtvirtio_cores::{Host, Request, Use};

use super::*;
use crate::test_root::TestRoot;

/// CPUs of a machine, by its published layout and Linux's numbers.
struct Machine {
    name: &'static str,
    cpus: u32,
    /// Lists of the core and of the last-level cache of a CPU, its node and its `cpu_capacity`.
    core: fn(u32) -> String,
    cache: Option<fn(u32) -> String>,
    node: Option<fn(u32) -> u32>,
    capacity: Option<fn(u32) -> u32>,
    /// Cores, caches, nodes and capacities that it has.
    has: [usize; 4],
    /// Nodes and domains, and the first and last CPU, of 4 whole vCPUs with two service threads.
    placed: (usize, usize, u32, u32),
}

const MACHINES: [Machine; 5] = [
    Machine {
        name: "Core i7-12700: 8 cores of two threads, 4 small cores, one L3",
        cpus: 20,
        core: |cpu| if cpu < 16 { format!("{}-{}", cpu & !1, cpu | 1) } else { cpu.to_string() },
        cache: Some(|_| "0-19".to_owned()),
        node: Some(|_| 0),
        // The favoured cores' clock is higher.
        capacity: Some(|cpu| if cpu >= 16 { 640 } else { if cpu / 2 == 4 { 1024 } else { 1004 } }),
        has: [12, 1, 1, 2],
        placed: (1, 1, 0, 3),
    },
    Machine {
        name: "two Xeon Gold 6230: 20 cores of two threads each",
        cpus: 80,
        core: |cpu| format!("{},{}", cpu % 40, cpu % 40 + 40),
        cache: Some(|cpu| if cpu % 40 < 20 { "0-19,40-59".to_owned() } else { "20-39,60-79".to_owned() }),
        node: Some(|cpu| cpu % 40 / 20),
        capacity: None,
        has: [40, 2, 2, 1],
        placed: (1, 1, 0, 41),
    },
    Machine {
        name: "EPYC 7302: 8 L3 of 2 cores of two threads, one node",
        cpus: 32,
        core: |cpu| format!("{},{}", cpu % 16, cpu % 16 + 16),
        cache: Some(|cpu| {
            let first = (cpu % 16) & !1;
            format!("{}-{},{}-{}", first, first + 1, first + 16, first + 17)
        }),
        node: Some(|_| 0),
        capacity: None,
        has: [16, 8, 1, 1],
        // The vCPUs fill one L3, and the service threads need another.
        placed: (1, 2, 0, 17),
    },
    Machine {
        name: "RK3588: 4 small and 4 big cores behind one L3",
        cpus: 8,
        core: |cpu| cpu.to_string(),
        cache: Some(|_| "0-7".to_owned()),
        node: None,
        capacity: Some(|cpu| if cpu < 4 { 530 } else { 1024 }),
        has: [8, 1, 1, 2],
        placed: (1, 2, 4, 7),
    },
    Machine {
        name: "a board whose kernel describes no cache",
        cpus: 6,
        core: |cpu| cpu.to_string(),
        cache: None,
        node: None,
        capacity: None,
        has: [6, 1, 1, 1],
        placed: (1, 1, 0, 3),
    },
];

impl Machine {
    fn root(&self) -> TestRoot {
        let root = TestRoot::new(&[]);
        root.put(&format!("{CPUS}/online"), &format!("0-{}\n", self.cpus - 1));
        let mut nodes: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for cpu in 0..self.cpus {
            let at = format!("{CPUS}/cpu{cpu}");
            root.put(&format!("{at}/topology/core_cpus_list"), &(self.core)(cpu));
            let own = [("1", (self.core)(cpu)), ("2", (self.core)(cpu))];
            let last = self.cache.map(|cache| ("3", cache(cpu)));
            for (level, list) in own.into_iter().chain(last).filter(|_| self.cache.is_some()) {
                root.put(&format!("{at}/cache/index{level}/level"), level);
                root.put(&format!("{at}/cache/index{level}/shared_cpu_list"), &list);
            }
            if let Some(capacity) = self.capacity {
                root.put(&format!("{at}/cpu_capacity"), &capacity(cpu).to_string());
            }
            if let Some(node) = self.node {
                nodes.entry(node(cpu)).or_default().push(cpu.to_string());
            }
        }
        for (node, cpus) in nodes {
            root.put(&format!("{NODES}/node{node}/cpulist"), &cpus.join(","));
            root.put(&format!("{NODES}/online"), "0\n");
        }
        root
    }
}

#[test]
fn machines_are_read_and_placed_on() {
    for machine in MACHINES {
        let root = machine.root();
        let cpus = topology(&root).unwrap();
        assert_eq!(cpus.len(), machine.cpus as usize, "{}", machine.name);
        let count = |of: fn(&Cpu) -> u32| cpus.iter().map(of).collect::<BTreeSet<u32>>().len();
        let has =
            [count(|cpu| cpu.core), count(|cpu| cpu.llc), count(|cpu| cpu.node), count(|cpu| cpu.capacity)];
        assert_eq!(has, machine.has, "{}", machine.name);
        let host = Host::new(cpus, 950).unwrap();
        let ask = Request { vcpus: 4, each: Use::Whole, service: 2, service_share: 100, node: None };
        let found = host.place(&ask).unwrap();
        let ends = (*found.vcpus.iter().min().unwrap(), *found.vcpus.iter().max().unwrap());
        assert_eq!(
            (found.nodes, found.domains, ends.0, ends.1),
            machine.placed,
            "{}: {found:?}",
            machine.name
        );
    }
}

#[test]
fn offline_isolated_and_tickless_cpus_are_told_apart() {
    let root = MACHINES[1].root();
    root.put(&format!("{CPUS}/online"), "1-79\n");
    root.put(&format!("{CPUS}/isolated"), "60-79\n");
    root.put(&format!("{CPUS}/nohz_full"), "61\n");
    let cpus = topology(&root).unwrap();
    let of = |id: u32| *cpus.iter().find(|cpu| cpu.id == id).unwrap();
    assert!(cpus.len() == 79 && of(40).core == 40 && of(40).llc == 1, "{:?}", of(40));
    assert_eq!(
        [59, 60, 61].map(|id| (of(id).isolated, of(id).tickless)),
        [(false, false), (true, false), (true, true)]
    );
    root.put(&format!("{CPUS}/nohz_full"), "(null)\n");
    assert!(topology(&root).unwrap().iter().all(|cpu| !cpu.tickless));
}

/// Whatever is damaged or missing is an error, where absence has no meaning.
#[test]
fn an_error_is_never_read_as_absence() {
    let broken = [
        ("online", "0-x\n"),
        ("isolated", "no list\n"),
        ("cpu3/topology/core_cpus_list", "?\n"),
        ("cpu3/cache/index3/level", "three\n"),
        ("cpu3/cache/index3/shared_cpu_list", "-\n"),
        ("cpu3/cpu_capacity", "fast\n"),
        ("../node/node1/cpulist", "2-1\n"),
        ("../node/node1/cpulist", "20-38\n"),
    ];
    for (file, text) in broken {
        let root = MACHINES[1].root();
        assert!(topology(&root).is_ok());
        root.put(&format!("{CPUS}/{file}"), text);
        assert!(matches!(topology(&root), Err(HostError::Form { .. })), "{file}: {text}");
    }
    for file in ["online", "cpu3/topology/core_cpus_list", "cpu3/cache/index3/shared_cpu_list"] {
        let root = MACHINES[1].root();
        std::fs::remove_file(root.at(format!("{CPUS}/{file}"))).unwrap();
        assert!(matches!(topology(&root), Err(HostError::Read { .. })), "{file}");
    }
}

#[test]
fn this_machine_has_a_topology() {
    let cpus = topology(&Root::default()).unwrap();
    assert_eq!(cpus.len(), crate::steal::cpus_online(&Root::default()).unwrap() as usize);
    Host::new(cpus, 950).unwrap();
}
