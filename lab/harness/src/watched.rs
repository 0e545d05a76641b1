//! A service that observes a lab's VMs at work, for its page: in this process, with directories of
//! its own, and without changing settings.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use anyhow::{Context as _, ensure};
use rtvirtio_daemon::api::{Client, Listeners};
use rtvirtio_daemon::linux::Places;
use rtvirtio_daemon::{Config, Mode, Service, ServiceOptions, socket};
use rtvirtio_kernel::ProcessId;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::Dirs;
use rtvirtio_workflow::inventory::Inventory;
use toml_edit::{DocumentMut, Item, Table, value};

/// Interval of observations: the runs are short.
const OBSERVE: Nanos = Nanos::from_millis(2_000);

/// A service that observes a lab's VMs. Ended on drop.
pub struct Watched {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    client: Client,
    _dir: tempfile::TempDir,
}

impl Watched {
    /// Starts to observe the guests of the lab that is up in a run directory.
    pub fn start(lab: &Dirs) -> anyhow::Result<Self> {
        let inventory = Inventory::load(&lab.run)?;
        // Short, because a socket's path has to fit into 107 bytes (unix(7)).
        let dir = tempfile::Builder::new().prefix(&ProcessId::prefix("watched")).tempdir_in("/tmp")?;
        let contracts = dir.path().join("contracts.d");
        fs::create_dir(&contracts)?;
        fs::write(contracts.join("lab.toml"), contract_of(&inventory)?)?;
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        let at = socket(&dirs.run);
        let options = ServiceOptions {
            places: Places { dirs, contracts, specs: Vec::new() },
            config: Config { mode: Mode::Observe, observe: OBSERVE, ..Config::default() },
            listeners: Listeners { socket: at.clone(), group: None, tcp: None },
        };
        let (stop, (ready, is_ready)) = (Arc::new(AtomicBool::new(false)), channel());
        let stopped = Arc::clone(&stop);
        let run = move || match Service::start(options) {
            Ok(mut service) => {
                // The caller waits for it.
                let _ = ready.send(Ok(()));
                service.run(&stopped, &mut |_| {});
            }
            Err(e) => drop(ready.send(Err(e))),
        };
        let thread = Some(std::thread::Builder::new().name("service".to_owned()).spawn(run)?);
        let this = Self { stop, thread, client: Client::new(at), _dir: dir };
        is_ready.recv().context("the service ended")??;
        Ok(this)
    }

    /// The service's page as one file, with its observations.
    pub fn page(&self) -> anyhow::Result<String> {
        Ok(self.client.text("GET", "/copy.html")?)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The service has no settings in force.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The lab's spec, with its guests as running VMs: named by their monitors, on the lab's device.
fn contract_of(inventory: &Inventory) -> anyhow::Result<String> {
    let mut doc: DocumentMut = inventory.spec_text.parse()?;
    let mut device = Table::new();
    device["path"] = value(text(&inventory.device));
    doc["device"] = Item::Table(device);
    let vms = doc.get_mut("vm").and_then(Item::as_array_of_tables_mut).context("the spec has no VM")?;
    for vm in vms.iter_mut() {
        let name = vm.get("name").and_then(Item::as_str).unwrap_or_default().to_owned();
        let guest = inventory.vms.iter().find(|of| of.name == name).and_then(|of| of.guest.as_ref());
        let guest = guest.with_context(|| format!("{name} has no monitor: it is no QEMU guest"))?;
        // Keys that describe how the lab starts the VM.
        for key in ["lab", "kernel"] {
            vm.remove(key);
        }
        vm["qmp"] = value(text(&guest.qmp));
    }
    let contract = doc.to_string();
    let spec = rtvirtio_spec::parse("lab.toml", &contract)?;
    ensure!(spec.lab_kind().is_none(), "the spec still asks for a lab");
    Ok(contract)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::{Machine, Need, has};
    use rtvirtio_units::Bytes;
    use rtvirtio_workflow::inventory::{ListedGuest, ListedVm};

    use super::*;

    const SPEC: &str = "[device]\ntwin = \"emmc\"\n[[vm]]\nname = \"plc\"\nlab = \"qemu\"\nkernel = \"rt\"\n[[vm.task]]\nname = \"t\"\n\
        op = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\ntarget = { percentile = \"p99\", latency = \"10ms\" }\n";

    fn inventory(qmp: Option<&Path>) -> Inventory {
        let guest = qmp.map(|qmp| ListedGuest {
            process: ProcessId::find(std::process::id()).unwrap().unwrap(),
            qmp: qmp.to_owned(),
            agent: "/nowhere/agent".into(),
            disk: "/dev/vda".into(),
        });
        let region = rtvirtio_measure::fio::Region { offset: Bytes(0), size: Bytes::from_kib(4) };
        let vm = ListedVm { name: "plc".to_owned(), cgroup: "plc".into(), guest, region };
        let mut list = Inventory::new("lab.toml", SPEC, Path::new("/dev/loop7"));
        list.vms.push(vm);
        list
    }

    #[test]
    fn guests_of_a_lab_are_vms_that_run() {
        let text = contract_of(&inventory(Some(Path::new("/run/plc.qmp")))).unwrap();
        let spec = rtvirtio_spec::parse("lab.toml", &text).unwrap();
        assert_eq!(spec.device, rtvirtio_spec::Device::Path("/dev/loop7".into()));
        assert!(text.contains("qmp = \"/run/plc.qmp\"") && spec.vms[0].tasks[0].targets.len() == 1, "{text}");
        let e = contract_of(&inventory(None)).unwrap_err();
        assert!(e.to_string().contains("plc has no monitor"), "{e}");
    }

    #[test]
    fn the_page_has_what_the_service_saw() {
        if !has("the_page_has_what_the_service_saw", &[Need::Root, Need::QEMU]) {
            return;
        }
        let dir = rtvirtio_testkit::tempdir_in("/tmp").unwrap();
        let machine = Machine::start(dir.path(), "plc", &[]);
        let lab = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        inventory(Some(&dir.path().join("qmp"))).save(&lab.run).unwrap();
        let watched = Watched::start(&lab).unwrap();
        let begin = std::time::Instant::now();
        while !watched.page().unwrap().contains("\"state\":\"observed\"") {
            assert!(begin.elapsed() < rtvirtio_testkit::HANG, "{}", watched.page().unwrap());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert!(watched.page().unwrap().contains("\"name\":\"plc\""));
        drop((watched, machine));
    }
}
