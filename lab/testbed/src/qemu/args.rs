//! QEMU's command line, and checks whose messages are better than QEMU's.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rtvirtio_spec::is_name_char;
use rtvirtio_vmm::probe::QEMU;
use rtvirtio_vmm::{Reconnect, VmmError};
use serde_json::json;

use super::files::Files;
use super::{
    Accel, DiskRegion, GUEST_PORT, GuestDisk, GuestNic, NicBackend, QemuConfig, QemuError, UrgencyDevice,
};
use crate::image::find_program;

/// Alignment of a disk's slice: `O_DIRECT` on a device with 4 KiB blocks takes no finer ones.
const DISK_ALIGN: u64 = 4096;
/// Longest path of a socket, in bytes: unix(7).
const SUN_PATH_MAX: usize = 107;

pub(super) fn check(config: &QemuConfig) -> Result<(), QemuError> {
    let name = &config.name;
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphanumeric());
    if !first || name.len() > 40 || !name.chars().all(is_name_char) {
        return Err(QemuError::Name { name: name.clone() });
    }
    let files = Files::new(&config.run_dir, name);
    for path in [files.qmp, files.agent, files.start, files.incoming] {
        let len = path.as_os_str().len();
        if len > SUN_PATH_MAX {
            return Err(QemuError::Vmm { name: name.clone(), source: VmmError::PathTooLong { path, len } });
        }
    }
    check_disk(config)
}

fn check_disk(config: &QemuConfig) -> Result<(), QemuError> {
    // QEMU waits for a vhost-user back end that does not listen yet.
    let GuestDisk::Region(disk) = &config.disk else { return Ok(()) };
    let bad = |detail: String| QemuError::Disk { name: config.name.clone(), path: disk.path.clone(), detail };
    let (offset, size) = (disk.offset.0, disk.size.0);
    if size == 0 || offset % DISK_ALIGN != 0 || size % DISK_ALIGN != 0 {
        return Err(bad(format!(
            "offset {offset} and size {size} must be multiples of {DISK_ALIGN}, size not zero"
        )));
    }
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap_or_default();
    let open = OpenOptions::new().read(true).write(true).custom_flags(direct).open(&disk.path);
    let mut file: File = open.map_err(|e| match e.raw_os_error() {
        Some(libc::EINVAL) => {
            bad("its file system does not do direct I/O; put it on a disk, not on tmpfs".into())
        }
        _ => bad(format!("{e}; it must exist and be readable and writable")),
    })?;
    let have = file.seek(SeekFrom::End(0)).map_err(|e| bad(e.to_string()))?;
    if offset.checked_add(size).is_none_or(|end| end > have) {
        return Err(bad(format!("the slice of {size} bytes at {offset} goes beyond its end at {have}")));
    }
    Ok(())
}

pub(super) fn command(config: &QemuConfig, files: &Files) -> Result<Command, QemuError> {
    let program = find_program(QEMU).ok_or(QemuError::NoQemu { program: QEMU })?;
    // Asked only where a back end is connected to.
    let reconnect = || {
        let name = config.name.clone();
        reconnect(&program).map_err(|source| QemuError::Vmm { name, source })
    };
    let at = |operation, path: &Path| {
        let path = path.to_path_buf();
        move |source| QemuError::Io { operation, path, source }
    };
    let stderr = File::create(&files.stderr).map_err(at("create", &files.stderr))?;
    // The vhost-user back end of disk or network accesses the guest's memory, which therefore is
    // shared.
    let nic = config.nic.as_ref().map(|nic| &nic.backend);
    let shared = matches!(config.disk, GuestDisk::VhostUser { .. })
        || matches!(nic, Some(NicBackend::VhostUser(_) | NicBackend::VhostUserServer(_)));
    let machine = if shared { "q35,memory-backend=mem" } else { "q35" };
    let mut command = Command::new(&program);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none"])
        .args(["-name", &format!("{},debug-threads=on", config.name)])
        // q35 boots half a second later than microvm, but is the common machine type, and is the
        // same under KVM and TCG.
        .args(["-machine", machine, "-accel", config.accel.as_str(), "-cpu", "max"])
        .args(["-smp", &config.vcpus.to_string()])
        .args(["-m", &format!("{}K", config.memory.0 >> 10)])
        // A panic reboots (`panic=-1`), which then ends QEMU: a dead guest is noticed at once.
        .arg("-no-reboot")
        .arg("-kernel")
        .arg(&config.image.kernel)
        .arg("-initrd")
        .arg(&config.image.initrd)
        .args(["-append", kernel_arguments(config.accel)])
        .arg("-chardev")
        .arg(format!("file,id=console,path={}", option(&files.serial)))
        .args(["-serial", "chardev:console"])
        .arg("-chardev")
        .arg(format!("socket,id=qmp,server=on,wait=off,path={}", option(&files.qmp)))
        .args(["-mon", "chardev=qmp,mode=control"])
        .arg("-chardev")
        .arg(format!("socket,id=agent,server=on,wait=off,path={}", option(&files.agent)))
        .args(["-device", "virtio-serial-pci"])
        .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr);
    if config.incoming {
        command.arg("-incoming").arg(format!("unix:{}", files.incoming.display()));
    }
    if config.lock_memory {
        command.args(["-overcommit", "mem-lock=on"]);
    }
    if let Some(port) = config.port {
        command
            .arg("-netdev")
            .arg(format!("user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:{GUEST_PORT}"))
            // No guest boots from the network.
            .args(["-device", "virtio-net-pci,netdev=net0,romfile="]);
    }
    match &config.urgency {
        None => {}
        Some(UrgencyDevice::Memory) => {
            command
                .args(["-object", "memory-backend-memfd,id=urgency,size=4K,share=on"])
                .args(["-device", "ivshmem-plain,id=rtvirtio,memdev=urgency"]);
        }
        Some(UrgencyDevice::Doorbell { socket }) => {
            command
                .arg("-chardev")
                .arg(format!("socket,id=urgency,path={}", option(socket)))
                .args(["-device", "ivshmem-doorbell,id=rtvirtio,chardev=urgency,vectors=1"]);
        }
    }
    if config.start_port {
        command
            .arg("-chardev")
            .arg(format!("socket,id=start,server=on,wait=off,path={}", option(&files.start)))
            .args(["-device", &format!("virtserialport,chardev=start,name={}", rtvirtio_startup::PORT)]);
    }
    if shared {
        command
            .arg("-object")
            .arg(format!("memory-backend-memfd,id=mem,size={}K,share=on", config.memory.0 >> 10));
    }
    if let Some(nic) = &config.nic {
        let connect = match &nic.backend {
            NicBackend::VhostUser(_) => reconnect()?.option(),
            NicBackend::VhostUserServer(_) | NicBackend::Tap(_) => "server=on",
        };
        add_nic(&mut command, nic, connect);
    }
    match &config.disk {
        GuestDisk::None => {}
        GuestDisk::Region(disk) => {
            let kind = disk.path.metadata().map_err(at("look at", &disk.path))?.file_type();
            command
                .args(["-object", "iothread,id=io0"])
                .args(["-blockdev", &blockdev(disk, kind.is_block_device(), config.workers)])
                .args(["-device", "virtio-blk-pci,drive=disk0,iothread=io0"]);
        }
        GuestDisk::VhostUser { socket, queues } => {
            let queues = queues.map(|queues| format!(",num-queues={queues}")).unwrap_or_default();
            command
                .arg("-chardev")
                .arg(format!("socket,id=disk0,{},path={}", reconnect()?.option(), option(socket)))
                .args(["-device", &format!("vhost-user-blk-pci,chardev=disk0{queues}")]);
        }
    }
    Ok(command)
}

/// The key by which this QEMU connects again; the program is asked once.
fn reconnect(program: &Path) -> Result<Reconnect, VmmError> {
    static KNOWN: Mutex<Option<(PathBuf, Reconnect)>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, key)) = known.as_ref().filter(|(of, _)| of == program) {
        return Ok(*key);
    }
    let key = Reconnect::of_program(program)?;
    *known = Some((program.to_owned(), key));
    Ok(key)
}

/// `connect` says of a vhost-user socket who listens.
fn add_nic(command: &mut Command, nic: &GuestNic, connect: &str) {
    match &nic.backend {
        NicBackend::Tap(interface) => {
            command
                .arg("-netdev")
                .arg(format!("tap,id=nic0,ifname={interface},script=no,downscript=no,vhost=off"))
                .args(["-device", &format!("virtio-net-pci,netdev=nic0,mac={},romfile=", nic.mac)]);
        }
        NicBackend::VhostUser(socket) | NicBackend::VhostUserServer(socket) => {
            command
                .arg("-chardev")
                .arg(format!("socket,id=nic0,{connect},path={}", option(socket)))
                .args(["-netdev", "vhost-user,id=net1,chardev=nic0,vhostforce=on"])
                // Without MSI-X: QEMU 7.2 under TCG crashes where it starts a vhost-user network
                // with it.
                .args(["-device", &format!("virtio-net-pci,netdev=net1,mac={},vectors=0,romfile=", nic.mac)]);
        }
    }
}

/// Under TCG the guest's clock must not change during a measurement: on a busy host the kernel's
/// watchdog would consider the TSC unstable and switch to a slow clock. An emulated processor needs
/// no mitigations. Programs at fixed addresses are translated once, not anew at each start.
fn kernel_arguments(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "console=ttyS0 quiet panic=-1 reboot=t",
        Accel::Tcg => {
            "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check mitigations=off nokaslr norandmaps"
        }
    }
}

fn blockdev(disk: &DiskRegion, block_device: bool, workers: bool) -> String {
    json!({
        "driver": "raw",
        "node-name": "disk0",
        "offset": disk.offset.0,
        "size": disk.size.0,
        "cache": { "direct": true },
        "file": {
            "driver": if block_device { "host_device" } else { "file" },
            "filename": disk.path,
            "aio": if workers { "threads" } else { "native" },
            "locking": "off",
            "cache": { "direct": true },
        },
    })
    .to_string()
}

/// In QEMU's option lists a comma in a value is doubled.
fn option(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}
