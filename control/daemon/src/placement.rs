//! `[placement]`: publishes this host's capacity for contracts in OpenStack's Placement, in a
//! thread of its own. An unreachable Placement holds up nothing here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rtvirtio_capacity::{Contract as Promise, Disk, Node, Permille, Scalars, WHOLE, tightest};
use rtvirtio_fleet::resources;
use rtvirtio_kernel::{Root, process};
use rtvirtio_placement::{PlacementConfig, Published, Publisher, Taken, Wanted};
use rtvirtio_spec::Device;
use rtvirtio_units::Ratio;
use rtvirtio_workflow::contracts::{ActiveContracts, free_share};

use crate::desired::Contract;
use crate::history::{EventKind, now};
use crate::linux::RunningVm;
use crate::lock::lock;
use crate::snapshot::{PlacementSnapshot, Snapshot, VmState};

/// Interval of checks whether other contracts are in force than were published.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Data that the publisher's thread reads from the service.
pub(crate) trait Source: Send {
    /// Current state of the service.
    fn snapshot(&self) -> Arc<Snapshot>;
    /// VMs that run, with their contracts.
    fn running(&self) -> Vec<Arc<RunningVm>>;
    /// Whether the service only observes.
    fn only_observes(&self) -> bool;
    /// Whether the loop has completed a pass.
    fn has_looked(&self) -> bool;
    /// Wakes the loop, so that news is shown.
    fn wake(&self);
}

/// Handle of the publisher's thread, which ends when this is dropped.
pub(crate) struct Placement {
    state: Arc<Mutex<PlacementSnapshot>>,
    events: Receiver<(EventKind, String)>,
    _end: Sender<()>,
}

impl Placement {
    /// Starts the thread.
    ///
    /// # Errors
    /// A mistake in the configuration, in words.
    pub(crate) fn start(config: &PlacementConfig, source: impl Source + 'static) -> Result<Self, String> {
        let publisher = Publisher::new(config).map_err(|e| e.to_string())?;
        let state = Arc::new(Mutex::new(PlacementSnapshot {
            url: config.url.clone(),
            provider: config.provider.clone(),
            is_dry: source.only_observes(),
            published: None,
            inventories: BTreeMap::new(),
            problem: None,
            notes: Vec::new(),
            failures: 0,
        }));
        let (sender, events) = channel();
        let (end, ended) = channel::<()>();
        let mut round = Round {
            config: config.clone(),
            publisher,
            source,
            state: Arc::clone(&state),
            events: sender,
            host: None,
            last: None,
        };
        let run = move || {
            let mut due = Instant::now();
            while matches!(ended.recv_timeout(LOOK_EVERY.min(round.every())), Err(RecvTimeoutError::Timeout))
            {
                if let Some(pause) = round.publish_if_due(Instant::now() >= due) {
                    due = Instant::now() + pause;
                    round.source.wake();
                }
            }
        };
        std::thread::Builder::new().name("placement".to_owned()).spawn(run).map_err(|e| e.to_string())?;
        Ok(Self { state, events, _end: end })
    }

    /// Current state of publication.
    pub(crate) fn snapshot(&self) -> PlacementSnapshot {
        lock(&self.state).clone()
    }

    /// Events since the last call.
    pub(crate) fn events(&self) -> Vec<(EventKind, String)> {
        self.events.try_iter().collect()
    }
}

struct Round<S> {
    config: PlacementConfig,
    publisher: Publisher,
    source: S,
    state: Arc<Mutex<PlacementSnapshot>>,
    events: Sender<(EventKind, String)>,
    /// This host, and the CPU time that the kernel does not grant to contracts.
    host: Option<(Node, Taken)>,
    /// Last published contracts; `None` before the first round, and after a failure.
    last: Option<Wanted>,
}

impl<S: Source> Round<S> {
    fn every(&self) -> Duration {
        Duration::from_nanos(self.config.every.0)
    }

    /// Publishes where it is due, or where other contracts are in force than at the last round.
    /// Returns the pause until it is due again.
    fn publish_if_due(&mut self, is_due: bool) -> Option<Duration> {
        let (snapshot, running) = (self.source.snapshot(), self.source.running());
        if !self.source.has_looked() {
            return None;
        }
        if let Some(why) = not_known(&snapshot) {
            lock(&self.state).problem = Some(why);
            return None;
        }
        if is_due {
            match self.read_host(&running) {
                Ok(host) => self.host = Some(host),
                Err(why) => {
                    self.last = None;
                    self.failed(why);
                    return Some(self.every());
                }
            }
        }
        let (node, others) = self.host.as_ref()?;
        let (wanted, remarks) = wanted(node, others, &snapshot, &running);
        // An unreachable service is not retried sooner because contracts change.
        let is_new = self.last.as_ref().is_some_and(|last| *last != wanted);
        if !is_due && !is_new {
            // The last publication is still that of the contracts in force.
            if self.last.is_some() {
                lock(&self.state).problem = None;
            }
            return None;
        }
        match self.publisher.round(&wanted, self.source.only_observes()) {
            Ok(published) => {
                self.last = Some(wanted);
                self.done(published, remarks);
            }
            Err(e) => {
                self.last = None;
                self.failed(e.to_string());
            }
        }
        Some(self.publisher.pause())
    }

    /// The host of the fleet file, and the share of its CPUs that is not free for contracts.
    fn read_host(&self, running: &[Arc<RunningVm>]) -> Result<(Node, Taken), String> {
        let path = &self.config.fleet;
        let fleet = rtvirtio_fleet::load(path).map_err(|e| rtvirtio_workflow::one_line(&e))?;
        let name = self.config.host_name();
        let host = fleet.hosts.iter().find(|h| h.name == name);
        let host = host.ok_or_else(|| {
            format!(
                "{} has no host {name}: name it there, or say host = \"...\" in [placement]",
                path.display()
            )
        })?;
        let node = fleet.classes[host.class].clone();
        let ours: ActiveContracts =
            running.iter().filter_map(|vm| Some((vm.cpu.clone()?, vm.processes.clone()))).collect();
        let vms: Vec<&str> = running.iter().map(|vm| vm.contract.vm.name.as_str()).collect();
        let free =
            free_share(&vms, &ours).map_err(|e| format!("what the kernel grants is not known: {e:#}"))?;
        let mut lacks = node.nothing();
        lacks.cpu = Permille::taken(1.0 - free.0 / node.cpu.0.max(1e-9) - 1e-9);
        let takes = amounts(&node, &lacks);
        Ok((node, Taken { vm: "(not granted)".to_owned(), uuid: None, takes }))
    }

    fn done(&self, published: Published, remarks: Vec<String>) {
        let mut state = lock(&self.state);
        let is_dry = state.is_dry;
        let notes = [published.notes, remarks].concat();
        for note in notes.iter().filter(|note| !state.notes.contains(note)) {
            self.tell(EventKind::Note, note.clone());
        }
        let was_away = state.problem.take().is_some() && state.failures > 0;
        if (!published.changes.is_empty() && !is_dry) || was_away {
            let what = published.changes.iter().map(|c| {
                let from = c.from.as_ref().map_or_else(|| "none".to_owned(), |i| i.reserved.to_string());
                format!("{}: {from} -> {} of {} reserved", c.class, c.to.reserved, c.to.total)
            });
            let what: Vec<String> = what.collect();
            let what = if what.is_empty() { "all as it was".to_owned() } else { what.join("; ") };
            self.tell(EventKind::Note, format!("published in Placement: {what}"));
        }
        if !is_dry {
            state.published = Some(now());
        }
        (state.inventories, state.notes) = (published.inventories, notes);
    }

    fn failed(&self, why: String) {
        let mut state = lock(&self.state);
        state.failures += 1;
        if state.problem.as_ref() != Some(&why) {
            let text = format!("not published in Placement, the inventory there stays: {why}");
            self.tell(EventKind::Failed, text);
        }
        state.problem = Some(why);
    }

    fn tell(&self, kind: EventKind, text: String) {
        // The service may be gone.
        let _ = self.events.send((kind, text));
    }
}

/// Reason why the contracts in force are not known: then what is published stays.
fn not_known(snapshot: &Snapshot) -> Option<String> {
    let unknown = snapshot.vms.iter().find(|vm| matches!(vm.state, VmState::Unknown | VmState::Held))?;
    Some(format!(
        "it is not known what {} takes ({:?}): what is published stays",
        unknown.name, unknown.state
    ))
}

/// Resources that contracts in force take of this host; others wait, were refused, or their VMs are
/// off. Also remarks on parts that are not counted, or not in full.
fn wanted(
    node: &Node,
    others: &Taken,
    snapshot: &Snapshot,
    running: &[Arc<RunningVm>],
) -> (Wanted, Vec<String>) {
    let classes: BTreeSet<String> = amounts(node, &node.nothing()).into_keys().collect();
    let (mut contracts, mut remarks) = (vec![others.clone()], Vec::new());
    for vm in running {
        let name = &vm.contract.vm.name;
        let state = snapshot.vms.iter().find(|of| of.name == *name).map(|of| of.state);
        if matches!(state, None | Some(VmState::Off | VmState::Refused | VmState::Waiting)) {
            continue;
        }
        let share = vm.cpu.as_ref().map(|of| of.contract.share());
        let (promise, lacks) = on_node(&vm.contract, share, node);
        remarks.extend(lacks.into_iter().map(|what| {
            format!("{what} of {name} is not in the fleet file, so what it takes there is not counted")
        }));
        let takes = amounts(node, &node.scalars(&promise));
        remarks.extend(takes.iter().filter(|(_, n)| **n > WHOLE.0).map(|(class, _)| {
            format!("{name}: this host cannot promise what its contract asks of {class} even alone, so all of it is reserved")
        }));
        contracts.push(Taken { vm: name.clone(), uuid: uuid(vm), takes });
    }
    (Wanted { classes, contracts }, remarks)
}

fn amounts(node: &Node, of: &Scalars) -> BTreeMap<String, u32> {
    resources(node, of).into_iter().map(|(class, p)| (class, p.0)).collect()
}

/// A contract with the host's own names of its disks and networks, and the ones that the host
/// lacks.
fn on_node(contract: &Contract, share: Option<Ratio>, node: &Node) -> (Promise, Vec<String>) {
    let mut promise = contract.promise.clone();
    // A budget that was found for a demand is that in force.
    promise.cpu = share.or(promise.cpu);
    let mut lacks = Vec::new();
    for of in &mut promise.disks {
        let part = contract.parts.iter().find(|part| part.name == of.device);
        if let Some(Device::Path(path)) = part.map(|part| &part.spec.device) {
            let is_it = |d: &&Disk| path.file_name().is_some_and(|name| name == d.device());
            if let Some(disk) = node.disks.iter().find(is_it) {
                of.device.clone_from(&disk.name);
            }
        }
    }
    promise.disks.retain(|of| {
        let is_there = node.disk(of.device.as_deref()).is_ok();
        if !is_there && tightest(&of.vm).is_some() {
            lacks.push(format!("disk {}", of.device.as_deref().unwrap_or("without a name")));
        }
        is_there
    });
    promise.networks.retain(|of| {
        let is_there = node.network(of.network.as_deref()).is_ok();
        if !is_there {
            lacks.push(format!("network {}", of.network.as_deref().unwrap_or("without a name")));
        }
        is_there
    });
    (promise, lacks)
}

/// The VM's UUID, as its process was given it: that of Nova's instance, where Nova has started it.
fn uuid(vm: &RunningVm) -> Option<String> {
    let root = Root::default();
    let of = |process: &rtvirtio_kernel::ProcessId| {
        let line = process::command_line(&root, process.pid).ok()?;
        let at = line.iter().position(|word| word == "-uuid")?;
        line.get(at + 1).cloned()
    };
    vm.processes.iter().find_map(of)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rtvirtio_capacity::{DeviceModel, Network, Options};
    use rtvirtio_spec::HostSpec;
    use rtvirtio_twin::TwinProfile;
    use rtvirtio_units::{Bytes, BytesPerSec};
    use rtvirtio_vmm::threads::Named;
    use serde_json::json;

    use super::*;

    const CPU: &str = "CUSTOM_RTVIRTIO_CPU";
    const DISK: &str = "CUSTOM_RTVIRTIO_DISK_FAST";

    /// A host whose disk has a name in the fleet file, and is `/dev/emmc` of the kernel.
    fn node() -> Node {
        let device = DeviceModel::declared("emmc", &TwinProfile::built_in("emmc").unwrap(), Bytes(1 << 30));
        let disks = vec![Disk::new(Some("fast".to_owned()), &device, &Options::default())];
        let networks = vec![Network::new(Some("field".to_owned()), BytesPerSec(1e8), 1_500, None)];
        Node { disks, networks, cpu: Ratio(0.8) }
    }

    fn running(name: &str, device: &str, network: &str) -> Arc<RunningVm> {
        let text = format!(
            "[device]\npath = \"/dev/{device}\"\n[[network]]\nname = \"{network}\"\nlink = \"100Mbit/s\"\n[[vm]]\nname = \"{name}\"\nqmp = \"/q\"\n\
             cpu = {{ budget = \"4ms\", period = \"20ms\" }}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"50/s\"\n\
             target = {{ percentile = \"p99.9\", latency = \"300ms\" }}\n[[vm.nic]]\nmac = \"52:54:00:00:00:01\"\ntap = \"t\"\n\
             [[vm.flow]]\nname = \"f\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"100/s\"\ntarget = {{ latency = \"9ms\" }}\n"
        );
        let spec = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
        let contract = Contract::of_spec(&spec, Path::new("x.toml")).remove(0);
        Arc::new(RunningVm { contract, processes: Vec::new(), named: Named::default(), cpu: None })
    }

    fn snapshot(states: &[(&str, &str)]) -> Snapshot {
        let vm = |(name, state): &(&str, &str)| json!({ "name": name, "state": state, "processes": [], "drift": [], "targets": [] });
        let vms: Vec<_> = states.iter().map(vm).collect();
        let all = json!({
            "schema": "s", "version": "v", "pid": 1, "mode": "auto", "vms": vms, "faults": [], "problems": [],
        });
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn contracts_in_force_are_counted_by_the_hosts_names() {
        let all =
            [running("plc", "emmc", "field"), running("new", "emmc", "field"), running("odd", "sdz", "lan")];
        let states = snapshot(&[("plc", "in_force"), ("new", "waiting"), ("odd", "drift")]);
        let others = Taken { vm: "(not granted)".to_owned(), uuid: None, takes: BTreeMap::new() };
        let (wanted, remarks) = wanted(&node(), &others, &states, &all);
        assert_eq!(wanted.classes.len(), 3);
        let names: Vec<&str> = wanted.contracts.iter().map(|c| c.vm.as_str()).collect();
        assert_eq!(names, ["(not granted)", "plc", "odd"]);
        let [_, plc, odd] = wanted.contracts.as_slice() else { panic!("{wanted:?}") };
        assert!(plc.takes[CPU] == 250 && plc.takes[DISK] > 0, "{plc:?}");
        assert!(plc.takes["CUSTOM_RTVIRTIO_NET_FIELD"] > 0, "{plc:?}");
        // What this host has not is said, and the rest counts.
        assert!(odd.takes[CPU] == 250 && odd.takes["CUSTOM_RTVIRTIO_NET_FIELD"] == 0, "{odd:?}");
        // A device without a name is the host's only one, whatever the kernel calls it.
        assert_eq!(odd.takes[DISK], plc.takes[DISK]);
        assert_eq!(remarks.len(), 1, "{remarks:?}");
        assert!(remarks[0].contains("network lan of odd"), "{remarks:?}");
    }

    #[test]
    fn nothing_is_published_while_it_is_not_known_what_is_in_force() {
        assert_eq!(not_known(&snapshot(&[("plc", "in_force"), ("off", "off")])), None);
        for state in ["unknown", "held"] {
            assert!(not_known(&snapshot(&[("plc", state)])).unwrap().contains("plc"));
        }
    }

    struct Service(Snapshot, Arc<RunningVm>);

    impl Source for Service {
        fn snapshot(&self) -> Arc<Snapshot> {
            Arc::new(self.0.clone())
        }
        fn running(&self) -> Vec<Arc<RunningVm>> {
            vec![Arc::clone(&self.1)]
        }
        fn only_observes(&self) -> bool {
            false
        }
        fn has_looked(&self) -> bool {
            true
        }
        fn wake(&self) {}
    }

    /// A round after one that has published the contract of `plc`, which is in force.
    fn published() -> Round<Service> {
        let text = "url = \"http://127.0.0.1:9\"\nprovider = \"n1\"\nfleet = \"/not/there.toml\"\n";
        let config: PlacementConfig = toml::from_str(text).unwrap();
        let source = Service(snapshot(&[("plc", "in_force")]), running("plc", "emmc", "field"));
        let others = Taken { vm: "(not granted)".to_owned(), uuid: None, takes: BTreeMap::new() };
        let (last, _) = wanted(&node(), &others, &source.0, &source.running());
        let state = PlacementSnapshot {
            url: config.url.clone(),
            provider: config.provider.clone(),
            is_dry: false,
            published: Some(now()),
            inventories: BTreeMap::new(),
            problem: None,
            notes: Vec::new(),
            failures: 0,
        };
        Round {
            publisher: Publisher::new(&config).unwrap(),
            config,
            source,
            state: Arc::new(Mutex::new(state)),
            events: channel().0,
            host: Some((node(), others)),
            last: Some(last),
        }
    }

    #[test]
    fn a_problem_ends_where_what_is_published_is_known_to_be_current_again() {
        let mut round = published();
        let problem = |round: &Round<Service>| lock(&round.state).problem.clone();
        round.source.0 = snapshot(&[("plc", "unknown")]);
        assert_eq!(round.publish_if_due(false), None);
        assert!(problem(&round).unwrap().contains("plc"));
        round.source.0 = snapshot(&[("plc", "in_force")]);
        assert_eq!((round.publish_if_due(false), problem(&round)), (None, None));
        // That of a failed round stays until one succeeds, and is not counted at each look.
        assert!(round.publish_if_due(true).is_some());
        assert!(problem(&round).unwrap().contains("there.toml"));
        round.host = None;
        assert_eq!(round.publish_if_due(false), None);
        assert!(problem(&round).is_some() && lock(&round.state).failures == 1);
    }
}
