//! The plan of the I/O domain and the capacity of hosts agree on networks.

use std::path::Path;

use proptest::prelude::*;
use rtvirtio_capacity::{Contract, Network, Node, admit};
use rtvirtio_domain_plan::plan_networks;
use rtvirtio_spec::HostSpec;
use rtvirtio_units::Ratio;

/// Bytes, frames per second, frames at once, whether it is urgent, target in us, the VM's limit.
type Asked = (u32, u32, u32, bool, u32, Option<u32>);

fn asked() -> impl Strategy<Value = Asked> {
    let limit = prop_oneof![3 => Just(None), 1 => (500u32..20_000).prop_map(Some)];
    (14u32..1_500, 1u32..4_000, 1u32..8, any::<bool>(), 800u32..20_000, limit)
}

fn spec(many: &[[Asked; 2]]) -> String {
    let mut text = "[device]\ntwin = \"qlc-nvme\"\n[[network]]\nlink = \"100Mbit/s\"\n".to_owned();
    for (i, flows) in many.iter().enumerate() {
        let limit = flows[0].5.map_or_else(String::new, |n| format!("traffic.tx = {{ rate = \"{n}/s\" }}\n"));
        text += &format!(
            "[[vm]]\nname = \"v{i}\"\nlab = \"qemu\"\n{limit}[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
             [[vm.nic]]\nmac = \"52:54:00:00:00:{i:02x}\"\ntap = \"tap{i}\"\n"
        );
        for (n, (frame, rate, burst, is_urgent, target_us, _)) in flows.iter().enumerate() {
            let mark = if *is_urgent { "pcp = 4\n" } else { "" };
            text += &format!(
                "[[vm.flow]]\nname = \"f{n}\"\ndirection = \"tx\"\nframe = \"{frame}B\"\nrate = \"{rate}/s\"\nburst = {burst}\n{mark}\
                 target = {{ latency = \"{target_us}us\" }}\n"
            );
        }
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// All targets of a plan hold exactly where a host with these networks admits all contracts.
    #[test]
    fn a_plan_is_feasible_where_the_host_admits(
        many in prop::collection::vec([asked(), asked()], 1..7),
    ) {
        let text = spec(&many);
        let host = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let plan = plan_networks(&host, Path::new("/run/ports")).remove(0);
        let networks = host.networks().iter().map(Network::of_spec).collect();
        let node = Node { disks: Vec::new(), networks, cpu: Ratio(1.0) };
        let mut all = Contract::all_of(&host, |_| Err("a demand")).unwrap();
        all.iter_mut().for_each(|c| c.disks.clear());
        let all: Vec<&Contract> = all.iter().collect();
        let (last, others) = all.split_last().unwrap();
        let answer = admit(&node, others, last);
        prop_assert_eq!(plan.feasible, answer.is_admitted(), "{:?}\n{:?}", plan, answer);
        if plan.feasible {
            // The same reservations, to the nanosecond.
            for (contract, port) in all.iter().zip(&plan.config.tx_sched().vms) {
                let reserves = node.networks[0].reserves(&contract.networks[0]).unwrap();
                for (ours, theirs) in reserves.into_iter().zip([port.urgent, port.normal]) {
                    let theirs = theirs.map(|r| (r.rate, r.burst, r.deadline));
                    let ours = ours.map(|r| ((r.share.0 * 1e9).round() as u64, r.burst.0, r.deadline));
                    prop_assert_eq!(ours, theirs);
                }
            }
        }
    }
}
