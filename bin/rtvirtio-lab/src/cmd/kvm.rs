//! `rtvirtio-lab kvm`.

use std::process::ExitCode;

use rtvirtio_console::{Global, Ui, show};
use rtvirtio_vmm::{KvmProbe, probe_kvm};
use rtvirtio_workflow::Progress as _;

/// Starts a guest from Debian's kernel; exit code 1 when it does not boot under KVM.
pub fn run(global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let image = rtvirtio_testbed::image::ensure(&global.cache_dir, &|text| ui.step(text))?;
    ui.step("starting a guest under KVM");
    let (works, text) = match probe_kvm(&image.kernel, &image.initrd)? {
        KvmProbe::Works => (true, "a stock kernel boots under KVM".to_owned()),
        KvmProbe::Broken { reason } => {
            (false, format!("/dev/kvm opens but a stock kernel does not boot under it: {reason}"))
        }
        KvmProbe::Absent { reason } => (false, reason),
    };
    show(ui, &serde_json::json!({ "works": works, "what": text }), || format!("{text}\n"))?;
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
