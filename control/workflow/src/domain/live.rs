//! Changing a running I/O domain: reload its file, attach and detach disks and ports, stop it.
//!
//! Only the configuration file tells what is served: `attach` and `detach` edit it and reload, and
//! restore its text where the I/O domain refuses. New disks and ports are opened here and passed
//! on, because its process opens no files.

use std::collections::BTreeSet;
use std::fs::File as OpenFile;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt as _, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_apply::Session;
use rtvirtio_domain_config::{File, edit, parent_dir};
use rtvirtio_domain_protocol::handover::{MOST_DISKS, MOST_PORTS};
use rtvirtio_domain_protocol::{self as protocol, Changed, Command, Leaving, Stop};
use rtvirtio_domain_resources::backing::SECTOR;
use rtvirtio_domain_resources::handover::Opened;
use rtvirtio_domain_resources::{OpenError, check};
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::trusted;
use rtvirtio_units::Bytes;
use serde::Serialize;

use super::client::{self, answer, connect, request};
use super::process::{self, Domain};
use super::{Fate, stop};
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};

/// Timeout of a reload, which first completes the requests of disks to detach.
const RELOAD: Duration = Duration::from_secs(60);
/// Timeout from a stop to the end of the process.
const END: Duration = Duration::from_secs(10);

/// Changes of a reload.
#[derive(Debug, Serialize)]
pub struct Changes {
    /// The configuration file in force.
    pub config: PathBuf,
    /// The changes, each with its place.
    pub changed: Vec<String>,
    /// Changes of the file or the host that a reload does not put in force.
    pub notes: Vec<String>,
}

/// Disks and ports that a reload would attach and detach.
#[derive(Debug, Serialize)]
pub struct Preview {
    /// Configuration file that the I/O domain reads.
    pub config: PathBuf,
    /// Names of disks to attach.
    pub attach: Vec<String>,
    /// Names of disks to detach.
    pub detach: Vec<String>,
    /// Names of ports to attach.
    pub attach_ports: Vec<String>,
    /// Names of ports to detach.
    pub detach_ports: Vec<String>,
}

/// Credentials of the process that listens on a control socket.
struct Peer {
    pid: u32,
    uid: u32,
}

fn peer(stream: &UnixStream, control: &Path) -> Result<Peer> {
    let peer = rustix::net::sockopt::socket_peercred(stream)
        .with_context(|| format!("{}: which process answers there", control.display()))?;
    Ok(Peer { pid: peer.pid.as_raw_nonzero().get().unsigned_abs(), uid: peer.uid.as_raw() })
}

/// Disks and ports that a reload would attach and detach, after all checks of the file.
///
/// # Errors
/// A file that is refused; an I/O domain that does not answer.
pub fn preview(control: &Path) -> Result<Preview> {
    let found: protocol::Preview = request(&connect(control)?, control, &Command::Preview, RELOAD)?;
    let names = |list: Vec<Leaving>| list.into_iter().map(|leaving| leaving.name).collect();
    Ok(Preview {
        config: found.config,
        attach: found.attach,
        detach: names(found.detach),
        attach_ports: found.attach_ports,
        detach_ports: names(found.detach_ports),
    })
}

/// Reloads the I/O domain's configuration file. Disks and ports that it adds are opened with the
/// checks of a start and passed on. With `force`, others are detached even from running guests.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) for what the I/O domain or a check refuses; nothing is
/// changed then.
pub fn reload(control: &Path, force: bool) -> Result<Changes> {
    let Preview { config, attach, attach_ports, .. } = preview(control)?;
    let stream = connect(control)?;
    let Peer { pid, uid } = peer(&stream, control)?;
    let mut opened = Opened::default();
    if !attach.is_empty() || !attach_ports.is_empty() {
        for (names, what, most) in [(&attach, "disks", MOST_DISKS), (&attach_ports, "ports", MOST_PORTS)] {
            if names.len() > most {
                bail!(Argument, "{} {what} would be added at once; attach at most {most}", names.len());
            }
        }
        let file = File::load(&config)?;
        let [disks, ports]: [BTreeSet<String>; 2] =
            [attach, attach_ports].map(|names| names.into_iter().collect());
        let guarded =
            |e: OpenError| crate::Error::new(crate::Kind::Guarded, format!("nothing is changed: {e}"));
        check::refuse_collisions(&file, &config).map_err(guarded)?;
        opened = Opened::open(&file, [&disks, &ports], pid, uid).map_err(guarded)?;
    }
    opened.send_reload(&stream, force)?;
    let Changed { changed } = answer(&stream, control, RELOAD)?;
    opened.release();
    // The I/O domain has reloaded already: an unknown size is no error.
    let notes = other_sizes(control, &config)
        .unwrap_or_else(|e| vec![format!("whether a disk has grown is not known: {e:#}")]);
    Ok(Changes { config, changed, notes })
}

/// A FIFO in a disk's place is not waited for.
const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits() as i32;

/// Notes on disks without a `size` whose file or device has another size than the guest sees: QEMU
/// reads the size once.
fn other_sizes(control: &Path, config: &Path) -> Result<Vec<String>> {
    let status = client::ask(control)?;
    let file = File::load(config)?;
    let mut notes = Vec::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks).filter(|disk| disk.size.is_none()) {
        let Some(served) = status.vms.iter().find(|vm| vm.name == disk.name) else { continue };
        let Some(seen) = served.size else {
            notes.push(format!(
                "disk \"{}\": the I/O domain does not say what size its guest sees",
                disk.name
            ));
            continue;
        };
        // disk
        let open = OpenFile::options().read(true).custom_flags(NONBLOCK).open(&disk.path);
        let end = open.and_then(|mut file| file.seek(SeekFrom::End(0)));
        let room = match end {
            Ok(end) => end.saturating_sub(disk.offset.0) / SECTOR * SECTOR,
            Err(e) => {
                notes.push(format!(
                    "disk \"{}\": its size is not known: {}: {e}",
                    disk.name,
                    disk.path.display()
                ));
                continue;
            }
        };
        // A larger one is a change of the reload.
        if room < seen {
            notes.push(format!(
                "disk \"{name}\": {} has {} for it by now, and its guest sees {}: shut the VM down, `rtvirtio iod detach {name}`, `rtvirtio iod attach` its table again, and start the VM",
                disk.path.display(),
                Bytes(room),
                Bytes(seen),
                name = disk.name,
            ));
        }
    }
    Ok(notes)
}

/// Adds the `[[device.disk]]` and `[[network.port]]` tables of a text to the I/O domain's file, and
/// reloads it.
///
/// # Errors
/// As [`reload`]; the file is as it was then.
pub fn attach(control: &Path, tables: &str) -> Result<Changes> {
    edit_and_reload(control, false, |text| Ok(edit::add(text, tables)?.0))
}

/// Removes the tables of these disks and ports from the I/O domain's file, and reloads it.
///
/// # Errors
/// As [`reload`]; the file is as it was then.
pub fn detach(control: &Path, names: &[String], force: bool) -> Result<Changes> {
    edit_and_reload(control, force, |text| edit::remove(text, names))
}

fn edit_and_reload(
    control: &Path,
    force: bool,
    change: impl FnOnce(&str) -> Result<String, edit::EditError>,
) -> Result<Changes> {
    let Preview { config, attach, detach, attach_ports, detach_ports } = preview(control)?;
    let others = [attach, detach, attach_ports, detach_ports].concat();
    if !others.is_empty() {
        let list = others.join(", ");
        bail!(
            Guarded,
            "{}: it has other disks or ports than the I/O domain ({list}): `rtvirtio iod reload` first",
            config.display()
        );
    }
    // A symbolic link stays one.
    let path = std::fs::canonicalize(&config).with_context(|| config.display().to_string())?;
    let (_locked, old) = locked_text(&path)?;
    let new = match change(&old) {
        Ok(new) => new,
        Err(e) => bail!(File, "{}: {e}", config.display()),
    };
    replace(&path, &new)?;
    reload(control, force).map_err(|refused| match replace(&path, &old) {
        Ok(()) => refused,
        Err(e) => refused.within(format!("{}: its old text could not be put back ({e:#})", path.display())),
    })
}

/// The text of a file, locked against another `attach` or `detach`.
fn locked_text(path: &Path) -> Result<(OpenFile, String)> {
    let named = || path.display().to_string();
    // Not the file itself, which others may be able to read, and lock, too.
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".lock");
    let beside = parent_dir(path).join(name);
    let lock = trusted::lock_file(&beside).with_context(|| beside.display().to_string())?;
    if !rtvirtio_kernel::flock::lock(&lock).with_context(|| beside.display().to_string())? {
        bail!(InForce, "{}: another rtvirtio changes it; try again", path.display());
    }
    Ok((lock, trusted::read_config_text(path, trusted::CONFIG_LIMIT).with_context(named)?))
}

/// Replaces a file at once, with the same mode and owner.
fn replace(path: &Path, text: &str) -> Result<()> {
    let named = || path.display().to_string();
    let meta = std::fs::metadata(path).with_context(named)?;
    let mut new = tempfile::NamedTempFile::new_in(parent_dir(path)).with_context(named)?;
    new.write_all(text.as_bytes()).with_context(named)?;
    std::os::unix::fs::fchown(new.as_file(), Some(meta.uid()), Some(meta.gid())).with_context(named)?;
    new.as_file()
        .set_permissions(std::fs::Permissions::from_mode(meta.mode() & 0o7777))
        .with_context(named)?;
    new.as_file().sync_all().with_context(named)?;
    new.persist(path).map_err(|e| e.error).with_context(named)?;
    Ok(())
}

/// Result of stopping an I/O domain.
#[derive(Debug, Serialize)]
pub struct Stopped {
    /// Id of the stopped process.
    #[serde(rename = "stopped")]
    pub pid: u32,
    /// Copy of its configuration if that was edited since `rtvirtio apply`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<PathBuf>,
}

/// Stops the I/O domain that answers on a control socket. One that `rtvirtio apply` has started is
/// stopped as `rtvirtio revert` stops it. With `force`, under its guests.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) while guests are attached; it runs on then.
pub fn end(control: &Path, dirs: &Dirs, force: bool) -> Result<Stopped> {
    let stream = connect(control)?;
    let Peer { pid, .. } = peer(&stream, control)?;
    if is_applied(pid, dirs) {
        let _session = Session::open(&dirs.state)?;
        return match stop(dirs, force) {
            Fate::Left { why, .. } => bail!(Guarded, "{why}"),
            Fate::None => Ok(Stopped { pid, kept: None }),
            Fate::Stopped { kept, .. } => Ok(Stopped { pid, kept }),
        };
    }
    let process = Process::open(pid).with_context(|| format!("process {pid}"))?;
    if let Stop::Serves { guests } = request(&stream, control, &Command::Stop { force }, RELOAD)? {
        bail!(
            Guarded,
            "not stopped: it serves {}. Shut these VMs down first, or use `--force`, after which their requests wait until an I/O domain runs again",
            guests.join(", ")
        );
    }
    match process {
        Some(process) if !process.has_ended(END)? => {
            bail!(
                NotPutBack,
                "process {pid} has not ended after {} s: it waits for its devices",
                END.as_secs()
            )
        }
        _ => Ok(Stopped { pid, kept: None }),
    }
}

fn is_applied(pid: u32, dirs: &Dirs) -> bool {
    matches!(process::find(&dirs.state), Ok(Domain::Runs(all)) if all.iter().any(|p| p.pid() == pid))
}
