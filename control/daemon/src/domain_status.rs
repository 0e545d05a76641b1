//! States of contracts, as written into the live metadata of libvirt's VMs.

use std::collections::BTreeMap;

use rtvirtio_spec::{HostHandle, Reach};
use rtvirtio_vmm::libvirt::{DomainSeen, DomainStatus};

use crate::config::Mode;
use crate::desired::{Desired, Origin};
use crate::snapshot::Snapshot;
use crate::word;

/// The state of a contract in metadata that cannot be read: no VM of the service has it.
const MALFORMED: &str = "malformed";

/// The state of a contract whose VM does not run.
const OFF: &str = "off";

/// Statuses by libvirt name or UUID of the VM, as its contract has it.
pub(crate) type Statuses = BTreeMap<String, DomainStatus>;

/// Statuses of one libvirt daemon's VMs. `None` where nothing is to be written: not all contracts
/// are known yet, or the service only observes.
pub(crate) fn statuses(desired: &Desired, snapshot: &Snapshot, uri: &str, now: &str) -> Option<Statuses> {
    if desired.is_incomplete || snapshot.mode == Mode::Observe {
        return None;
    }
    let mut out = Statuses::new();
    for fault in &desired.faults {
        if let Origin::Domain { name, uri: of } = &fault.origin {
            if of == uri {
                out.insert(name.clone(), DomainStatus::new(MALFORMED, now, &fault.why));
            }
        }
    }
    for contract in &desired.contracts {
        let Reach::Existing { host: HostHandle::Domain(domain), .. } = &contract.vm.reach else { continue };
        let vm = snapshot.vms.iter().find(|vm| vm.name == contract.vm.name);
        if let Some(vm) = vm.filter(|_| domain.uri() == uri) {
            let why = vm.why.as_deref().unwrap_or_default();
            let status = DomainStatus::new(&word(&vm.state), now, why);
            out.insert(domain.domain.clone(), status);
        }
    }
    Some(out)
}

/// The new statuses; an unchanged one keeps the time of the old one.
pub(crate) fn since(mut new: Statuses, before: &Statuses) -> Statuses {
    for (domain, status) in &mut new {
        if let Some(old) = before.get(domain).filter(|old| old.is_same(status)) {
            status.since.clone_from(&old.since);
        }
    }
    new
}

/// Writes that bring the metadata of running VMs up to date: UUID and status, `None` to remove it.
/// An unchanged status keeps its time, so that a restart of the service writes nothing.
pub(crate) fn changes<'s>(
    wanted: &'s Statuses,
    running: &'s [DomainSeen],
) -> Vec<(&'s str, Option<&'s DomainStatus>)> {
    let mut out = Vec::new();
    for domain in running {
        let is_it = |key: &str| *key == domain.name || key.eq_ignore_ascii_case(&domain.uuid);
        let status = wanted.iter().find(|(key, _)| is_it(key)).map(|(_, status)| status);
        let is_said = match (status, &domain.status) {
            // Just started: the state of its contract is known in a moment.
            (Some(status), _) if status.state == OFF => true,
            (Some(status), Some(there)) => status.is_same(there),
            (None, None) => true,
            _ => false,
        };
        if !is_said {
            out.push((domain.uuid.as_str(), status));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::{HostSpec, LibvirtDomain};

    use super::*;
    use crate::config::Config;
    use crate::desired::{Contract, ContractFault};
    use crate::memory::Memory;
    use crate::observed::{Observed, ObservedVm};

    const URI: &str = LibvirtDomain::DEFAULT_URI;

    fn status(state: &str, since: &str) -> DomainStatus {
        DomainStatus::new(state, since, "")
    }

    #[test]
    fn domains_of_this_daemon_say_how_their_contracts_stand() {
        let vm = |name: &str, how: &str| {
            let text = format!(
                "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{name}\"\n{how}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
            );
            let spec = HostSpec::parse("x.toml", &text).unwrap();
            Contract::of_spec(&spec, std::path::Path::new("x.toml")).remove(0)
        };
        let contracts = vec![
            vm("plc", "domain = \"controller\""),
            vm("other", "domain = \"x\"\nuri = \"qemu:///session\""),
            vm("hmi", "pid = 7"),
        ];
        let origin = |uri: &str| Origin::Domain { name: "torn".to_owned(), uri: uri.to_owned() };
        let fault = |uri| ContractFault { origin: origin(uri), why: "not a spec".to_owned() };
        let faults = vec![fault(URI)];
        let desired = Desired { contracts, faults, ..Desired::default() };
        let vms = ["plc", "other", "hmi"].map(|vm| (vm.to_owned(), ObservedVm::off("it is off")));
        let mut observed = Observed { vms: vms.into(), ..Observed::default() };
        observed.admission.refused.insert("plc".to_owned(), "too much".to_owned());
        let snapshot = |mode, desired: &Desired| {
            Snapshot::build(desired, &observed, &Config { mode, ..Config::default() }, &Memory::default())
        };
        let auto = snapshot(Mode::Auto, &desired);
        let all = statuses(&desired, &auto, URI, "now").unwrap();
        let words: Vec<_> = all.iter().map(|(d, s)| (d.as_str(), s.state.as_str(), s.why.as_str())).collect();
        assert_eq!(words, [("controller", "refused", "too much"), ("torn", "malformed", "not a spec")]);
        // What only observes writes nothing, and neither does one that does not know all yet.
        assert_eq!(statuses(&desired, &snapshot(Mode::Observe, &desired), URI, "now"), None);
        let unknown = Desired { is_incomplete: true, ..desired };
        assert_eq!(statuses(&unknown, &auto, URI, "now"), None);
    }

    #[test]
    fn only_what_is_said_otherwise_is_written() {
        let seen = |n: u8, name: &str, status| {
            let (uuid, name) = (format!("AA-{n:02}"), name.to_owned());
            DomainSeen { uuid, name, status }
        };
        let running = [
            seen(1, "plc", None),
            seen(2, "hist", Some(status("in_force", "yesterday"))),
            seen(3, "hmi", Some(status("in_force", "yesterday"))),
            seen(4, "free", Some(status("refused", "yesterday"))),
            seen(5, "bare", None),
            seen(6, "started", None),
        ];
        let wanted: Statuses =
            [("plc", "in_force"), ("aa-02", "in_force"), ("hmi", "refused"), ("started", "off")]
                .map(|(domain, state)| (domain.to_owned(), status(state, "now")))
                .into();
        let written: Vec<(&str, Option<&str>)> =
            changes(&wanted, &running).iter().map(|(d, s)| (*d, s.map(|s| s.state.as_str()))).collect();
        assert_eq!(written, [("AA-01", Some("in_force")), ("AA-03", Some("refused")), ("AA-04", None)]);
        let next: Statuses = [("plc".to_owned(), status("in_force", "later"))].into();
        assert_eq!(since(next.clone(), &wanted)["plc"].since, "now");
        assert_eq!(since(next, &Statuses::new())["plc"].since, "later");
    }
}
