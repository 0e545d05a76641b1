//! Names of resources as cluster engines take them: fewer letters than a device's own.

use rtvirtio_capacity::Resource;
use rtvirtio_spec::dashed;

/// Resource class of the share of each CPU.
const CPU: &str = "CUSTOM_RTVIRTIO_CPU";
/// Resource class of a host's only disk; for named disks followed by the name.
const DISK: &str = "CUSTOM_RTVIRTIO_DISK";
/// Resource class of a host's only network; for named networks followed by the name.
const NET: &str = "CUSTOM_RTVIRTIO_NET";
/// Longest name of a resource behind Kubernetes' domain, in bytes.
const LONGEST_NAME: usize = 63;

/// Name of a resource class: capitals, digits and underscores only, as Placement requires.
pub(crate) fn openstack_class(resource: Resource<'_>) -> String {
    let (kind, name) = match resource {
        Resource::Disk(name) => (DISK, name),
        Resource::Network(name) => (NET, name),
        Resource::Cpu => (CPU, None),
    };
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    name.map_or_else(
        || kind.to_owned(),
        |name| format!("{kind}_{}", name.chars().map(plain).collect::<String>()),
    )
}

/// A name as Kubernetes takes it: letters, digits, `-`, `_` and `.`, with a letter or digit at its
/// end.
pub(crate) fn kubernetes_name(resource: Resource<'_>) -> String {
    let (kind, of) = match resource {
        Resource::Disk(of) => ("disk", of),
        Resource::Network(of) => ("net", of),
        Resource::Cpu => ("cpu", None),
    };
    let Some(of) = of else { return kind.to_owned() };
    let all: String = dashed(&format!("{kind}-{of}")).chars().take(LONGEST_NAME).collect();
    all.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_kubernetes_takes() {
        assert_eq!(kubernetes_name(Resource::Disk(None)), "disk");
        assert_eq!(kubernetes_name(Resource::Disk(Some("fast ssd"))), "disk-fast-ssd");
        assert_eq!(kubernetes_name(Resource::Network(Some("field."))), "net-field");
        assert_eq!(kubernetes_name(Resource::Network(Some(&"x".repeat(90)))).len(), LONGEST_NAME);
    }
}
