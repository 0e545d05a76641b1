//! `domain`, `uri` and keys that depend on them: a VM that libvirt manages.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::error::Report;
use crate::field::{Field, Section, quoted};
use crate::types::{HostHandle, LibvirtDomain, VmDisk};

/// Longest name of a libvirt domain in bytes. libvirt has no limit of its own, but uses the name in
/// file names.
const MAX_DOMAIN: usize = 255;
/// Longest URI in bytes.
const MAX_URI: usize = 1024;
/// Longest name of a disk in bytes; the kernel's names have less than 32.
const MAX_TARGET: usize = 64;

/// Reads `domain`, with the daemon named by `uri`.
pub(crate) fn domain(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    uri: Field<String>,
    taken: &mut HashMap<(String, String), usize>,
) -> Field<HostHandle> {
    let domain = section.string(report, "domain", "\"plc\"").and_then(|name| {
        let problem = if name.trim().is_empty() {
            ("is empty", "write the name or UUID that `virsh list --all` shows, such as \"plc\"")
        } else if name.contains(|c: char| c.is_control() || c == '/') || name.len() > MAX_DOMAIN {
            ("cannot be the name of a domain", "write the name or UUID that `virsh list --all` shows")
        } else {
            return Field::Given(name.to_owned());
        };
        report.add(section.value_span("domain"), format!("`domain` {}", problem.0), problem.1);
        Field::Bad
    });
    let Field::Given(domain) = domain else { return Field::Bad };
    let Some(uri) = uri.optional() else { return Field::Bad };
    let domain = LibvirtDomain { domain, uri };
    let message = format!("another VM is the domain {} too", quoted(&domain.domain));
    let this = (domain.domain.clone(), domain.uri().to_owned());
    let unique = section.first_use(report, "domain", (taken, this), message, "");
    unique.then_some(HostHandle::Domain(domain)).into()
}

/// Reads `uri`: a daemon on this host.
pub(crate) fn uri(report: &mut Report<'_>, section: &Section<'_, '_>, way: &str) -> Field<String> {
    let example = format!("\"{}\"", LibvirtDomain::DEFAULT_URI);
    let found = section.string(report, "uri", &example);
    if way != "domain" {
        if let Some(place) = section.place("uri") {
            let message = "`uri` is the address of libvirt, and this VM is not named by `domain`";
            report.add(place.key, message, "remove this line, or write domain = \"NAME\"");
        }
        return Field::Absent;
    }
    found.and_then(|uri| {
        let local = ["qemu:///", "qemu+unix:///"].iter().any(|start| uri.starts_with(start));
        if local && uri.len() <= MAX_URI && !uri.contains(|c: char| c.is_control() || c.is_whitespace()) {
            return Field::Given(uri.to_owned());
        }
        let message = format!("`uri` {} is not a QEMU daemon of this host", quoted(uri));
        let help = format!(
            "write uri = {example} or leave it out; a VM of another host is planned and held by rtvirtio there"
        );
        report.add(section.value_span("uri"), message, help);
        Field::Bad
    })
}

/// Reports `agent` for a VM whose manager knows the agent's socket.
pub(crate) fn no_agent(report: &mut Report<'_>, section: &Section<'_, '_>, way: &str) -> Field<PathBuf> {
    let Some(place) = section.place("agent") else { return Field::Absent };
    let message = format!("`agent` is not needed with `{way}`, which leads to the guest agent");
    report.add(place.key, message, "remove this line");
    Field::Bad
}

/// Reads a libvirt disk's target name under `key`.
pub(crate) fn target(report: &mut Report<'_>, section: &Section<'_, '_>, key: &str) -> Field<VmDisk> {
    section.string(report, key, "\"vdb\"").and_then(|name| {
        let good = |c: char| c.is_ascii_alphanumeric();
        if !name.is_empty() && name.len() <= MAX_TARGET && name.chars().all(good) {
            return Field::Given(VmDisk::Target(name.to_owned()));
        }
        let message = format!("`{key}` {} is not a disk's name in libvirt", quoted(name));
        let help = match name.strip_prefix("/dev/") {
            Some(rest) if !rest.is_empty() && rest.chars().all(good) => {
                format!("write {key} = \"{rest}\": the target that `virsh domblklist` shows")
            }
            _ => format!("write the target that `virsh domblklist` shows, such as {key} = \"vdb\""),
        };
        report.add(section.value_span(key), message, help);
        Field::Bad
    })
}
