//! Contracts in the metadata of libvirt's VMs, next to those of files. A file of the same VM takes
//! precedence; a malformed contract concerns its VM only.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_spec::{HostHandle, HostSpec, LibvirtDomain, Reach, Vm};
use rtvirtio_vmm::libvirt::DomainContract;
use toml_edit::{DocumentMut, Item, Table, value};

use crate::arrivals::names_domain;
use crate::desired::{Contract, ContractFault, Desired, Origin, PlannedHost};

/// Keys that name a VM otherwise than in libvirt.
const OTHER_WAYS: [&str; 5] = ["proxmox", "cgroup", "pid", "qmp", "lab"];

/// Contracts of the VMs of one libvirt daemon.
#[derive(Debug)]
pub(crate) struct DomainContracts {
    uri: String,
    /// Last answer of libvirt; `None` before the first.
    found: Option<Vec<DomainContract>>,
    /// VM named by each libvirt domain's last valid contract, by UUID.
    last_right: BTreeMap<String, String>,
    /// UUIDs of libvirt domains whose contract could not be read since the first answer: what an
    /// earlier process has put in force may be theirs.
    unread: BTreeSet<String>,
    /// Whether an answer was merged with the files.
    is_known: bool,
}

impl DomainContracts {
    pub fn new(uri: &str) -> Self {
        let (last_right, unread) = (BTreeMap::new(), BTreeSet::new());
        Self { uri: uri.to_owned(), found: None, last_right, unread, is_known: false }
    }

    /// Last answer of libvirt; `None` before the first.
    pub fn found(&self) -> Option<&Vec<DomainContract>> {
        self.found.as_ref()
    }

    /// Takes an answer of libvirt; returns whether it differs from the last one.
    pub fn take(&mut self, found: Vec<DomainContract>) -> bool {
        let is_new = self.found.as_ref() != Some(&found);
        self.found = Some(found);
        is_new
    }

    /// Merges the contracts of files, whose specs are `specs`, with those of libvirt.
    pub fn joined(&mut self, files: Desired, specs: &[HostSpec]) -> Desired {
        let mut desired = files;
        let Some(found) = &self.found else {
            return Desired { is_incomplete: true, ..desired };
        };
        let (mut right, mut all, mut unread) = (BTreeMap::new(), specs.to_vec(), BTreeSet::new());
        // What is in force for these stays, whatever libvirt says.
        let held: BTreeSet<String> = desired.held.iter().cloned().collect();
        let of_files: BTreeMap<String, Origin> =
            desired.contracts.iter().map(|c| (c.vm.name.clone(), c.origin.clone())).collect();
        let mut named: BTreeMap<String, Vec<Origin>> = BTreeMap::new();
        for domain in found {
            let origin = Origin::Domain { name: domain.name.clone(), uri: self.uri.clone() };
            let spec = domain.text.clone().and_then(|text| parse(&text, domain, &self.uri));
            let vm = match &spec {
                Ok(spec) => spec.vms().first().map(|vm| vm.name.clone()),
                Err(_) => self.last_right.get(&domain.uuid).cloned(),
            };
            if let Some(vm) = &vm {
                right.insert(domain.uuid.clone(), vm.clone());
            }
            if let Some(first) = desired.contracts.iter_mut().find(|c| is_of(&c.vm, domain, &self.uri)) {
                first.overrides = Some(origin);
                continue;
            }
            if vm.as_ref().is_some_and(|vm| held.contains(vm)) {
                continue;
            }
            if let Some(vm) = &vm {
                named.entry(vm.clone()).or_default().push(origin.clone());
            }
            match spec {
                Ok(spec) => {
                    desired.contracts.extend(Contract::of_spec(&spec, origin));
                    all.push(spec);
                }
                Err(why) => {
                    if vm.is_none() && (!self.is_known || self.unread.contains(&domain.uuid)) {
                        unread.insert(domain.uuid.clone());
                    }
                    desired.held.extend(vm);
                    desired.faults.push(ContractFault { origin, why });
                }
            }
        }
        for (vm, origins) in named {
            let file = of_files.get(&vm).map(|at| {
                (at.clone(), "if it is the same VM, name it there by `domain`, else give one another `name`")
            });
            let domains = origins.into_iter().map(|at| (at, "give one of them another `name`"));
            let places: Vec<_> = file.into_iter().chain(domains).collect();
            if places.len() > 1 {
                desired.take_out(&vm, &places);
            }
        }
        desired.has_unread |= !unread.is_empty();
        (self.last_right, self.unread, self.is_known) = (right, unread, true);
        desired.held.retain(|vm| !desired.contracts.iter().any(|c| c.vm.name == *vm));
        desired.plant = PlannedHost::join(&all, |vm| desired.contract_of(vm).is_some());
        desired
    }
}

impl Desired {
    /// Rejects all contracts of a VM that several name: each place has a fault, and what is in
    /// force stays.
    pub(crate) fn take_out(&mut self, vm: &str, places: &[(Origin, &str)]) {
        self.contracts.retain(|contract| contract.vm.name != vm);
        if !self.held.iter().any(|held| held == vm) {
            self.held.push(vm.to_owned());
        }
        for (origin, remedy) in places {
            let others: Vec<String> = places
                .iter()
                .map(|(other, _)| other)
                .filter(|o| *o != origin)
                .map(Origin::to_string)
                .collect();
            let why = format!(
                "VM \"{vm}\" has a contract in {} too: neither counts, and what is in force for it stays: {remedy}",
                others.join(", ")
            );
            self.faults.push(ContractFault { origin: origin.clone(), why });
        }
    }
}

/// Whether a VM of a file is this libvirt domain.
fn is_of(vm: &Vm, domain: &DomainContract, uri: &str) -> bool {
    let Reach::Existing { host: HostHandle::Domain(of), .. } = &vm.reach else { return false };
    of.uri() == uri && names_domain(&of.domain, &domain.name, &domain.uuid)
}

/// Parses a contract in a libvirt domain's metadata: a spec with one VM, which is this one.
pub(crate) fn parse(text: &str, domain: &DomainContract, uri: &str) -> Result<HostSpec, String> {
    let mut doc: DocumentMut = text.parse().map_err(|e: toml_edit::TomlError| e.to_string())?;
    let vms = doc.get_mut("vm").and_then(Item::as_array_of_tables_mut);
    let Some(vm) = vms.filter(|vms| vms.len() == 1).and_then(|vms| vms.get_mut(0)) else {
        return Err("it needs one `[[vm]]`, which is this domain".to_owned());
    };
    name(vm, domain, uri)?;
    let spec = HostSpec::parse(&format!("metadata of {}", domain.name), &doc.to_string())
        .map_err(|e| e.to_string())?;
    if spec.lab_kind().is_some() {
        return Err("it has a lab's device: a contract is for a running domain".to_owned());
    }
    Ok(spec)
}

/// Names a VM by the UUID of its libvirt domain: a name may change.
fn name(vm: &mut Table, domain: &DomainContract, uri: &str) -> Result<(), String> {
    if let Some(key) = OTHER_WAYS.into_iter().find(|key| vm.contains_key(key)) {
        return Err(format!("`{key}` names another VM: remove it, the contract is of this domain"));
    }
    let given = |key: &str| vm.get(key).and_then(Item::as_str).map(str::to_owned);
    if let Some(other) = given("domain") {
        if other != domain.name && !other.eq_ignore_ascii_case(&domain.uuid) {
            return Err(format!("`domain` is {other}: remove it, the contract is of this domain"));
        }
    }
    if given("uri").is_some_and(|other| other != uri) {
        return Err("`uri` is another daemon's: remove it, the contract is of this domain".to_owned());
    }
    if given("name").is_none() {
        vm.insert("name", value(&domain.name));
    }
    vm.insert("domain", value(&domain.uuid));
    if uri != LibvirtDomain::DEFAULT_URI {
        vm.insert("uri", value(uri));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const URI: &str = LibvirtDomain::DEFAULT_URI;

    fn spec(vm: &str) -> String {
        format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\n{vm}[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        )
    }

    fn domain(n: u8, name: &str, text: &str) -> DomainContract {
        let uuid = format!("a9949d75-95e3-4747-82e3-c9fee10476{n:02x}");
        DomainContract { uuid, name: name.to_owned(), text: Ok(text.to_owned()) }
    }

    fn files(vm: &str) -> (Desired, Vec<HostSpec>) {
        let spec = HostSpec::parse("x.toml", &spec(vm)).unwrap();
        let contracts = Contract::of_spec(&spec, Path::new("x.toml"));
        (Desired { contracts, plant: PlannedHost::join([&spec], |_| true), ..Desired::default() }, vec![spec])
    }

    fn names(desired: &Desired) -> Vec<&str> {
        desired.contracts.iter().map(|c| c.vm.name.as_str()).collect()
    }

    #[test]
    fn a_domain_is_the_vm_of_its_contract() {
        let of = |vm: &str| parse(&spec(vm), &domain(1, "plc", ""), URI);
        for vm in [
            "",
            "name = \"plc\"\n",
            "domain = \"plc\"\n",
            "domain = \"A9949D75-95E3-4747-82E3-C9FEE1047601\"\n",
        ] {
            let spec = of(vm).unwrap();
            let vm = &spec.vms()[0];
            assert_eq!(vm.name, "plc");
            let Reach::Existing { host: HostHandle::Domain(found), .. } = &vm.reach else { panic!("{vm:?}") };
            assert_eq!(found.domain, "a9949d75-95e3-4747-82e3-c9fee1047601");
        }
        assert_eq!(
            of("name = \"controller\"\ncriticality = \"high\"\n").unwrap().vms()[0].name,
            "controller"
        );
        for (vm, why) in [
            ("domain = \"hist\"\n", "`domain` is hist"),
            ("uri = \"qemu:///session\"\n", "another daemon"),
            ("pid = 7\n", "`pid` names another VM"),
            ("critical = true\n", "critical"),
        ] {
            let found = of(vm).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        for text in ["", "[[vm]", "[device]\npath = \"/dev/sdz\"\n", &(spec("") + "[[vm]]\nname = \"b\"\n")] {
            assert!(parse(text, &domain(1, "plc", ""), URI).is_err(), "{text}");
        }
    }

    #[test]
    fn a_malformed_one_concerns_its_domain_only_and_what_it_had_is_held() {
        let mut of = DomainContracts::new(URI);
        assert!(of.take(vec![domain(1, "plc", &spec("")), domain(2, "hist", &spec(""))]));
        let (desired, specs) = files("name = \"hmi\"\npid = 7\n");
        let all = of.joined(desired.clone(), &specs);
        assert_eq!((names(&all), all.faults.len()), (vec!["hmi", "plc", "hist"], 0));
        assert_eq!(all.plant.as_ref().unwrap().host.vms().len(), 3);
        assert_eq!(all.contracts[1].origin.to_string(), "the metadata of domain plc (qemu:///system)");
        assert!(!of.take(vec![domain(1, "plc", &spec("")), domain(2, "hist", &spec(""))]), "no news");
        let unread = DomainContract { text: Err("longer than".to_owned()), ..domain(3, "new", "") };
        assert!(of.take(vec![domain(1, "plc", "[[vm]"), domain(2, "hist", &spec("")), unread]));
        let all = of.joined(desired.clone(), &specs);
        assert_eq!((names(&all), all.held.as_slice()), (vec!["hmi", "hist"], &["plc".to_owned()][..]));
        let wrong: Vec<String> = all.faults.iter().map(|f| f.origin.to_string()).collect();
        assert!(wrong.len() == 2 && wrong[0].contains("plc") && wrong[1].contains("new"), "{wrong:?}");
        // Still invalid, it is still held; without the VM it is not.
        of.take(vec![domain(1, "plc", "still [wrong")]);
        assert_eq!(of.joined(desired.clone(), &specs).held, ["plc"]);
        of.take(Vec::new());
        let all = of.joined(desired, &specs);
        assert_eq!((names(&all), all.held.len(), all.faults.len()), (vec!["hmi"], 0, 0));
    }

    /// Settings of an earlier process may belong to a contract that cannot be read now.
    #[test]
    fn one_that_was_never_right_since_the_start_holds_all() {
        let (files, specs) = files("name = \"hmi\"\npid = 7\n");
        let mut of = DomainContracts::new(URI);
        let busy = DomainContract { text: Err("busy".to_owned()), ..domain(1, "plc", "") };
        for _ in 0..2 {
            of.take(vec![busy.clone(), domain(2, "hist", &spec(""))]);
            let all = of.joined(files.clone(), &specs);
            assert!(all.holds("controller") && all.hides_contracts(), "{all:?}");
        }
        // Once it is read its VM is known; another one, new and invalid, holds nothing.
        of.take(vec![domain(1, "plc", &spec("")), domain(3, "new", "[[vm]")]);
        assert!(!of.joined(files, &specs).hides_contracts());
    }

    #[test]
    fn a_file_of_the_domain_counts_before_its_metadata_and_says_so() {
        for vm in ["name = \"plc\"\ndomain = \"plc\"\n", "name = \"controller\"\ndomain = \"plc\"\n"] {
            let mut of = DomainContracts::new(URI);
            // Also before metadata that is malformed.
            for text in [spec(""), "[[vm]".to_owned()] {
                of.take(vec![domain(1, "plc", &text)]);
                let (desired, specs) = files(vm);
                let all = of.joined(desired, &specs);
                assert_eq!((all.contracts.len(), all.held.len(), all.faults.len()), (1, 0, 0));
                let is_said =
                    all.contracts[0].overrides.as_ref().is_some_and(|o| o.to_string().contains("plc"));
                assert_eq!((is_said, all.plant.unwrap().host.vms().len()), (true, 1));
            }
        }
    }

    /// A name belongs to none of two that claim it, or the first of a list takes it from the other.
    #[test]
    fn two_contracts_of_one_name_are_a_fault_of_both_and_what_is_in_force_stays() {
        let mut of = DomainContracts::new(URI);
        let (none, hist) = (Desired::default(), domain(2, "hist", &spec("")));
        let (plc, other) = (domain(1, "plc", &spec("")), domain(3, "aaa", &spec("name = \"plc\"\n")));
        for found in [vec![other.clone(), plc.clone(), hist.clone()], vec![hist.clone(), plc.clone(), other]]
        {
            of.take(found);
            let all = of.joined(none.clone(), &[]);
            assert_eq!((names(&all), all.held.as_slice()), (vec!["hist"], &["plc".to_owned()][..]));
            assert_eq!((all.faults.len(), all.plant.as_ref().unwrap().host.vms().len()), (2, 1));
            assert!(
                all.holds("plc") && all.faults.iter().all(|f| f.why.contains("another `name`")),
                "{all:?}"
            );
        }
        // A file of another VM, as far as can be seen.
        let (desired, specs) = files("name = \"plc\"\npid = 7\n");
        of.take(vec![plc, hist]);
        let all = of.joined(desired, &specs);
        assert_eq!((names(&all), all.held.as_slice()), (vec!["hist"], &["plc".to_owned()][..]));
        assert!(all.faults.len() == 2 && all.faults[0].why.contains("name it there by `domain`"), "{all:?}");
        // And one that is held for a mistake: libvirt's contract does not take its VM.
        let held = Desired { held: vec!["plc".to_owned()], ..Desired::default() };
        let all = of.joined(held, &[]);
        assert_eq!((names(&all), all.holds("plc"), all.faults.len()), (vec!["hist"], true, 0));
    }

    #[test]
    fn before_the_first_answer_nothing_is_put_back() {
        let (desired, specs) = files("name = \"hmi\"\npid = 7\n");
        let all = DomainContracts::new(URI).joined(desired, &specs);
        assert!(all.is_incomplete && all.holds("anything") && all.hides_contracts());
        assert_eq!(names(&all), ["hmi"]);
    }
}
