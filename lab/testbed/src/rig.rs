//! A lab as the measured host of sweeps and experiments.

use rtvirtio_apply::{Binding, VmBinding};
use rtvirtio_kernel::{Cgroups, Root, Stack};
use rtvirtio_learn::rig::{Rig, RigError};
use rtvirtio_measure::VmKind;
use rtvirtio_measure::workload::VmLoad;
use rtvirtio_spec::Spec;

use crate::lab::{Lab, LabError};

impl Rig for Lab {
    fn binding(&self) -> Result<Binding, RigError> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        let vms = self.state().vms.iter().map(|vm| {
            let binding = VmBinding {
                cgroup: Some(vm.cgroup.clone()),
                agent: vm.qemu.as_ref().map(|q| q.agent_socket().into()),
                guest_disks: vm.qemu.iter().map(|_| "vda".to_owned()).collect(),
            };
            (vm.name.clone(), binding)
        });
        let vms = vms.collect();
        Ok(Binding { stack: Stack::find(&root, self.device())?, cgroups: Some(cgroups), vms })
    }

    fn kind(&self) -> VmKind {
        if self.state().vms.iter().any(|vm| vm.qemu.is_some()) { VmKind::Qemu } else { VmKind::Process }
    }

    fn vms(&self) -> usize {
        self.state().vms.len()
    }

    fn loads(&self, spec: &Spec) -> Result<Vec<VmLoad>, RigError> {
        Self::loads(self, spec).map_err(|e| match e {
            LabError::Cancelled => RigError::Cancelled,
            LabError::Host(e) => RigError::Host(e),
            other => RigError::Vms(Box::new(other)),
        })
    }
}
