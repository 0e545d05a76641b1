//! Description of a VM by libvirt: its live XML.
//!
//! Form: libvirt's `docs/formatdomain.rst`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use roxmltree::{Document, Node, ParsingOptions};

use super::contract;
use super::status::{self, DomainStatus};
use crate::throttle::{Drive, ThrottleLimits, name_shared};

/// Largest number of nodes in a VM's XML; one with 100 disks has about 5000.
const MOST_NODES: u32 = 200_000;
/// Deepest nesting of elements: the limit of libxml2, libvirt's own parser (`xmlParserMaxDepth`).
/// The parser here is recursive and has no limit.
const MOST_DEPTH: usize = 256;
/// Name of the guest agent's channel.
const AGENT: &str = "org.qemu.guest_agent.0";

/// Parsed XML of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DomainXml {
    /// Number of this start; `None` when it does not run.
    pub id: Option<u32>,
    pub name: String,
    pub uuid: String,
    /// Disks in the order of the XML.
    pub disks: Vec<Disk>,
    /// State of its guest agent.
    pub agent: AgentState,
    /// Text of its contract, or the defect of it; `None` without one.
    pub contract: Option<Result<String, String>>,
    /// Status of its contract, as written last; `None` where none was written.
    pub status: Option<Box<DomainStatus>>,
    /// User as which libvirt runs its QEMU; `None` where it is not given.
    pub user: Option<u32>,
    /// Program of its QEMU (`<emulator>`).
    pub emulator: Option<PathBuf>,
}

/// State of a VM's guest agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentState {
    /// The VM has no channel for it.
    #[default]
    NoChannel,
    /// The VM has the channel, and no program in the guest has its end open.
    Disconnected,
    /// A program in the guest has its end of the channel open.
    Connected,
}

/// Disk of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Name in libvirt (`<target dev>`). The guest may use another.
    pub target: String,
    /// `disk`, `cdrom`, `lun` or `floppy`.
    pub device: String,
    /// Format of the image, such as `raw` or `qcow2`.
    pub format: Option<String>,
    /// File or block device of the host; `None` for a disk of a network or a pool.
    pub source: Option<PathBuf>,
    /// Serial number that the guest sees.
    pub serial: Option<String>,
    /// Address in the guest; `None` for an unknown type.
    pub address: Option<GuestAddress>,
    /// Limits that QEMU enforces (`<iotune>`), as recorded by libvirt.
    pub throttle: ThrottleLimits,
    /// Throttle group whose limits it shares with others.
    pub throttle_group: Option<String>,
    /// Throttle groups that it passes one after the other (`<throttlefilters>`, libvirt 11.2), each
    /// with its limits.
    pub filters: Vec<(String, ThrottleLimits)>,
    /// Whether another process serves it (`type='vhostuser'`): libvirt takes no limits for it.
    pub vhost_user: bool,
}

impl Disk {
    /// Limits recorded by libvirt: of the disk's own throttling, then of each filter.
    fn limits(&self) -> impl Iterator<Item = ThrottleLimits> + '_ {
        std::iter::once(self.throttle).chain(self.filters.iter().map(|(_, limits)| *limits))
    }

    /// Names of its throttle groups.
    fn groups(&self) -> impl Iterator<Item = &String> {
        self.throttle_group.iter().chain(self.filters.iter().map(|(group, _)| group))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestAddress {
    /// A PCI function: a virtio-blk disk.
    Pci {
        /// Number of the PCI domain.
        domain: u32,
        /// Number of the PCI bus.
        bus: u32,
        /// Slot on the bus.
        slot: u32,
        /// Function of the slot.
        function: u32,
    },
    /// A unit behind a controller: SCSI, SATA.
    Drive {
        /// Bus of the controller.
        bus: u32,
        /// SCSI target on the bus.
        target: u32,
        /// Unit of the target.
        unit: u32,
    },
}

fn text(node: Node<'_, '_>, name: &str) -> Option<String> {
    node.children().find(|n| n.has_tag_name(name))?.text().map(|t| t.trim().to_owned())
}

/// Number in an attribute: `0x1f` or `31`.
fn number(node: Node<'_, '_>, name: &str) -> Option<u32> {
    let text = node.attribute(name)?;
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

impl DomainXml {
    /// Parses the output of `virsh dumpxml`.
    ///
    /// # Errors
    /// Description of the defect, for text that is no VM's XML.
    pub fn parse(xml: &str) -> Result<Self, String> {
        if nesting(xml) > MOST_DEPTH {
            return Err(format!("elements are nested more than {MOST_DEPTH} deep"));
        }
        let options = ParsingOptions { allow_dtd: false, nodes_limit: MOST_NODES };
        let document = Document::parse_with_options(xml, options).map_err(|e| e.to_string())?;
        let root = document.root_element();
        if !root.has_tag_name("domain") {
            return Err(format!("a `{}`, no domain", root.tag_name().name()));
        }
        let id = match root.attribute("id") {
            None => None,
            Some(id) => Some(id.parse().map_err(|_| format!("the id `{id}` is no number"))?),
        };
        let name = text(root, "name").ok_or("a domain without a name")?;
        let uuid = text(root, "uuid").ok_or("a domain without a UUID")?;
        let (contract, status) = (contract::of_domain(root), status::of_domain(root).map(Box::new));
        let mut found = Self { id, name, uuid, contract, status, ..Self::default() };
        found.user = root.children().find_map(user);
        let groups = throttle_groups(root);
        let devices = root.children().filter(|n| n.has_tag_name("devices"));
        for device in devices.flat_map(|d| d.children()) {
            if device.has_tag_name("emulator") {
                found.emulator = device.text().map(|path| PathBuf::from(path.trim()));
            }
            if device.has_tag_name("disk") {
                if let Some(disk) = disk(device) {
                    let filters =
                        filters(device, &groups).map_err(|e| format!("disk {}: {e}", disk.target))?;
                    found.disks.push(Disk { filters, ..disk });
                }
            }
            if device.has_tag_name("channel") && child_attribute(device, "target", "name") == Some(AGENT) {
                found.agent = match child_attribute(device, "target", "state") {
                    Some("connected") => AgentState::Connected,
                    _ => AgentState::Disconnected,
                };
            }
        }
        Ok(found)
    }

    /// Disks with their throttling, in the form of [`Qmp::query_drives`](crate::Qmp::query_drives).
    #[must_use]
    pub fn drives(&self) -> Vec<Drive> {
        let drive = |disk: &Disk| Drive {
            name: disk.target.clone(),
            file: disk.source.clone(),
            removable: matches!(disk.device.as_str(), "cdrom" | "floppy"),
            limits: disk.limits().filter(|limits| !limits.is_none()).collect(),
            groups: disk.groups().cloned().collect(),
            ..Drive::default()
        };
        let mut drives: Vec<Drive> = self.disks.iter().map(drive).collect();
        name_shared(&mut drives);
        drives
    }

    /// Disk with the name `target` in libvirt.
    #[must_use]
    pub fn disk(&self, target: &str) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.target == target)
    }
}

/// Nesting depth of elements in well-formed XML; at least as deep as a parser gets before it finds
/// an error.
fn nesting(xml: &str) -> usize {
    let (mut depth, mut most, mut rest) = (0_usize, 0, xml);
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        let after = |mark: &str| rest.find(mark).map_or("", |end| &rest[end + mark.len()..]);
        if rest.starts_with("!--") {
            rest = after("-->");
        } else if rest.starts_with("![CDATA[") {
            rest = after("]]>");
        } else if rest.starts_with('?') {
            rest = after("?>");
        } else if rest.starts_with('/') {
            depth = depth.saturating_sub(1);
        } else {
            depth += 1;
            most = most.max(depth);
            let mut quote = None;
            let is_end = |c: char| {
                match quote {
                    Some(open) if c == open => quote = None,
                    None if matches!(c, '"' | '\'') => quote = Some(c),
                    None => return c == '>',
                    Some(_) => {}
                }
                false
            };
            let end = rest.find(is_end).unwrap_or(rest.len());
            if rest[..end].ends_with('/') {
                depth -= 1;
            }
            rest = &rest[end..];
        }
    }
    most
}

fn disk(node: Node<'_, '_>) -> Option<Disk> {
    let source = node.children().find(|n| n.has_tag_name("source"));
    let path = source.and_then(|s| s.attribute("dev").or_else(|| s.attribute("file")));
    let driver = node.children().find(|n| n.has_tag_name("driver"));
    let address = node.children().find(|n| n.has_tag_name("address"));
    Some(Disk {
        target: child_attribute(node, "target", "dev")?.to_owned(),
        device: node.attribute("device").unwrap_or("disk").to_owned(),
        format: driver.and_then(|d| d.attribute("type")).map(str::to_owned),
        source: path.map(PathBuf::from),
        serial: text(node, "serial"),
        address: address.and_then(guest_address),
        throttle: throttle(node),
        throttle_group: node
            .children()
            .find(|n| n.has_tag_name("iotune"))
            .and_then(|tune| text(tune, "group_name")),
        filters: Vec::new(),
        vhost_user: node.attribute("type") == Some("vhostuser"),
    })
}

/// User of a `<seclabel model='dac'>`, whose label is `+107:+107` for numbers.
fn user(node: Node<'_, '_>) -> Option<u32> {
    let is_dac = node.has_tag_name("seclabel") && node.attribute("model") == Some("dac");
    let label = if is_dac { text(node, "label") } else { None }?;
    label.split(':').next()?.trim_start_matches('+').parse().ok()
}

/// Limits set by `virsh blkdeviotune`.
fn throttle(disk: Node<'_, '_>) -> ThrottleLimits {
    let tune = disk.children().find(|n| n.has_tag_name("iotune"));
    tune.map_or_else(ThrottleLimits::default, limits_in)
}

/// Limits in the children of an element. A value beyond 64 bits counts as none.
fn limits_in(node: Node<'_, '_>) -> ThrottleLimits {
    limits_of(|name| text(node, name).and_then(|text| text.parse().ok()).unwrap_or(0))
}

/// Throttle groups of a VM (`<throttlegroups>`, libvirt 11.2) with their limits, which several
/// disks may share.
fn throttle_groups(domain: Node<'_, '_>) -> BTreeMap<String, ThrottleLimits> {
    let lists = domain.children().filter(|n| n.has_tag_name("throttlegroups"));
    let groups = lists.flat_map(|list| list.children()).filter(|n| n.has_tag_name("throttlegroup"));
    groups.filter_map(|group| Some((text(group, "group_name")?, limits_in(group)))).collect()
}

/// Groups that a disk passes, with their limits.
///
/// # Errors
/// Filter without a group, or with one that the VM does not have: its limits are not known.
fn filters(
    disk: Node<'_, '_>,
    groups: &BTreeMap<String, ThrottleLimits>,
) -> Result<Vec<(String, ThrottleLimits)>, String> {
    let lists = disk.children().filter(|n| n.has_tag_name("throttlefilters"));
    let filters = lists.flat_map(|list| list.children()).filter(|n| n.has_tag_name("throttlefilter"));
    filters
        .map(|filter| {
            let group = filter.attribute("group").ok_or("a throttle filter without a group")?;
            let limits =
                groups.get(group).ok_or_else(|| format!("its throttle group `{group}` is missing"))?;
            Ok((group.to_owned(), *limits))
        })
        .collect()
}

/// Limits by their names in libvirt.
fn limits_of(limit: impl Fn(&str) -> u64) -> ThrottleLimits {
    ThrottleLimits {
        iops: limit("total_iops_sec"),
        iops_rd: limit("read_iops_sec"),
        iops_wr: limit("write_iops_sec"),
        bps: limit("total_bytes_sec"),
        bps_rd: limit("read_bytes_sec"),
        bps_wr: limit("write_bytes_sec"),
        iops_max: limit("total_iops_sec_max"),
        iops_rd_max: limit("read_iops_sec_max"),
        iops_wr_max: limit("write_iops_sec_max"),
        bps_max: limit("total_bytes_sec_max"),
        bps_rd_max: limit("read_bytes_sec_max"),
        bps_wr_max: limit("write_bytes_sec_max"),
        iops_max_length: limit("total_iops_sec_max_length"),
        iops_rd_max_length: limit("read_iops_sec_max_length"),
        iops_wr_max_length: limit("write_iops_sec_max_length"),
        bps_max_length: limit("total_bytes_sec_max_length"),
        bps_rd_max_length: limit("read_bytes_sec_max_length"),
        bps_wr_max_length: limit("write_bytes_sec_max_length"),
        iops_size: limit("size_iops_sec"),
    }
}

/// Limits in the output of `virsh blkdeviotune` for a disk, which are QEMU's own: lines such as
/// `read_iops_sec  : 77`; and its throttle group, if any. `None` where one of the six rates is
/// missing: that is no limit of 0.
pub(super) fn tuned(text: &str) -> Option<(ThrottleLimits, Option<String>)> {
    let pairs: Vec<(&str, &str)> =
        text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.trim(), v.trim())).collect();
    let value = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
    let number = |name: &str| value(name).and_then(|v| v.parse::<u64>().ok());
    for kind in ["total", "read", "write"] {
        for of in ["bytes", "iops"] {
            number(&format!("{kind}_{of}_sec"))?;
        }
    }
    let limits = limits_of(|name| number(name).unwrap_or(0));
    Some((limits, value("group_name").filter(|group| !group.is_empty()).map(str::to_owned)))
}

fn child_attribute<'a>(node: Node<'a, '_>, name: &str, attribute: &str) -> Option<&'a str> {
    node.children().find(|n| n.has_tag_name(name))?.attribute(attribute)
}

fn guest_address(node: Node<'_, '_>) -> Option<GuestAddress> {
    match node.attribute("type")? {
        "pci" => Some(GuestAddress::Pci {
            domain: number(node, "domain")?,
            bus: number(node, "bus")?,
            slot: number(node, "slot")?,
            function: number(node, "function")?,
        }),
        "drive" => Some(GuestAddress::Drive {
            bus: number(node, "bus")?,
            target: number(node, "target")?,
            unit: number(node, "unit")?,
        }),
        _ => None,
    }
}
