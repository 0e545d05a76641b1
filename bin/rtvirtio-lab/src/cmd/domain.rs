//! The I/O domain of a lab.

use std::path::Path;
use std::process::Command;

use anyhow::bail;
use rtvirtio_console::{Ui, print, style};
use rtvirtio_domain_plan::DiskPlace;
use rtvirtio_report::text;
use rtvirtio_spec::{LabKind, Spec};
use rtvirtio_testbed::state::LabVm;
use rtvirtio_testbed::{DOMAIN_DIR, domain_socket};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::domain::client::program;
use rtvirtio_workflow::domain::plan::make;
use rtvirtio_workflow::domain::process::FILE;
use rtvirtio_workflow::domain::start::IodError;
use rtvirtio_workflow::{Dirs, Progress as _};

/// Plan for the I/O domain of a lab, as the command that serves it.
pub fn plan_for_lab(
    spec: &Spec,
    name: &str,
    profile: Option<&Path>,
    dirs: &Dirs,
    ui: &Ui,
) -> anyhow::Result<impl Fn(&Path, &[LabVm], &Path) -> Result<Command, IodError> + use<>> {
    if spec.lab_kind() != Some(LabKind::Qemu) {
        bail!("--domain needs QEMU guests (lab = \"qemu\"): a process has no vhost-user disk");
    }
    let plan = make(spec, profile, dirs, ui)?;
    if !ui.json {
        print(&text::domain_plan(&plan, &style()))?;
    } else if !plan.feasible {
        ui.warn("not every target can be promised: `rtvirtio plan --domain` names them, and why");
    }
    let name = name.to_owned();
    Ok(move |device: &Path, vms: &[LabVm], run_dir: &Path| {
        let places: Vec<DiskPlace> = vms
            .iter()
            .map(|vm| DiskPlace {
                socket: domain_socket(run_dir, &vm.name),
                path: device.to_owned(),
                part: Some((Bytes(vm.offset), Bytes(vm.size))),
                // The lab has created it.
                is_raw: true,
            })
            .collect();
        let file = run_dir.join(DOMAIN_DIR).join(FILE);
        let text = plan.text(&name, &run_dir.join("iod.sock"), &places);
        std::fs::write(&file, text).map_err(|e| IodError::new(format!("{}: {e}", file.display())))?;
        let mut command = Command::new(program());
        command.arg("--config").arg(file);
        Ok(command)
    })
}
