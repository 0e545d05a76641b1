//! Flows of a spec, run from the host's side of its networks and answered in its guests.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtvirtio_kernel::Root;
use rtvirtio_measure::flow::{self, FlowLoad, Peer};
use rtvirtio_measure::workload::WARM_UP;
use rtvirtio_measure::{HostFacts, MeasureError, Run, TaskResult, VmKind};
use rtvirtio_spec::{Flow, HostSpec, Mark, Vm};
use rtvirtio_units::MAX_INTERFACE_NAME;
use rtvirtio_vmm::agent::Process;
use rtvirtio_vmm::{AgentAddress, GuestAgent};

use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::find;
use crate::progress::Progress;

/// Port of an echo that the user names without one (RFC 862).
const ECHO: u16 = 7;
/// The first port of echoes that are started here.
const FIRST_PORT: u16 = 7_007;
/// Directory of named network namespaces (ip-netns(8)).
const NAMESPACES: &str = "/run/netns";
/// Time limit of a guest agent's answer.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time from the start of an echo to the check that it runs.
const STARTED: Duration = Duration::from_millis(300);
/// Seconds for which an echo outlives its run when this process is not there to end it.
const OUTLIVES: u64 = 30;
/// Length of a run before the run, which checks that all flows are answered.
const PROBE: Duration = Duration::from_millis(200);

/// Flows that can be run.
#[derive(Debug)]
pub struct Flows {
    loads: Vec<FlowLoad>,
    /// Ended when this is dropped.
    _echoes: Vec<Echo>,
}

/// An echo that was started in a guest.
#[derive(Debug)]
struct Echo {
    agent: AgentAddress,
    process: Process,
}

impl Drop for Echo {
    fn drop(&mut self) {
        // Otherwise it ends by itself.
        if let Ok(mut agent) = GuestAgent::reach(&self.agent, AGENT_TIMEOUT) {
            let _ = agent.terminate(self.process, Duration::from_secs(2));
        }
    }
}

/// Finds where each flow leaves this host and what answers it, and checks that it is answered.
/// `peers` holds `[NETWORK=][NAMESPACE/]INTERFACE`, `echoes` holds `VM[/FLOW]=ADDRESS[:PORT]`; in
/// guests without one, `rtvirtio-guest echo` is started through the agent.
///
/// # Errors
/// [`Kind::Argument`] for what the spec does not have, [`Kind::NotRunning`] for a flow that nothing
/// answers, each with the remedy.
pub fn prepare(
    host: &HostSpec,
    (peers, echoes): (&[String], &[String]),
    length: Duration,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Flows> {
    let peers = peers_of(host, peers)?;
    let named = echoes_of(host, echoes)?;
    let mut all = Flows { loads: Vec::new(), _echoes: Vec::new() };
    let mut left_out = Vec::new();
    for vm in host.vms() {
        let mut agent = None;
        for flow in &vm.flows {
            let network = vm.nics[flow.nic].network;
            let Some(peer) = &peers[network] else {
                left_out.push(format!("{}/{}", vm.name, flow.name));
                continue;
            };
            let own = named.get(&(vm.name.as_str(), Some(flow.name.as_str())));
            let echo = match own.or_else(|| named.get(&(vm.name.as_str(), None))) {
                Some(echo) => *echo,
                None => {
                    let agent = match &mut agent {
                        Some(agent) => agent,
                        none => none.insert(agent_of(host, vm, dirs)?),
                    };
                    let port = FIRST_PORT + all._echoes.len() as u16;
                    let (echo, address) = start_echo(agent, vm, flow, port, length)?;
                    all._echoes.push(echo);
                    address
                }
            };
            let (flow, mtu) = (flow.clone(), host.networks()[network].mtu);
            all.loads.push(FlowLoad { vm: vm.name.clone(), flow, peer: peer.clone(), echo, mtu });
        }
    }
    if !left_out.is_empty() {
        progress.warn(&format!(
            "{}: left out: no --network-peer says which interface is behind their network",
            left_out.join(", ")
        ));
    }
    if all.loads.is_empty() {
        bail!(Argument, "no flow of the spec is on a network that --network-peer names: declare [[vm.flow]]");
    }
    flow::run(&all.loads, Duration::ZERO, PROBE, &|| progress.is_cancelled()).map_err(error)?;
    Ok(all)
}

fn error(error: MeasureError) -> Error {
    match error {
        MeasureError::Cancelled => Error::cancelled(),
        other => Error::from_source(Kind::NotRunning, other),
    }
}

impl Flows {
    /// Runs all at once and judges them, in the spec's order.
    fn run(&self, length: Duration, stop: &(dyn Fn() -> bool + Sync)) -> Result<Vec<TaskResult>> {
        let measured = flow::run(&self.loads, WARM_UP, length, stop).map_err(error)?;
        Ok(measured.iter().zip(&self.loads).map(|(m, load)| m.result(load)).collect())
    }

    /// Runs them while `tasks` runs those of the disks; one run holds both.
    pub fn run_with(
        &self,
        length: Duration,
        progress: &dyn Progress,
        tasks: impl FnOnce() -> Result<Run>,
    ) -> Result<Run> {
        let failed = AtomicBool::new(false);
        let stop = || failed.load(Ordering::Relaxed) || progress.is_cancelled();
        let (flows, run) = std::thread::scope(|scope| {
            let flows = scope.spawn(|| self.run(length, &stop));
            let run = tasks();
            failed.store(run.is_err(), Ordering::Relaxed);
            (flows.join(), run)
        });
        let mut run = run?;
        run.tasks.extend(flows.unwrap_or_else(|_| bail!(System, "the flows' thread ended: a defect"))?);
        Ok(run)
    }

    /// Runs them alone.
    pub fn run_alone(&self, scheme: &str, length: Duration, progress: &dyn Progress) -> Result<Run> {
        let total = length + WARM_UP;
        let mut bar = progress.bar(&format!("running {} flows", self.loads.len()), total.as_secs());
        let wait = || {
            let begin = Instant::now();
            while let Some(left) = total.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
                bar.set(begin.elapsed().as_secs());
                progress.pause(left.min(Duration::from_millis(200)))?;
            }
            Ok(Run {
                scheme: scheme.to_owned(),
                kind: VmKind::Qemu,
                seconds: length.as_secs_f64(),
                noise: None,
                disk: None,
                tasks: Vec::new(),
            })
        };
        self.run_with(length, progress, wait)
    }
}

/// The host, as the result file of a run without disks describes it.
#[must_use]
pub fn facts(host: &HostSpec) -> HostFacts {
    let networks: Vec<&str> = host.networks().iter().map(|n| n.name()).collect();
    HostFacts {
        kernel: crate::kernel_release(),
        cpus: crate::cpus(),
        vmm: "not inspected".to_owned(),
        accelerator: String::new(),
        device: format!("network {}", networks.join(", ")),
    }
}

/// The peer of each network, in the spec's order.
fn peers_of(host: &HostSpec, of: &[String]) -> Result<Vec<Option<Peer>>> {
    let names: Vec<&str> = host.networks().iter().map(|n| n.name()).collect();
    let mut peers = vec![None; names.len()];
    for text in of {
        let (network, peer) = match text.split_once('=') {
            Some((network, peer)) => (network, peer),
            None => match names.as_slice() {
                [] => bail!(Argument, "--network-peer {text}: the spec has no [[network]]"),
                [one] => (*one, text.as_str()),
                _ => bail!(
                    Argument,
                    "--network-peer {text}: say of which network: --network-peer {}={text}",
                    names.join("=... or --network-peer ")
                ),
            },
        };
        let Some(i) = names.iter().position(|name| *name == network) else {
            bail!(
                Argument,
                "--network-peer {text}: the spec has no network \"{network}\"; it has {}",
                names.join(", ")
            );
        };
        if peers[i].is_some() {
            bail!(Argument, "--network-peer {text}: network \"{network}\" has a peer already");
        }
        peers[i] = Some(peer_of(text, peer)?);
    }
    Ok(peers)
}

/// `[NAMESPACE/]INTERFACE`: a namespace by its name, or as a file.
fn peer_of(text: &str, peer: &str) -> Result<Peer> {
    let (namespace, interface) = match peer.rsplit_once('/') {
        Some((namespace, interface)) => (Some(namespace), interface),
        None => (None, peer),
    };
    let odd = |c: char| c.is_whitespace() || c.is_control() || c == ':';
    if interface.is_empty() || interface.len() > MAX_INTERFACE_NAME || interface.contains(odd) {
        bail!(
            Argument,
            "--network-peer {text}: \"{interface}\" is no name of an interface; `ip link` shows them"
        );
    }
    let namespace = match namespace {
        None => None,
        Some("") => {
            bail!(Argument, "--network-peer {text}: no namespace before the `/`; `ip netns` shows them")
        }
        Some(path) if path.starts_with('/') => Some(PathBuf::from(path)),
        Some(name) => Some(PathBuf::from(NAMESPACES).join(name)),
    };
    if let Some(path) = namespace.as_ref().filter(|path| !path.exists()) {
        bail!(
            Argument,
            "--network-peer {text}: there is no network namespace {}; `ip netns` shows them",
            path.display()
        );
    }
    Ok(Peer { namespace, interface: interface.to_owned() })
}

/// Echoes by VM, and by flow where one is named for it alone.
fn echoes_of<'a>(
    host: &'a HostSpec,
    of: &'a [String],
) -> Result<HashMap<(&'a str, Option<&'a str>), SocketAddr>> {
    let mut echoes = HashMap::new();
    for text in of {
        let Some((name, address)) = text.split_once('=') else {
            bail!(Argument, "--network-echo {text}: write VM=ADDRESS or VM/FLOW=ADDRESS:PORT");
        };
        let (vm, flow) = match name.split_once('/') {
            Some((vm, flow)) => (vm, Some(flow)),
            None => (name, None),
        };
        let Some(found) = host.vms().iter().find(|one| one.name == vm) else {
            bail!(Argument, "--network-echo {text}: the spec has no VM \"{vm}\"");
        };
        if let Some(flow) = flow.filter(|flow| !found.flows.iter().any(|one| one.name == *flow)) {
            bail!(Argument, "--network-echo {text}: VM \"{vm}\" has no flow \"{flow}\"");
        }
        let address = match (address.parse::<SocketAddr>(), address.parse::<IpAddr>()) {
            (Ok(address), _) => address,
            (_, Ok(ip)) => SocketAddr::new(ip, ECHO),
            _ => bail!(
                Argument,
                "--network-echo {text}: \"{address}\" is no IP address, such as 10.0.0.5 or 10.0.0.5:7007"
            ),
        };
        if echoes.insert((vm, flow), address).is_some() {
            bail!(Argument, "--network-echo {text}: there is one for \"{name}\" already");
        }
    }
    Ok(echoes)
}

/// Remedy where nothing can be started in a guest.
fn by_hand(vm: &Vm) -> String {
    format!(
        "run `rtvirtio-guest echo` (or any UDP echo) in the guest, and name it: --network-echo {}=ADDRESS",
        vm.name
    )
}

fn agent_of(host: &HostSpec, vm: &Vm, dirs: &Dirs) -> Result<AgentAddress> {
    let found = find::one_of_host(host.vms(), &vm.name, dirs);
    let found = found.and_then(|vm| vm.agent(&Root::default()));
    let agent = found.with_context(|| format!("flows of VM {}: {}", vm.name, by_hand(vm)))?;
    agent.with_context(|| format!("flows of VM {}: it has no guest agent: {}", vm.name, by_hand(vm)))
}

/// Starts an echo for a flow. The connection to the agent is not kept: it serves one client.
fn start_echo(
    address: &AgentAddress,
    vm: &Vm,
    flow: &Flow,
    port: u16,
    length: Duration,
) -> Result<(Echo, SocketAddr)> {
    let context = || format!("flow {}/{}: {}", vm.name, flow.name, by_hand(vm));
    let mut agent = GuestAgent::reach(address, AGENT_TIMEOUT).with_context(context)?;
    let mac = vm.nics[flow.nic].mac.to_string();
    let ip = agent.addresses(&mac).with_context(context)?.into_iter().next();
    let ip = ip.with_context(|| {
        format!("flow {}/{}: the guest has no IP address on the card {mac}: give it one", vm.name, flow.name)
    })?;
    let seconds = (length + WARM_UP).as_secs() + OUTLIVES;
    let mut argv = vec!["rtvirtio-guest".to_owned(), "echo".to_owned()];
    argv.extend(["--port".to_owned(), port.to_string(), "--for".to_owned(), seconds.to_string()]);
    if let Some(Mark::Dscp(dscp)) = flow.mark {
        argv.extend(["--dscp".to_owned(), dscp.to_string()]);
    }
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    let process = agent.spawn(&argv).with_context(|| {
        format!(
            "flow {}/{}: is rtvirtio-guest installed in the guest? Or {}",
            vm.name,
            flow.name,
            by_hand(vm)
        )
    })?;
    std::thread::sleep(STARTED);
    if let Some(ended) = agent.poll(process).with_context(context)? {
        bail!(
            NotRunning,
            "{}: `{}` ended: {}",
            context(),
            argv.join(" "),
            String::from_utf8_lossy(&ended.stderr).trim()
        );
    }
    Ok((Echo { agent: address.clone(), process }, SocketAddr::new(ip, port)))
}

#[cfg(test)]
mod tests;
