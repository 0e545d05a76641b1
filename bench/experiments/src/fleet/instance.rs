//! Hosts and contracts of the simulation.

use anyhow::Context as _;
use rtvirtio_capacity::{Contract, DeviceModel, Disk, Network, Node, OnDisk, Options};
use rtvirtio_model::Profile;
use rtvirtio_spec::HostSpec;
use rtvirtio_stats::Random;
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::{Bytes, BytesPerSec, Ratio};

/// A measured profile of the emulated flash device.
const PROFILE: &str = include_str!("../../../../control/learn/data/qlc-nvme.profile.json");
/// Contracts for each host: the simulation's load.
pub const VMS_PER_HOST: usize = 10;
/// Number of distinct priorities.
const PRIORITIES: usize = 10;

/// Hosts and contracts, in the order of arrival.
pub struct Instance {
    /// Kinds of hosts: flash, eMMC, flash as measured.
    pub classes: Vec<Node>,
    /// The class of each host.
    pub hosts: Vec<usize>,
    /// Kinds of contracts, by load, target, CPU share and flow.
    pub kinds: Vec<Contract>,
    /// Kind and priority of each contract.
    pub vms: Vec<(u16, u8)>,
}

/// Link rates, bytes/s: 1 Gbit/s, and 100 Mbit/s of hosts with eMMC.
const FAST: f64 = 125e6;
const SLOW: f64 = 12.5e6;

/// Kinds of hosts: flash and eMMC as their twins declare them, and flash as it was measured. Each
/// has one link.
fn classes(kinds: &[Contract]) -> anyhow::Result<Vec<Node>> {
    let link = |rate| vec![Network::new(None, BytesPerSec(rate), 1_500, None)];
    let declared = |name: &str, rate, cpu| -> anyhow::Result<Node> {
        let device = DeviceModel::declared(name, &TwinProfile::built_in(name)?, Bytes(1 << 30));
        Ok(Node {
            disks: vec![Disk::new(None, &device, &Options::default())],
            networks: link(rate),
            cpu: Ratio(cpu),
        })
    };
    let profile: Profile = serde_json::from_str(PROFILE).context("the built-in profile")?;
    let measured =
        Node { disks: vec![Disk::measured(None, &profile)?], networks: link(FAST), cpu: Ratio(0.95) };
    let mut all = vec![declared("qlc-nvme", FAST, 0.95)?, declared("emmc", SLOW, 0.8)?, measured];
    let on: Vec<&OnDisk> = kinds.iter().flat_map(|k| &k.disks).collect();
    for disk in all.iter_mut().flat_map(|n| &mut n.disks) {
        disk.choose(&on);
    }
    Ok(all)
}

/// Network flows of a VM: none, measured values in urgent frames, or pictures.
const FLOWS: [&str; 3] = [
    "",
    "frame = \"200B\"\nrate = \"2000/s\"\npcp = 4\ntarget = { latency = \"5ms\" }\n",
    "frame = \"1400B\"\nrate = \"1000/s\"\ntarget = { latency = \"20ms\" }\n",
];

/// 144 kinds: four loads by three targets by four shares of each CPU by three flows.
fn kinds() -> anyhow::Result<Vec<Contract>> {
    let loads = [("read", 4, 900), ("read", 16, 450), ("write", 4, 250), ("mixed", 8, 300)];
    let mut all = Vec::new();
    for (op, kib, rate) in loads {
        for target_ms in [60, 150, 400] {
            for (budget_ms, flow) in [3, 7, 12, 20].into_iter().flat_map(|b| FLOWS.map(|flow| (b, flow))) {
                let share = if op == "mixed" { "write_share = \"30%\"\n" } else { "" };
                let (link, flow) = match flow {
                    "" => ("", String::new()),
                    flow => (
                        "[[network]]\nlink = \"1Gbit/s\"\n",
                        format!(
                            "[[vm.nic]]\nmac = \"52:54:00:00:00:01\"\ntap = \"tap0\"\n\
                             [[vm.flow]]\nname = \"f\"\ndirection = \"tx\"\n{flow}"
                        ),
                    ),
                };
                let text = format!(
                    "[device]\ntwin = \"qlc-nvme\"\n{link}[[vm]]\nname = \"vm\"\nlab = \"process\"\n\
                     cpu = {{ budget = \"{budget_ms}ms\", period = \"100ms\" }}\n[[vm.task]]\nname = \"t\"\nop = \"{op}\"\n{share}\
                     block = \"{kib}KiB\"\nrate = \"{rate}/s\"\ntarget = {{ percentile = \"p99.99\", latency = \"{target_ms}ms\" }}\n{flow}"
                );
                let spec = HostSpec::parse("the simulation", &text)?;
                all.extend(Contract::all_of(&spec, |_| Err(anyhow::anyhow!("no demands here")))?);
            }
        }
    }
    Ok(all)
}

impl Instance {
    /// Makes `hosts` hosts, six of ten flash, two eMMC and two as measured, and [`VMS_PER_HOST`]
    /// times as many contracts of random kinds.
    ///
    /// # Errors
    /// When a built-in profile cannot be read.
    pub fn new(hosts: usize, seed: u64) -> anyhow::Result<Self> {
        let kinds = kinds()?;
        let classes = classes(&kinds)?;
        let mut random = Random::new(seed);
        let class = |r: usize| {
            if r < 6 {
                0
            } else if r < 8 {
                1
            } else {
                2
            }
        };
        let hosts: Vec<usize> = (0..hosts).map(|_| class(random.below(10))).collect();
        let vms = (0..hosts.len() * VMS_PER_HOST)
            .map(|_| (random.below(kinds.len()) as u16, random.below(PRIORITIES) as u8))
            .collect();
        Ok(Self { classes, hosts, kinds, vms })
    }
}
