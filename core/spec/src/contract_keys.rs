//! Keys of a VM that say more of its CPU contract: `urgency` and `cores`.

use crate::error::Report;
use crate::field::{Place, Section};

/// Whether a VM with this key has a contract, and vCPUs to which the key applies; reports what it
/// lacks. `why` is the reason for the contract, and the form in which the key is written.
pub(crate) fn has_vcpus_under_contract(
    report: &mut Report<'_>,
    vm: &Section<'_, '_>,
    key: &str,
    place: &Place,
    (why, form): (&str, &str),
) -> bool {
    if vm.place("cpu").is_none() && !vm.meant("cpu") {
        let help = "add cpu = { budget = \"4ms\", period = \"20ms\" }";
        report.add(place.key.clone(), format!("`{key}` without `cpu`: {why}"), help);
        return false;
    }
    if vm.get("lab").is_some_and(|(_, lab)| lab.as_str() == Some("process")) {
        let message = format!("`{key}` is for a machine with vCPUs, and a process has none");
        report.add(place.key.clone(), message, format!("remove this {form}, or write lab = \"qemu\""));
        return false;
    }
    true
}
