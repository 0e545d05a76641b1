//! Contracts in the `<metadata>` of a VM's XML: one element of a namespace of its own, which
//! libvirt keeps as it is (`docs/formatdomain.rst`, `virsh metadata`).

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};

use roxmltree::Node;

use super::status::{DomainSeen, escaped};
use super::{Access, Daemon, DomainXml, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT, list};
use crate::VmmError;

/// Namespace of the element `contract`.
pub const CONTRACT_NAMESPACE: &str = "https://github.com/rtvirtio/rtvirtio/contract/1";
/// XML prefix of the element.
const PREFIX: &str = "rtvirtio";
/// Longest contract, in bytes; no spec needs more.
const MAX_BYTES: usize = 64 << 10;
/// Number of VMs that one `virsh` is asked for: a process for each would cost more than all the
/// rest of a poll.
const BATCH: usize = 32;

/// Contract in the metadata of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainContract {
    pub uuid: String,
    pub name: String,
    /// Text of its contract, or the reason why it cannot be read.
    pub text: Result<String, String>,
}

/// Text of the element in a VM's XML; `None` without the element.
pub(super) fn of_domain(domain: Node<'_, '_>) -> Option<Result<String, String>> {
    let is_ours = |node: &Node<'_, '_>| node.has_tag_name((CONTRACT_NAMESPACE, "contract"));
    let mut all = domain
        .children()
        .filter(|node| node.has_tag_name("metadata"))
        .flat_map(|metadata| metadata.children())
        .filter(is_ours);
    let contract = all.next()?;
    if all.next().is_some() {
        return Some(Err("its metadata has more than one contract: keep one of them".to_owned()));
    }
    let mut text = String::new();
    for node in contract.children() {
        if node.is_element() {
            return Some(Err(format!(
                "the contract has an element `{}`: it is text, a spec as in a file of contracts.d",
                node.tag_name().name()
            )));
        }
        text.push_str(node.text().filter(|_| node.is_text()).unwrap_or_default());
        if text.len() > MAX_BYTES {
            return Some(Err(format!("the contract is longer than {MAX_BYTES} bytes")));
        }
    }
    Some(Ok(text))
}

/// Metadata of all VMs that concerns rtvirtio.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainsMetadata {
    /// Contracts of all VMs that have one, also of those that do not run.
    pub contracts: Vec<DomainContract>,
    /// Running VMs, each with the status in its live metadata.
    pub running: Vec<DomainSeen>,
}

/// Reads contracts and statuses of all VMs. A contract that cannot be read affects its VM only.
///
/// # Errors
/// When the daemon does not answer, which is not the same as no contract.
pub fn metadata(daemon: &dyn Daemon) -> Result<DomainsMetadata, VmmError> {
    let domains = list(daemon)?;
    let mut out = DomainsMetadata::default();
    for batch in domains.chunks(BATCH) {
        let read = match dump(daemon, batch) {
            // Larger than any VM's XML, or not UTF-8: each VM is asked for separately.
            Err(VmmError::TooLarge { .. } | VmmError::Protocol { .. }) if batch.len() > 1 => {
                let alone = |one| match dump(daemon, std::slice::from_ref(one)) {
                    Ok(mut xml) => Ok(Ok(xml.pop().unwrap_or_default())),
                    Err(e @ (VmmError::TooLarge { .. } | VmmError::Protocol { .. })) => {
                        Ok(Err(e.to_string()))
                    }
                    Err(e) => Err(e),
                };
                batch.iter().map(alone).collect::<Result<Vec<_>, VmmError>>()?
            }
            answer => answer?.into_iter().map(Ok).collect(),
        };
        for ((uuid, name), xml) in batch.iter().zip(read) {
            let contract = match xml {
                // Not the same as a VM without a contract.
                Ok(xml) if xml.is_empty() => {
                    Some(Err("libvirt does not show it: it is gone, or busy with another command".to_owned()))
                }
                Ok(xml) => match DomainXml::parse(&xml) {
                    Ok(domain) => {
                        let (uuid, name) = (uuid.clone(), name.clone());
                        let status = domain.status.map(|status| *status);
                        let seen = domain.id.map(|_| DomainSeen { uuid, name, status });
                        out.running.extend(seen);
                        domain.contract
                    }
                    Err(why) => Some(Err(why)),
                },
                Err(why) => Some(Err(why)),
            };
            let found = contract.map(|text| DomainContract { uuid: uuid.clone(), name: name.clone(), text });
            out.contracts.extend(found);
        }
    }
    Ok(out)
}

/// XML of each of some VMs, by one `virsh`; empty where there is none. The separator is random, so
/// no XML can contain it.
fn dump(daemon: &dyn Daemon, domains: &[(String, String)]) -> Result<Vec<String>, VmmError> {
    let bad = |detail: &str| VmmError::Protocol {
        peer: format!("libvirt {}", daemon.uri()),
        operation: "dumpxml".to_owned(),
        detail: detail.to_owned(),
    };
    // These become words of a script: only hexadecimal digits and hyphens are allowed.
    if domains.iter().any(|(uuid, _)| !uuid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')) {
        return Err(bad("a UUID has other characters"));
    }
    let number = || RandomState::new().build_hasher().finish();
    let mark = format!("rtvirtio-{:016x}{:016x}", number(), number());
    let commands: Vec<String> =
        domains.iter().map(|(uuid, _)| format!("dumpxml --domain {uuid}; echo {mark}")).collect();
    let out = daemon.call(&[&commands.join("; ")], Access::Read, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT)?;
    let text = String::from_utf8(out).map_err(|e| bad(&e.to_string()))?;
    let mut parts: Vec<String> = text.split(&mark).map(|part| part.trim().to_owned()).collect();
    parts.pop();
    if parts.len() == domains.len() { Ok(parts) } else { Err(bad("it has another number of domains")) }
}

/// Sets the contract of a VM, or removes it: in its definition, and in the live XML if it runs.
///
/// # Errors
/// When libvirt does not know the VM, or refuses.
pub fn set_contract(daemon: &dyn Daemon, domain: &str, text: Option<&str>) -> Result<(), VmmError> {
    let known = list(daemon)?;
    let is_it = |(uuid, name): &&(String, String)| name == domain || uuid.eq_ignore_ascii_case(domain);
    let Some((uuid, _)) = known.iter().find(is_it) else {
        return Err(VmmError::Libvirt {
            peer: format!("libvirt {}", daemon.uri()),
            operation: "metadata".to_owned(),
            message: format!("there is no domain `{domain}`"),
        });
    };
    let xml = super::dumpxml(daemon, uuid)?;
    let element = text.map(|text| format!("<contract>{}</contract>", escaped(text)));
    let mut args = vec!["metadata", "--domain", uuid, "--uri", CONTRACT_NAMESPACE];
    match &element {
        Some(element) => args.extend(["--key", PREFIX, "--set", element]),
        None => args.push("--remove"),
    }
    args.push("--config");
    if xml.id.is_some() {
        args.push("--live");
    }
    daemon.call(&args, Access::Write, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;

    const TEXT: &str = "[device]\npath = \"/dev/sdz\" # a < b & c\n[[vm]]\n";

    fn domain(name: &str, metadata: &str) -> String {
        format!("<domain><name>{name}</name><uuid>u-{name}</uuid>{metadata}</domain>")
    }

    fn with(content: &str) -> String {
        format!(
            "<metadata><x:y xmlns:x=\"urn:x\">z</x:y><r:contract xmlns:r=\"{CONTRACT_NAMESPACE}\">{content}</r:contract></metadata>"
        )
    }

    fn read(xml: &str) -> Option<Result<String, String>> {
        DomainXml::parse(xml).unwrap().contract
    }

    #[test]
    fn the_text_of_the_element_is_the_contract() {
        assert_eq!(read(&domain("a", &with(&escaped(TEXT)))), Some(Ok(TEXT.to_owned())));
        assert_eq!(read(&domain("a", &with(&format!("<![CDATA[{TEXT}]]>")))), Some(Ok(TEXT.to_owned())));
        assert_eq!(read(&domain("a", "")), None);
        // An element of this name in no namespace, and ours elsewhere.
        assert_eq!(read(&domain("a", "<metadata><contract>x</contract></metadata>")), None);
        assert_eq!(
            read(&domain("a", &format!("<os><contract xmlns=\"{CONTRACT_NAMESPACE}\">x</contract></os>"))),
            None
        );
        for (bad, why) in [
            (with("<vm/>"), "element `vm`"),
            (with(&"x".repeat(MAX_BYTES + 1)), "longer than"),
            (with("x") + &with("y"), "more than one"),
        ] {
            let found = read(&domain("a", &bad)).unwrap().unwrap_err();
            assert!(found.contains(why), "{found}");
        }
    }

    /// Daemon that answers as `virsh` does: scripts of `dumpxml` and `echo`, and single commands.
    #[derive(Debug, Default)]
    struct Scripted {
        domains: Vec<(&'static str, &'static str, String)>,
        calls: Mutex<Vec<String>>,
    }

    impl Daemon for Scripted {
        fn uri(&self) -> &str {
            "test:///scripted"
        }

        fn call(&self, args: &[&str], _: Access, limit: usize, _: Duration) -> Result<Vec<u8>, VmmError> {
            self.calls.lock().unwrap().push(args.join(" "));
            let mut out = String::new();
            match args {
                ["list", ..] => {
                    self.domains.iter().for_each(|(uuid, name, _)| out += &format!("{uuid} {name}\n"));
                }
                ["metadata", ..] => {}
                _ => {
                    for command in args.join(" ").split("; ") {
                        if let Some(text) = command.strip_prefix("echo ") {
                            out += &format!("{text}\n");
                        } else {
                            let uuid = command.strip_prefix("dumpxml --domain ").expect(command);
                            // A command that fails prints an error, and the next one is run.
                            let found = self.domains.iter().find(|one| one.0 == uuid);
                            found.iter().for_each(|one| out += &format!("{}\n\n", one.2));
                        }
                    }
                }
            }
            if out.len() > limit {
                let (peer, operation) = (self.uri().to_owned(), args[0].to_owned());
                return Err(VmmError::TooLarge { peer, operation, limit });
            }
            Ok(out.into_bytes())
        }
    }

    fn names(found: &[DomainContract]) -> Vec<(&str, bool)> {
        found.iter().map(|one| (one.name.as_str(), one.text.is_ok())).collect()
    }

    #[test]
    fn one_domain_that_is_malformed_concerns_no_other() {
        let trap = format!("<![CDATA[</r:contract></metadata></domain><domain>]]>{}", escaped(TEXT));
        let mut daemon = Scripted {
            domains: vec![
                ("aa-01", "plc", domain("plc", &with(&escaped(TEXT)))),
                ("aa-02", "none", domain("none", "")),
                ("aa-03", "trap", domain("trap", &with(&trap))),
                ("aa-04", "torn", "<domain><name>torn".to_owned()),
                ("aa-05", "hist", domain("hist", &with("x"))),
            ],
            ..Scripted::default()
        };
        let found = metadata(&daemon).unwrap().contracts;
        assert_eq!(names(&found), [("plc", true), ("trap", true), ("torn", false), ("hist", true)]);
        assert_eq!(found[0].text.as_deref(), Ok(TEXT));
        assert_eq!(daemon.calls.lock().unwrap().len(), 2, "one list, one virsh for all");
        // A VM that disappears meanwhile, and one that is larger than any.
        daemon.domains.push(("aa-06", "gone", String::new()));
        daemon.domains.push(("aa-07", "huge", domain("huge", &"x".repeat(LOOK_UP_LIMIT))));
        let found = metadata(&daemon).unwrap().contracts;
        assert_eq!(names(&found)[..4], [("plc", true), ("trap", true), ("torn", false), ("hist", true)]);
        assert_eq!(names(&found)[4..], [("gone", false), ("huge", false)]);
        // The status is no part of the contract, and is returned for running VMs.
        let status = |state: &str| {
            let element =
                format!("<s:status xmlns:s=\"{}\" state=\"{state}\"/>", super::super::STATUS_NAMESPACE);
            domain("plc", &with("x").replace("</metadata>", &format!("{element}</metadata>")))
        };
        let both = ["refused", "in_force"].map(|state| {
            daemon.domains = vec![
                ("aa-01", "plc", status(state).replace("<domain>", "<domain id='3'>")),
                ("aa-02", "off", status(state)),
            ];
            metadata(&daemon).unwrap()
        });
        assert_eq!(both[0].contracts, both[1].contracts);
        let states: Vec<_> =
            both.iter().flat_map(|one| &one.running).map(|d| d.status.clone().unwrap().state).collect();
        assert_eq!(states, ["refused", "in_force"]);
        // An answer with an invalid UUID is refused as a whole.
        daemon.domains = vec![("x; quit", "evil", String::new())];
        assert!(matches!(metadata(&daemon), Err(VmmError::Protocol { .. })));
    }

    #[test]
    fn a_contract_is_written_where_the_domain_is_defined_and_where_it_runs() {
        let running = domain("plc", "").replace("<domain>", "<domain id='3'>");
        let daemon = Scripted {
            domains: vec![("aa-01", "plc", running), ("aa-02", "off", domain("off", ""))],
            ..Scripted::default()
        };
        set_contract(&daemon, "plc", Some("a < b")).unwrap();
        set_contract(&daemon, "aa-02", None).unwrap();
        let calls = daemon.calls.lock().unwrap().clone();
        let written: Vec<&String> = calls.iter().filter(|call| call.starts_with("metadata")).collect();
        let at = |uuid: &str| format!("metadata --domain {uuid} --uri {CONTRACT_NAMESPACE}");
        assert_eq!(
            written,
            [
                &format!(
                    "{} --key rtvirtio --set <contract>a &lt; b</contract> --config --live",
                    at("aa-01")
                ),
                &format!("{} --remove --config", at("aa-02")),
            ]
        );
        assert!(set_contract(&daemon, "other", None).unwrap_err().to_string().contains("no domain `other`"));
    }
}
