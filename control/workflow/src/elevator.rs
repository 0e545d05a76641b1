//! Changes of the host's elevator for a measurement.

use std::collections::BTreeSet;

use rtvirtio_apply::{Binding, Machine, NoGuests, OnConflict, Session, Silent, elevator_writes};
use rtvirtio_kernel::{Cgroups, HostError, Root, Stack, unless_gone};

use crate::acting;
use crate::dirs::Dirs;
use crate::error::{Result, bail, ensure};
use crate::in_force::forget;
use crate::progress::Progress;
use crate::service_plan;

/// Changes the elevator of a device, or of the disks below it, under the same journal as a plan, so
/// that all that the kernel forgets with it (tunables, queue depth, weights) comes back: when it is
/// put back, when this is dropped, and by `rtvirtio revert` after a kill.
pub struct MeasuredElevator<'a> {
    session: Session,
    binding: Binding,
    dirs: Dirs,
    root: Root,
    progress: &'a dyn Progress,
}

impl<'a> MeasuredElevator<'a> {
    /// Takes the state directory. Nothing is changed yet.
    ///
    /// # Errors
    /// Another rtvirtio holds the state directory, or a plan is in force, or held by the service on
    /// one of the disks: its settings would be measured, and then lost.
    pub fn open(device: &Stack, dirs: &Dirs, progress: &'a dyn Progress) -> Result<Self> {
        let root = Root::default();
        let session = Session::open(&dirs.state)?;
        if session.in_force()? {
            bail!(
                InForce,
                "a plan is in force (see `rtvirtio status`), and measuring the device takes another elevator: run `rtvirtio revert` first"
            );
        }
        refuse_held(device, &service_plan::devices(dirs)?, &root)?;
        forget(&dirs.state)?;
        let cgroups = match Cgroups::detect(&root) {
            Ok(cgroups) => Some(cgroups),
            // Without the controller there are no weights to keep.
            Err(HostError::NoIoController { .. }) => None,
            Err(e) => return Err(e.into()),
        };
        let binding = Binding { stack: device.clone(), cgroups, vms: Default::default() };
        Ok(Self { session, binding, dirs: dirs.clone(), root, progress })
    }

    /// Puts back what was set before and sets this elevator.
    ///
    /// # Errors
    /// When the kernel refuses it, or something cannot be put back.
    pub fn set(&self, name: &str) -> Result<()> {
        self.put_back()?;
        let machine = self.machine();
        let writes = elevator_writes(name, &self.binding, &machine)?;
        acting::note(&self.dirs)?;
        self.session.apply(&writes, &machine, &mut Silent)?;
        Ok(())
    }

    /// Puts everything back as it was.
    ///
    /// # Errors
    /// [`Kind::NotPutBack`](crate::Kind::NotPutBack) when a setting remains.
    pub fn put_back(&self) -> Result<()> {
        let reverted = self.session.revert(OnConflict::Report, &self.machine(), &mut Silent)?;
        if let Some(reverted) = reverted {
            ensure!(
                reverted.done,
                NotPutBack,
                "{}; see `rtvirtio status`, then `rtvirtio revert --force` or `--keep`",
                reverted.summary()
            );
            acting::settle(&self.dirs)?;
        }
        Ok(())
    }

    fn machine(&self) -> Machine<'_> {
        Machine::new(&self.root, &NoGuests)
    }
}

/// Refuses disks on which the service holds a plan.
fn refuse_held(device: &Stack, held: &BTreeSet<String>, root: &Root) -> Result<()> {
    let names = |of: &Stack| -> Vec<String> {
        of.disks.iter().chain([&of.device]).map(|disk| disk.name.clone()).collect()
    };
    let ours = names(device);
    for held in held {
        // A device that is gone is none of these disks.
        let Some(of) = unless_gone(Stack::find(root, held))? else { continue };
        if names(&of).iter().any(|name| ours.contains(name)) {
            bail!(
                InForce,
                "rtvirtiod holds a plan on {held}, and its settings would be measured: take `[plan]` out of its configuration, or stop it and \
                 `rtvirtio revert`"
            );
        }
    }
    Ok(())
}

impl Drop for MeasuredElevator<'_> {
    fn drop(&mut self) {
        // What could not be put back stays in the journal.
        if let Err(e) = self.put_back() {
            self.progress.warn(&format!("{e:#}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::put;

    #[test]
    fn a_disk_of_the_service_that_cannot_be_read_is_not_another_one() {
        let (_dir, root) = crate::fixtures::root();
        for (name, dev) in [("sda", "8:0\n"), ("sdb", "8:16\n")] {
            std::fs::create_dir_all(root.at(format!("/sys/class/block/{name}"))).unwrap();
            put(&root, format!("/sys/block/{name}/dev"), dev);
            put(&root, format!("/sys/block/{name}/queue/scheduler"), "[none] mq-deadline\n");
        }
        let ours = Stack::find(&root, "sdb").unwrap();
        let refused = |held: &str| refuse_held(&ours, &BTreeSet::from([held.to_owned()]), &root);
        refused("/dev/sda").unwrap();
        refused("/dev/sdc").unwrap();
        assert_eq!(refused("/dev/sdb").unwrap_err().kind(), crate::Kind::InForce);
        // A directory in the place of the file: EISDIR.
        std::fs::remove_file(root.at("/sys/block/sda/dev")).unwrap();
        std::fs::create_dir(root.at("/sys/block/sda/dev")).unwrap();
        assert!(refused("/dev/sda").is_err(), "it may be one of these disks");
    }
}
