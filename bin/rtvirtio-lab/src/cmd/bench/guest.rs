//! A real guest on the I/O domain, for experiments.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::image;
use rtvirtio_testbed::qemu::{Accel, GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_vmm::agent::{ExecOutput, Process};
use serde_json::Value;

use crate::args::AccelName;
use crate::cmd::lab;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::domain::client as iod;
use rtvirtio_workflow::site::{cpus, kernel_release};

/// How often the guest is asked whether a program has ended: asking costs its CPU time.
const ASK: Duration = Duration::from_millis(250);
/// How often everything else is looked at.
const TICK: Duration = Duration::from_millis(5);
/// QEMU tries to connect again once a second; a busy host needs longer.
const ATTACH: Duration = Duration::from_secs(20);
/// For commands that end at once.
const SHORT: Duration = Duration::from_secs(30);

/// Boots a guest whose disk is served on `socket`, and says what an experiment's result needs to know.
pub fn boot(
    socket: &Path,
    queues: u16,
    run_dir: &Path,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<(QemuGuest, HostFacts)> {
    let image = image::ensure(&global.cache_dir, &|line| ui.step(line));
    // Ctrl-C reaches apt too, whose failure is then not the news.
    ui.check_cancelled()?;
    let image = image?;
    let accel = lab::choose_accel(AccelName::Auto, &image, ui)?;
    ui.step("booting a guest on the I/O domain");
    let disk = GuestDisk::VhostUser { socket: socket.to_owned(), queues };
    let mut guest = QemuGuest::start(&QemuConfig { accel, ..QemuConfig::new("vm", image, disk, run_dir) })?;
    let facts = facts(&mut guest, accel, String::new())?;
    Ok((guest, facts))
}

/// What a result needs to know of the host that runs a guest.
pub fn facts(guest: &mut QemuGuest, accel: Accel, device: String) -> anyhow::Result<HostFacts> {
    let version = guest.qmp()?.version().qemu;
    Ok(HostFacts {
        kernel: kernel_release(),
        cpus: cpus(),
        vmm: format!("QEMU {}.{}.{}", version.major, version.minor, version.micro),
        accelerator: accel.as_str().to_owned(),
        device,
    })
}

/// Waits for the end of a program in the guest, and calls `meanwhile` often. Ctrl-C ends the wait.
pub fn finish(
    guest: &mut QemuGuest,
    process: Process,
    patience: Duration,
    ui: &Ui,
    meanwhile: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<ExecOutput> {
    let begin = Instant::now();
    let mut ask = begin + ASK;
    loop {
        ui.check_cancelled()?;
        meanwhile()?;
        if Instant::now() >= ask {
            if let Some(output) = guest.poll(process)? {
                return Ok(output);
            }
            if begin.elapsed() > patience {
                bail!("a program in the guest has not ended after {} s: the guest hangs", patience.as_secs());
            }
            ask = Instant::now() + ASK;
        }
        std::thread::sleep(TICK);
    }
}

/// Runs a command in the guest to its end; another status than 0 is an error. What it printed.
pub fn say(guest: &mut QemuGuest, argv: &[&str]) -> anyhow::Result<String> {
    let output = guest.exec(argv, SHORT)?;
    if !output.success() {
        bail!("`{}` in the guest: {}", argv.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What a domain says of its first VM.
pub fn vm(control: &Path) -> anyhow::Result<Value> {
    let mut status = iod::ask(control)?;
    status.pointer_mut("/vms/0").map(Value::take).context("the I/O domain reports no VM")
}

/// Whether a domain's first VM is attached.
pub fn is_attached(control: &Path) -> anyhow::Result<bool> {
    Ok(vm(control)?["attached"].as_bool().unwrap_or(false))
}

/// Waits until the guest is attached.
pub fn attach(control: &Path, ui: &Ui) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !is_attached(control)? {
        ui.check_cancelled()?;
        if begin.elapsed() > ATTACH {
            bail!("QEMU has not connected to the I/O domain again after {} s", ATTACH.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
