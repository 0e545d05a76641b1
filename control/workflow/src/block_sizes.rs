//! Compares sizes of a spec's requests with those that its device takes.

use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_spec::{Spec, Task};
use rtvirtio_units::Bytes;

use crate::error::{Context as _, Error, Result, bail};
use crate::progress::Progress;

/// Request sizes of a device, from `queue/` in sysfs.
struct Limits {
    /// Logical block size, of which each request is a multiple.
    logical: Bytes,
    /// Larger requests are split.
    largest: Bytes,
}

impl Limits {
    fn read(device: &BlockDevice, root: &Root) -> Result<Self> {
        let number = |file: &str| -> Result<u64> {
            let path = device.sysfs().join("queue").join(file);
            let text = root.read(&path)?;
            text.trim().parse().map_err(Error::from).with_context(|| path.display().to_string())
        };
        Ok(Self {
            logical: Bytes(number("logical_block_size")?),
            largest: Bytes(number("max_hw_sectors_kb")?.saturating_mul(1024)),
        })
    }
}

fn sizes(task: &Task) -> impl Iterator<Item = Bytes> {
    task.mix.iter().map(|share| share.size).chain([task.block])
}

/// Refuses requests that a device does not take, and names those that it takes in several pieces:
/// neither a prediction nor a measurement of them would be of what is declared.
///
/// # Errors
/// [`Kind::File`] with the task and the sizes; when the device cannot be read.
pub(crate) fn check(spec: &Spec, device: &BlockDevice, progress: &dyn Progress) -> Result<()> {
    let limits = Limits::read(device, &Root::default())?;
    against(spec, &device.name, &limits)?.iter().for_each(|split| progress.warn(split));
    Ok(())
}

fn against(spec: &Spec, device: &str, limits: &Limits) -> Result<Vec<String>> {
    let mut split = Vec::new();
    for vm in &spec.vms {
        for task in &vm.tasks {
            let of = format!("vm {}, task {}", vm.name, task.name);
            let logical = limits.logical;
            if let Some(size) = sizes(task).find(|size| logical.0 > 0 && size.0 % logical.0 != 0) {
                bail!(
                    File,
                    "{of}: requests of {size}, and {device} takes multiples of {logical}: write `block` as such, as the guest's \
                     requests reach the device"
                );
            }
            if limits.largest.0 > 0 && task.block > limits.largest {
                let (size, largest) = (task.block, limits.largest);
                split.push(format!(
                    "{of}: {device} takes at most {largest} at once, so each request of {size} reaches it in pieces, and counts as \
                     several there"
                ));
            }
        }
    }
    Ok(split)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn spec(block: &str) -> Spec {
        let task = format!("op = \"read\"\nblock = {block}");
        crate::fixtures::spec("name = \"plc\"\npid = 7", &task).parts()[0].spec.clone()
    }

    #[test]
    fn requests_that_a_device_does_not_take_are_refused_and_large_ones_named() {
        let of = |logical, largest| Limits { logical: Bytes(logical), largest: Bytes(largest) };
        let mix = "[{ size = \"512B\", share = \"4%\" }, { size = \"64KiB\", share = \"96%\" }]";
        for block in ["\"512B\"", "\"6KiB\"", mix] {
            let refused = against(&spec(block), "sdz", &of(4096, 1 << 20)).unwrap_err();
            let text = refused.to_string();
            assert!(refused.kind() == Kind::File && text.contains("takes multiples of 4KiB"), "{text}");
            assert_eq!(against(&spec(block), "sdz", &of(512, 1 << 20)).unwrap(), Vec::<String>::new());
        }
        assert_eq!(against(&spec("\"64KiB\""), "sdz", &of(4096, 1 << 16)).unwrap(), Vec::<String>::new());
        let split = against(&spec("\"1MiB\""), "sdz", &of(4096, 1 << 16)).unwrap();
        assert!(split[0].contains("at most 64KiB at once"), "{split:?}");
    }
}
