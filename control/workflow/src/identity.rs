//! Identities of devices beyond their names: after a reboot a name may be given to another disk, a
//! loop device to another file, a twin's name to another file in another directory.

use std::path::Path;

use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_model::{Profile, fingerprint};
use rtvirtio_spec::Device;

use crate::error::{Context as _, Result, ensure};

/// Identity of a block device: a drive's WWID or serial number, a volume's UUID, the file behind a
/// loop device. `None` where none is known.
pub(crate) fn of_block(root: &Root, device: &BlockDevice) -> Result<Option<String>> {
    if let Some(known) = device.identity(root)? {
        return Ok(Some(known));
    }
    let file = root.read_optional(Path::new("/sys/block").join(&device.name).join("loop/backing_file"))?;
    Ok(file.map(|file| format!("the file {file}")))
}

/// Block device at a path, as it is now.
#[derive(Debug, PartialEq, Eq)]
enum Present {
    /// Here, with this identity.
    Known(String),
    /// Here, and nothing tells it from another one.
    Unknown,
    /// Not here, as in a plan for another machine.
    Absent,
}

fn at(root: &Root, path: &Path) -> Result<Present> {
    match BlockDevice::find(root, path) {
        Ok(found) => Ok(of_block(root, &found)?.map_or(Present::Unknown, Present::Known)),
        Err(e) if e.is_gone() => Ok(Present::Absent),
        Err(e) => Err(e.into()),
    }
}

/// Identity of a spec's device; for one that the lab makes, its source. `None` for a built-in twin,
/// whose name is enough, and for a disk that is not here, as in a plan for another machine.
pub(crate) fn of_device(device: &Device) -> Result<Option<String>> {
    match device {
        Device::Twin { profile, .. } if profile.contains('/') => {
            let declared = rtvirtio_kernel::trusted::read_config(profile, CONFIG_LIMIT)
                .with_context(|| format!("cannot read {profile}"))?;
            Ok(Some(format!("the declaration {}", fingerprint(&declared))))
        }
        Device::Twin { .. } => Ok(None),
        Device::File { path, .. } => Ok(Some(format!("the file {}", path.display()))),
        Device::Path(path) => Ok(match at(&Root::default(), path)? {
            Present::Known(identity) => Some(identity),
            Present::Unknown | Present::Absent => None,
        }),
    }
}

/// Identity to compare with that of a profile; `None` where there is nothing to compare. A device
/// that had one when it was measured and has none now is another one.
fn now(device: &Device, root: &Root) -> Result<Option<String>> {
    let Device::Path(path) = device else { return of_device(device) };
    Ok(match at(root, path)? {
        Present::Known(identity) => Some(identity),
        Present::Unknown => Some("a device without an identity of its own".to_owned()),
        Present::Absent => None,
    })
}

/// Refuses the profile of another device that had the name before.
///
/// # Errors
/// [`Kind::NotMeasured`](crate::Kind::NotMeasured) with both.
pub(crate) fn check(device: &Device, profile: &Profile) -> Result<()> {
    let Some(then) = &profile.identity else { return Ok(()) };
    if let Some(now) = now(device, &Root::default())? {
        let (name, command) = match device {
            Device::Path(path) => {
                (path.display().to_string(), format!("rtvirtio profile {}", path.display()))
            }
            Device::Twin { profile, .. } => (profile.clone(), format!("rtvirtio-lab profile twin:{profile}")),
            Device::File { path, .. } => (path.display().to_string(), "rtvirtio profile SPEC".to_owned()),
        };
        ensure!(
            *then == now,
            NotMeasured,
            "{name} was measured when it was {then}, now it is {now}: run `{command}` again"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Bytes;

    use super::*;

    fn profile() -> Profile {
        rtvirtio_measure::profile::load(Path::new(rtvirtio_testkit::site::PROFILE)).unwrap()
    }

    #[test]
    fn devices_of_one_name_are_told_apart() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let twin = |sub: &str, text: &str| {
            let path = dir.path().join(sub).join("disk.toml");
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            Device::Twin { profile: path.display().to_string(), size: Bytes(1 << 30) }
        };
        let file =
            |sub: &str| Device::File { path: dir.path().join(sub).join("d.img"), size: Bytes(1 << 30) };
        let pairs = [(twin("a", "channels = 1"), twin("b", "channels = 2")), (file("a"), file("b"))];
        for (measured, other) in pairs {
            assert_eq!(crate::profile_key(&measured).unwrap(), crate::profile_key(&other).unwrap());
            let identity = of_device(&measured).unwrap();
            assert!(identity.is_some());
            let profile = Profile { identity, ..profile() };
            check(&measured, &profile).unwrap();
            let refused = check(&other, &profile).unwrap_err();
            assert_eq!(refused.kind(), crate::Kind::NotMeasured);
            assert!(refused.to_string().contains("was measured when it was"), "{refused}");
        }
        // The same twin elsewhere, a built-in one, and a profile of an earlier version.
        check(
            &twin("c", "channels = 1"),
            &Profile { identity: of_device(&twin("a", "channels = 1")).unwrap(), ..profile() },
        )
        .unwrap();
        assert_eq!(
            of_device(&Device::Twin { profile: "qlc-nvme".into(), size: Bytes(1 << 30) }).unwrap(),
            None
        );
        check(&file("a"), &Profile { identity: None, ..profile() }).unwrap();
    }

    #[test]
    fn a_loop_device_is_its_file() {
        let (dir, root) = crate::fixtures::root();
        let put = |path: &str, text: &str| crate::fixtures::put(&root, path, text);
        put("sys/block/loop0/dev", "7:0\n");
        put("sys/block/loop0/size", "2048\n");
        put("sys/block/loop0/loop/backing_file", "/srv/a.img\n");
        let class = dir.path().join("sys/class/block");
        std::fs::create_dir_all(&class).unwrap();
        std::os::unix::fs::symlink("../../block/loop0", class.join("loop0")).unwrap();
        let device = BlockDevice::find(&root, "loop0").unwrap();
        assert_eq!(of_block(&root, &device).unwrap().as_deref(), Some("the file /srv/a.img"));
        let of = |name: &str| now(&Device::Path(name.into()), &root).unwrap();
        assert_eq!(of("loop0").as_deref(), Some("the file /srv/a.img"));
        assert_eq!(of("loop1"), None, "it is not here");
        // Its number was given to a drive that nothing tells from another one.
        std::fs::remove_file(dir.path().join("sys/block/loop0/loop/backing_file")).unwrap();
        assert!(of("loop0").is_some_and(|now| now.contains("without an identity")));
    }
}
