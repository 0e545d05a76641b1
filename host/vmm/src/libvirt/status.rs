//! Status of a VM's contract, in its live metadata: an element of a namespace of its own, next to
//! that of the contract, for programs that use libvirt only.

use roxmltree::Node;

use super::{Access, Daemon, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT};
use crate::VmmError;

/// Namespace of the element `status`.
pub const STATUS_NAMESPACE: &str = "https://github.com/rtvirtio/rtvirtio/status/1";
/// XML prefix of the element, unlike that of the contract.
const PREFIX: &str = "rtvirtio-status";
/// Longest reason, in characters: a status is read by people, and libvirt keeps it in the XML.
const MAX_CHARS: usize = 1_000;

/// Status of a VM's contract.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainStatus {
    /// State, in one word.
    pub state: String,
    /// Time of the last change of the state, as in RFC 3339.
    pub since: String,
    /// Reason; empty where it is obvious.
    pub why: String,
}

/// Running VM with its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainSeen {
    pub uuid: String,
    pub name: String,
    /// Status in its live metadata, if any.
    pub status: Option<DomainStatus>,
}

impl DomainStatus {
    /// Makes a status, with the reason shortened and cleaned for XML text.
    #[must_use]
    pub fn new(state: &str, since: &str, why: &str) -> Self {
        let plain = |c: char| if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') { ' ' } else { c };
        let mut short: String = why.chars().map(plain).take(MAX_CHARS).collect();
        if why.chars().nth(MAX_CHARS).is_some() {
            short.push_str("...");
        }
        Self { state: state.to_owned(), since: since.to_owned(), why: short.trim().to_owned() }
    }

    /// Whether state and reason are the same, whatever the time.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.state, &self.why) == (&other.state, &other.why)
    }

    fn element(&self) -> String {
        let quoted = |text: &str| escaped(text).replace('\'', "&apos;").replace('"', "&quot;");
        let (state, since) = (quoted(&self.state), quoted(&self.since));
        format!("<status state='{state}' since='{since}'>{}</status>", escaped(&self.why))
    }
}

/// Status in a VM's XML. Missing attributes of a malformed one are empty, so it is written anew.
pub(super) fn of_domain(domain: Node<'_, '_>) -> Option<DomainStatus> {
    let metadata = domain.children().filter(|node| node.has_tag_name("metadata"));
    let is_ours = |node: &Node<'_, '_>| node.has_tag_name((STATUS_NAMESPACE, "status"));
    let status = metadata.flat_map(|metadata| metadata.children()).find(is_ours)?;
    let word = |name: &str| status.attribute(name).unwrap_or_default().to_owned();
    let why = status.text().unwrap_or_default().trim().to_owned();
    Some(DomainStatus { state: word("state"), since: word("since"), why })
}

/// Writes the status of a running VM into its live metadata, or removes it. It is lost at the end
/// of the current start, and the definition stays as it is.
///
/// # Errors
/// When the VM does not run, or libvirt refuses.
pub fn set_status(daemon: &dyn Daemon, uuid: &str, status: Option<&DomainStatus>) -> Result<(), VmmError> {
    let element = status.map(DomainStatus::element);
    let mut args = vec!["metadata", "--domain", uuid, "--uri", STATUS_NAMESPACE];
    match &element {
        Some(element) => args.extend(["--key", PREFIX, "--set", element]),
        None => args.push("--remove"),
    }
    args.push("--live");
    daemon.call(&args, Access::Write, LOOK_UP_LIMIT, LOOK_UP_TIMEOUT).map(drop)
}

/// Text of an XML element.
pub(super) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::DomainXml;
    use super::*;

    fn read(metadata: &str) -> Option<DomainStatus> {
        let xml = format!(
            "<domain id='3'><name>plc</name><uuid>aa-01</uuid><metadata>{metadata}</metadata></domain>"
        );
        DomainXml::parse(&xml).unwrap().status.map(|status| *status)
    }

    #[test]
    fn what_is_written_is_read_again() {
        let why = "too much: 0.9 > 0.8 & 'more'\n\u{1b}[31m";
        let status = DomainStatus::new("refused", "2026-01-02T03:04:05Z", why);
        assert_eq!(status.why, "too much: 0.9 > 0.8 & 'more'  [31m");
        // With the prefix that libvirt adds.
        let element = status.element().replace("<status", &format!("<s:status xmlns:s='{STATUS_NAMESPACE}'"));
        assert_eq!(read(&element.replace("</status", "</s:status")), Some(status.clone()));
        assert_eq!((read(""), read("<status state='in_force'/>")), (None, None));
        let malformed = read(&format!("<s:status xmlns:s='{STATUS_NAMESPACE}'><x/></s:status>"));
        assert_eq!(malformed, Some(DomainStatus::default()));
        let later = DomainStatus { since: "later".to_owned(), ..status.clone() };
        assert!(status.is_same(&later) && !status.is_same(&DomainStatus::default()));
        assert_eq!(DomainStatus::new("x", "", &"ä".repeat(2_000)).why.chars().count(), MAX_CHARS + 3);
    }
}
