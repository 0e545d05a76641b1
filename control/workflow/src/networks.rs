//! Networks of a spec: without the I/O domain, and their flows on this host.

pub mod flows;

use std::path::Path;

use rtvirtio_domain_plan::plan_networks;
use rtvirtio_spec::{HostSpec, is_name_char};
use rtvirtio_units::MAX_INTERFACE_NAME;
use serde::Serialize;

use crate::error::{Result, bail};
use crate::progress::Progress;

/// Says that no flow is run, where the spec has some.
pub fn warn_not_run(host: &HostSpec, progress: &dyn Progress) {
    let flows: usize = host.vms().iter().map(|vm| vm.flows.len()).sum();
    if flows > 0 {
        progress.warn(&format!(
            "the {flows} flows of the spec's networks are left out: name the interface behind the network, as in \
             `--network-peer br0`, and they are run and judged too"
        ));
    }
}

/// Says that flows are not looked at, where the spec has some.
pub fn warn_left_out(host: &HostSpec, command: &str, progress: &dyn Progress) {
    let flows: usize = host.vms().iter().map(|vm| vm.flows.len()).sum();
    if flows > 0 {
        progress.warn(&format!(
            "the {flows} flows of the spec's networks are left out: `{command}` is about disks and CPUs; \
             `rtvirtio plan SPEC --domain` or `--tc` and `rtvirtio simulate SPEC` are about flows"
        ));
    }
}

/// A network as HTB classes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TcScript {
    /// Name of the network in the spec.
    pub network: String,
    /// The interface whose queue is replaced.
    pub interface: String,
    /// The commands, as a shell script.
    pub text: String,
    /// VMs and flows with a target that have no rate of their own, and why.
    pub refused: Vec<String>,
}

/// The network that `[NETWORK=]INTERFACE` names, as HTB classes of this interface.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) for a network that the spec does not have, and for a
/// name that is none of an interface.
pub fn tc_script(host: &HostSpec, of: &str) -> Result<TcScript> {
    let names: Vec<&str> = host.networks().iter().map(|n| n.name()).collect();
    let (network, interface) = match of.split_once('=') {
        Some((network, interface)) => (network, interface),
        None => match names.as_slice() {
            [] => bail!(Argument, "--tc {of}: the spec has no [[network]]"),
            [one] => (*one, of),
            _ => bail!(Argument, "--tc {of}: say which network: --tc {}={of}", names.join("=... or --tc ")),
        },
    };
    let Some(i) = names.iter().position(|name| *name == network) else {
        bail!(Argument, "--tc {of}: the spec has no network \"{network}\"");
    };
    let plain = |c: char| is_name_char(c) || c == '@';
    if interface.is_empty() || interface.len() > MAX_INTERFACE_NAME || !interface.chars().all(plain) {
        bail!(Argument, "--tc {of}: \"{interface}\" is no name of an interface; `ip link` shows them");
    }
    // Paths of sockets matter to the I/O domain only.
    let plan = plan_networks(host, Path::new("/")).swap_remove(i);
    let refused = plan.unpromised().map(|(name, why)| format!("{name}: {why}"));
    Ok(TcScript {
        network: network.to_owned(),
        interface: interface.to_owned(),
        text: rtvirtio_domain_plan::tc_script(&plan, interface),
        refused: refused.collect(),
    })
}
