//! Parser of QEMU's command line (qemu(1)). Management tools write options as `key=value,key=value`
//! or as JSON.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::EVENTS_CHARDEV;

/// Name of the guest agent's channel.
const AGENT: &str = "org.qemu.guest_agent.0";
/// Name of a second agent's channel, where a management tool uses the first (`docs/guide`).
const OWN_AGENT: &str = "org.rtvirtio.agent.0";

/// Facts about a VM on its command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// Guest name of the option `-name`.
    pub name: Option<String>,
    /// Value of the option `-uuid`.
    pub uuid: Option<String>,
    /// Whether libvirt started it.
    pub libvirt: bool,
    /// VM id in Proxmox VE, where that started it.
    pub proxmox: Option<u32>,
    /// Socket of a QMP monitor.
    pub qmp: Option<PathBuf>,
    /// Socket of the QMP monitor for events alone ([`EVENTS_CHARDEV`]).
    pub events: Option<PathBuf>,
    /// Socket of the guest agent's channel.
    pub agent: Option<PathBuf>,
    /// Files and block devices that are disks of the guest.
    pub disks: Vec<PathBuf>,
    /// Files of the firmware and of removable media, which are no disks.
    pub firmware: Vec<PathBuf>,
    /// Sockets of vhost-user disks, which another process serves.
    pub vhost_user: Vec<PathBuf>,
}

/// Keys of one option with their values.
struct Keys(Vec<(String, String)>);

impl Keys {
    /// Parses an option; `first` is the key of a first value without one.
    fn parse(text: &str, first: &str) -> Self {
        if text.trim_start().starts_with('{') {
            let mut keys = Vec::new();
            if let Ok(value) = serde_json::from_str(text) {
                flatten("", &value, &mut keys);
            }
            return Self(keys);
        }
        let mut keys = Vec::new();
        for (at, part) in split(text).into_iter().enumerate() {
            match part.split_once('=') {
                Some((key, value)) => keys.push((key.to_owned(), value.to_owned())),
                None if at == 0 => keys.push((first.to_owned(), part)),
                None => keys.push((part, "on".to_owned())),
            }
        }
        Self(keys)
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }
}

/// Adds the leaves of nested objects with dotted keys, as QEMU writes them: `file.filename`.
fn flatten(prefix: &str, value: &Value, keys: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&name, value, keys);
            }
        }
        Value::String(text) => keys.push((prefix.to_owned(), text.clone())),
        other => keys.push((prefix.to_owned(), other.to_string())),
    }
}

/// Splits at commas; two of them stand for one in a value.
fn split(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c != ',' || rest.next_if_eq(&',').is_some() {
            parts.last_mut().expect("there is a first part").push(c);
        } else {
            parts.push(String::new());
        }
    }
    parts
}

impl CommandLine {
    /// Parses the arguments of a QEMU, without the program's name.
    #[must_use]
    pub fn parse(arguments: &[String]) -> Self {
        let mut found = Self::default();
        let mut sockets: Vec<(String, PathBuf)> = Vec::new();
        let (mut monitors, mut agents, mut served) = (Vec::new(), Vec::new(), Vec::new());
        let mut arguments = arguments.iter().peekable();
        while let Some(argument) = arguments.next() {
            let Some(option) = argument.strip_prefix('-') else { continue };
            let option = option.strip_prefix('-').unwrap_or(option);
            // Options without a value are followed by the next option.
            let Some(value) = arguments.next_if(|next| !next.starts_with('-')) else { continue };
            match option {
                "name" => found.name = Keys::parse(value, "guest").get("guest").map(str::to_owned),
                "uuid" => found.uuid = Some(value.clone()),
                "pidfile" => found.proxmox = found.proxmox.or(proxmox(Path::new(value))),
                "object" => {
                    let keys = Keys::parse(value, "qom-type");
                    found.libvirt |= keys.get("id") == Some("masterKey0");
                    if keys.get("qom-type") == Some("monitor-qmp") {
                        monitors.extend(keys.get("chardev").map(str::to_owned));
                    }
                }
                "qmp" | "qmp-pretty" => {
                    let path = value.strip_prefix("unix:").map(|rest| split(rest).swap_remove(0));
                    found.qmp = found.qmp.take().or(path.map(PathBuf::from));
                }
                "mon" => {
                    let keys = Keys::parse(value, "chardev");
                    if keys.get("mode") == Some("control") {
                        monitors.extend(keys.get("chardev").map(str::to_owned));
                    }
                }
                "chardev" => {
                    let keys = Keys::parse(value, "backend");
                    if let (Some(id), Some(path)) = (keys.get("id"), keys.get("path")) {
                        sockets.push((id.to_owned(), path.into()));
                    }
                }
                "device" => {
                    let keys = Keys::parse(value, "driver");
                    let chardev = keys.get("chardev").map(str::to_owned);
                    if keys.get("name") == Some(OWN_AGENT) {
                        agents.splice(0..0, chardev);
                    } else if keys.get("name") == Some(AGENT) {
                        agents.extend(chardev);
                    } else if keys.get("driver").is_some_and(|d| d.starts_with("vhost-user-blk")) {
                        served.extend(chardev);
                    }
                }
                "drive" => {
                    let keys = Keys::parse(value, "file");
                    let is_disk = !matches!(keys.get("if"), Some("pflash"))
                        && !matches!(keys.get("media"), Some("cdrom"));
                    let file = keys.get("file").or(keys.get("file.filename")).map(PathBuf::from);
                    if is_disk { &mut found.disks } else { &mut found.firmware }.extend(file);
                }
                "blockdev" => {
                    let keys = Keys::parse(value, "driver");
                    let is_firmware = keys.get("node-name").is_some_and(|n| n.contains("pflash"));
                    let file = keys.get("filename").or(keys.get("file.filename"));
                    let file = file.map(PathBuf::from);
                    if is_firmware { &mut found.firmware } else { &mut found.disks }.extend(file);
                }
                "hda" | "hdb" | "hdc" | "hdd" => found.disks.push(value.into()),
                "cdrom" | "pflash" => found.firmware.push(value.into()),
                _ => {}
            }
        }
        // Chardevs may be declared after their users.
        let socket = |id: &String| sockets.iter().find(|(i, _)| i == id).map(|(_, path)| path.clone());
        let (of_events, monitors): (Vec<_>, Vec<_>) =
            monitors.into_iter().partition(|chardev| chardev == EVENTS_CHARDEV);
        found.events = of_events.iter().find_map(socket);
        found.qmp = found.qmp.take().or_else(|| monitors.iter().find_map(socket));
        found.agent = agents.iter().find_map(socket);
        found.vhost_user = served.iter().filter_map(socket).collect();
        found
    }
}

/// VM id in `/var/run/qemu-server/100.pid`.
fn proxmox(pidfile: &Path) -> Option<u32> {
    let in_dir = pidfile.parent()?.ends_with("run/qemu-server");
    pidfile.file_stem()?.to_str()?.parse().ok().filter(|_| in_dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        CommandLine::parse(&arguments)
    }

    #[test]
    fn plain_qemu() {
        let vm = parse(
            "-nodefaults -name plc,debug-threads=on -enable-kvm -m 512 -qmp unix:/run/plc.qmp,server=on,wait=off \
             -drive file=/srv/plc,,1.raw,if=virtio,format=raw -drive if=pflash,file=/srv/vars.fd \
             -device virtserialport,chardev=ga,name=org.qemu.guest_agent.0 \
             -chardev socket,id=ga,path=/run/plc.qga,server=on,wait=off -hda /srv/b.raw -cdrom /srv/c.iso",
        );
        assert_eq!(vm.name.as_deref(), Some("plc"));
        assert_eq!(vm.qmp.as_deref(), Some(Path::new("/run/plc.qmp")));
        assert_eq!(vm.agent.as_deref(), Some(Path::new("/run/plc.qga")));
        assert_eq!(vm.disks, [Path::new("/srv/plc,1.raw"), Path::new("/srv/b.raw")]);
        assert_eq!(vm.firmware, [Path::new("/srv/vars.fd"), Path::new("/srv/c.iso")]);
        assert!(!vm.libvirt && vm.proxmox.is_none() && vm.vhost_user.is_empty());
    }

    #[test]
    fn of_libvirt() {
        let vm = parse(
            r#"-name guest=db,debug-threads=on -S -object {"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/qemu/domain-1-db/master-key.aes"}
             -uuid 0f5e7f0a-0000-4000-8000-000000000001 -chardev socket,id=charmonitor,fd=30,server=on,wait=off
             -mon chardev=charmonitor,id=monitor,mode=control
             -blockdev {"driver":"file","filename":"/usr/share/OVMF/OVMF_CODE.fd","node-name":"libvirt-pflash0-storage"}
             -blockdev {"driver":"host_device","filename":"/dev/vg0/db","node-name":"libvirt-1-storage","read-only":false}
             -device {"driver":"virtserialport","chardev":"charchannel0","name":"org.qemu.guest_agent.0"}
             -chardev socket,id=charchannel0,fd=28,server=on"#,
        );
        assert!(vm.libvirt);
        assert_eq!(vm.name.as_deref(), Some("db"));
        assert_eq!(vm.uuid.as_deref(), Some("0f5e7f0a-0000-4000-8000-000000000001"));
        assert_eq!(vm.disks, [Path::new("/dev/vg0/db")]);
        assert_eq!((vm.qmp, vm.agent), (None, None), "libvirt passes descriptors");
    }

    #[test]
    fn of_proxmox_and_the_io_domain() {
        let vm = parse(
            "-id 100 -name web -chardev socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on -mon chardev=qmp,mode=control \
             -pidfile /var/run/qemu-server/100.pid -chardev socket,id=d,path=/run/rtvirtio/web.sock \
             -device vhost-user-blk-pci,chardev=d -blockdev driver=qcow2,node-name=x,file.driver=file,file.filename=/srv/x.qcow2",
        );
        assert_eq!(vm.proxmox, Some(100));
        assert_eq!(vm.qmp.as_deref(), Some(Path::new("/var/run/qemu-server/100.qmp")));
        assert_eq!(vm.vhost_user, [Path::new("/run/rtvirtio/web.sock")]);
        assert_eq!(vm.disks, [Path::new("/srv/x.qcow2")]);
        assert_eq!(parse("-pidfile /run/100.pid").proxmox, None);
    }

    #[test]
    fn a_monitor_for_events_is_no_monitor_for_commands() {
        let events = "-chardev socket,id=rtvirtio-events,path=/run/plc.events,server=on,wait=off -mon chardev=rtvirtio-events,mode=control";
        let vm = parse(events);
        assert_eq!((vm.qmp, vm.events.as_deref()), (None, Some(Path::new("/run/plc.events"))));
        let vm = parse(&format!("{events} -qmp unix:/run/plc.qmp,server=on,wait=off"));
        assert_eq!(vm.qmp.as_deref(), Some(Path::new("/run/plc.qmp")));
        assert_eq!(vm.events.as_deref(), Some(Path::new("/run/plc.events")));
        // A chardev without a QMP monitor is ignored.
        assert_eq!(parse("-chardev socket,id=rtvirtio-events,path=/run/x -mon rtvirtio-events").events, None);
    }

    /// Monitors as objects, which QEMU 11.1 has in place of `-mon`, in both forms.
    #[test]
    fn monitors_may_be_objects() {
        let chardevs = "-chardev socket,id=c1,path=/run/plc.qmp,server=on -chardev socket,id=rtvirtio-events,path=/run/plc.events,server=on";
        let human = "-object monitor-hmp,id=h,chardev=c1";
        assert_eq!(parse(&format!("{chardevs} {human}")).qmp, None);
        for of in [
            |chardev: &str| format!("-object monitor-qmp,id=m-{chardev},chardev={chardev}"),
            |chardev: &str| {
                format!(
                    "-object {{\"qom-type\":\"monitor-qmp\",\"id\":\"m-{chardev}\",\"chardev\":\"{chardev}\"}}"
                )
            },
        ] {
            // An object may stand before its chardev.
            let vm = parse(&format!("{} {human} {chardevs} {}", of("c1"), of("rtvirtio-events")));
            assert_eq!(vm.qmp.as_deref(), Some(Path::new("/run/plc.qmp")));
            assert_eq!(vm.events.as_deref(), Some(Path::new("/run/plc.events")));
        }
        // libvirt passes its monitor's socket as a descriptor.
        let vm = parse(
            "-object {\"qom-type\":\"monitor-qmp\",\"chardev\":\"m\"} -chardev socket,id=m,fd=28,server=on",
        );
        assert_eq!(vm.qmp, None);
    }

    #[test]
    fn nonsense_is_no_panic() {
        for line in ["", "-", "--", "-name", "-drive ,,,", "-blockdev {", "-qmp unix:", "-mon mode=control"] {
            parse(line);
        }
    }
}
