//! Removal of text by which a host could be recognised.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use rtvirtio_kernel::Root;

/// Replacement of removed text.
const REMOVED: &str = "(removed)";
/// Shortest removed word: a shorter one would match inside others, as a host may be called `a`.
const SHORTEST: usize = 4;
/// Files whose whole content is a word to remove.
const FILES: &[&str] = &[
    "/etc/hostname",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/domainname",
    "/etc/machine-id",
    "/proc/sys/kernel/random/boot_id",
    "/sys/class/dmi/id/board_serial",
    "/sys/class/dmi/id/chassis_serial",
    "/sys/class/dmi/id/product_serial",
    "/sys/class/dmi/id/product_uuid",
];
/// Such files below each directory in `/sys/block` and `/sys/class/net`.
const OF_DEVICES: &[(&str, &[&str])] = &[
    ("/sys/block", &["serial", "device/serial", "wwid", "device/wwid", "uuid"]),
    ("/sys/class/net", &["address"]),
];

/// Words to remove, of `SHORTEST` bytes at least.
#[derive(Clone, Debug, Default)]
pub struct Scrub(BTreeSet<String>);

impl Scrub {
    /// Names, serial numbers and hardware addresses of this host. A file that cannot be read is in
    /// no output of an unprivileged program either.
    #[must_use]
    pub fn for_host(root: &Root) -> Self {
        let mut words = BTreeSet::new();
        let mut add = |path: &Path| {
            let text = fs::read_to_string(root.at(path)).unwrap_or_default();
            let word = text.trim();
            let only_zeros = word.chars().all(|c| "0:-".contains(c));
            if word.len() >= SHORTEST && !only_zeros && word != "(none)" && word != "localhost" {
                words.insert(word.to_owned());
            }
        };
        FILES.iter().for_each(|file| add(Path::new(file)));
        for (class, files) in OF_DEVICES {
            for entry in fs::read_dir(root.at(class)).into_iter().flatten().flatten() {
                let device = Path::new(class).join(entry.file_name());
                files.iter().for_each(|file| add(&device.join(file)));
            }
        }
        Self(words)
    }

    /// Text without these words, and without IP addresses.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        // Longer words first: one may be a part of another.
        let mut words: Vec<&String> = self.0.iter().collect();
        words.sort_by_key(|word| std::cmp::Reverse(word.len()));
        let mut clean = text.to_owned();
        for word in words {
            clean = clean.replace(word.as_str(), REMOVED);
        }
        addresses_removed(&clean)
    }
}

/// The text without IP addresses, with or without a port.
fn addresses_removed(text: &str) -> String {
    let of_address = |c: char| c.is_ascii_hexdigit() || c == '.' || c == ':';
    let mut out = String::with_capacity(text.len());
    let mut word = String::new();
    let end_word = |word: &mut String, out: &mut String| {
        let bare = word.trim_end_matches(['.', ':']);
        let address = bare.parse().or_else(|_| bare.parse().map(|peer: SocketAddr| peer.ip()));
        match address {
            Ok(address) if !address.is_loopback() && !address.is_unspecified() => {
                out.push_str(&word.replacen(bare, REMOVED, 1));
            }
            _ => out.push_str(word),
        }
        word.clear();
    };
    for c in text.chars() {
        if of_address(c) {
            word.push(c);
        } else {
            end_word(&mut word, &mut out);
            out.push(c);
        }
    }
    end_word(&mut word, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_serials_and_addresses_are_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        file("etc/hostname", "plant-7\n");
        file("etc/machine-id", "8f0c2a6e1b7d4b0e9a55d1c2e3f40516\n");
        file("sys/block/nvme0n1/wwid", "eui.0025385b71b2c3d4\n");
        file("sys/block/sda/device/serial", "abc\n");
        file("sys/class/net/eth0/address", "52:54:00:12:34:56\n");
        file("sys/class/net/lo/address", "00:00:00:00:00:00\n");
        let scrub = Scrub::for_host(&Root::new(dir.path()));
        let text = "plant-7: eui.0025385b71b2c3d4 on 52:54:00:12:34:56, machine 8f0c2a6e1b7d4b0e9a55d1c2e3f40516, \
                    192.168.4.7:80 and fe80::5054:ff:fe12:3456. Linux 6.1.0-37, 127.0.0.1, 00:00:00:00:00:00, abc, 1.5 ms";
        assert_eq!(
            scrub.text(text),
            "(removed): (removed) on (removed), machine (removed), \
             (removed) and (removed). Linux 6.1.0-37, 127.0.0.1, 00:00:00:00:00:00, abc, 1.5 ms"
        );
    }
}
