//! Description of a VM that is about to arrive: its XML of libvirt, or a contract file.

use std::path::Path;

use rtvirtio_spec::HostSpec;
use rtvirtio_vmm::libvirt::{DomainContract, DomainXml};
use serde::{Deserialize, Serialize};

use crate::desired::{Contract, Origin};
use crate::domain_contracts::parse;

/// Longest contract, in bytes, as in libvirt's metadata.
const LONGEST_CONTRACT: usize = 64 << 10;
/// Longest name of a VM in libvirt, in bytes: it has to be a file name there.
const LONGEST_NAME: usize = 255;

/// VM that is about to arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivingVm {
    /// Name in libvirt; in the contract for one that was given as a file.
    pub name: String,
    /// UUID in libvirt; `None` for a contract that was given as a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Number in Proxmox VE, whose VMs have their contracts in files of each host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxmox: Option<u32>,
    /// Text of its contract; `None` for a VM without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl ArrivingVm {
    /// VM of a request's body: a domain's XML, or a contract file. `vm` names one of several VMs of
    /// the file.
    ///
    /// # Errors
    /// Description of the mistake.
    pub fn of_body(body: &str, vm: Option<&str>) -> Result<Self, String> {
        match (body.trim_start().starts_with('<'), vm) {
            (true, None) => Self::of_xml(body),
            (true, Some(vm)) => Err(format!("`{vm}` cannot be chosen: the XML describes one domain")),
            (false, vm) => Self::of_file(body, vm),
        }
    }

    /// VM of Proxmox VE.
    #[must_use]
    pub fn of_proxmox(id: u32) -> Self {
        Self { name: id.to_string(), uuid: None, proxmox: Some(id), text: None }
    }

    fn of_xml(xml: &str) -> Result<Self, String> {
        let domain = DomainXml::parse(xml)?;
        if domain.name.is_empty() || domain.name.len() > LONGEST_NAME {
            return Err(format!(
                "the domain's name has {} bytes, not 1 to {LONGEST_NAME}",
                domain.name.len()
            ));
        }
        if !is_uuid(&domain.uuid) {
            return Err("the domain's UUID is none".to_owned());
        }
        let text = domain.contract.transpose()?;
        Ok(Self { name: domain.name, uuid: Some(domain.uuid), proxmox: None, text })
    }

    fn of_file(text: &str, vm: Option<&str>) -> Result<Self, String> {
        if text.len() > LONGEST_CONTRACT {
            return Err(format!("the contract is longer than {LONGEST_CONTRACT} bytes"));
        }
        let spec = parse_file(text)?;
        let vms = spec.vms();
        let known = || vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = match vm {
            Some(name) => vms.iter().find(|vm| vm.name == name),
            None if vms.len() == 1 => vms.first(),
            None => return Err(format!("the contract has several VMs: name one of {}", known())),
        };
        let found = found.ok_or_else(|| format!("the contract has no such VM: it has {}", known()))?;
        Ok(Self { name: found.name.clone(), uuid: None, proxmox: None, text: Some(text.to_owned()) })
    }

    /// Contract of the VM; `None` without one. `uri` is the libvirt daemon to which it comes.
    pub(super) fn contract(&self, uri: &str) -> Result<Option<Contract>, String> {
        let Some(text) = &self.text else { return Ok(None) };
        if text.len() > LONGEST_CONTRACT {
            return Err(format!("the contract is longer than {LONGEST_CONTRACT} bytes"));
        }
        let Some(uuid) = &self.uuid else {
            let spec = parse_file(text)?;
            let all = Contract::of_spec(&spec, Path::new("the contract of an arriving VM"));
            let found = all.into_iter().find(|contract| contract.vm.name == self.name);
            return found.map(Some).ok_or_else(|| format!("it has no VM {}", self.name));
        };
        let domain = DomainContract { uuid: uuid.clone(), name: self.name.clone(), text: Ok(text.clone()) };
        let spec = parse(text, &domain, uri)?;
        let origin = Origin::Domain { name: self.name.clone(), uri: uri.to_owned() };
        Ok(Contract::of_spec(&spec, origin).into_iter().next())
    }
}

/// Whether a text has the form of a UUID in libvirt.
fn is_uuid(text: &str) -> bool {
    let is_digit = |b: u8| b.is_ascii_hexdigit() || b == b'-';
    text.len() == 36 && text.bytes().all(is_digit)
}

/// Whether a text names the VM of libvirt with this name and UUID. A text in the form of a UUID is
/// no name: a VM may be named like another one's UUID.
pub(crate) fn names_domain(text: &str, name: &str, uuid: &str) -> bool {
    if is_uuid(text) { text.eq_ignore_ascii_case(uuid) } else { text == name }
}

fn parse_file(text: &str) -> Result<HostSpec, String> {
    let spec = HostSpec::parse("the contract", text).map_err(|e| e.to_string())?;
    if spec.lab_kind().is_some() {
        return Err("the contract has a lab's VMs: name running ones".to_owned());
    }
    Ok(spec)
}
