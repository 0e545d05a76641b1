//! The checks of a start, without starting: `rtvirtio-iod --check`.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rtvirtio_domain_config::{File, NamedPath, parent_dir};
use rustix::fs::Access;
use rustix::net::SocketAddrUnix;

use crate::disks::{OpenedDisks, take_locks};
use crate::doubts;
use crate::error::OpenError;
use crate::listen::{self, SocketState};
use crate::socket_group;
use crate::uplink::Uplink;

/// Refuses two paths of a configuration that lead to the same file, such as a socket in the place
/// of a disk. Paths that do not exist yet are compared by directory and name.
///
/// # Errors
/// [`OpenError::Collision`], or a path that cannot be read.
pub fn refuse_collisions(file: &File, config: &Path) -> Result<(), OpenError> {
    let paths = file.paths(config);
    let identities: Vec<Option<PathIdentity>> = paths.iter().map(path_identity).collect::<Result<_, _>>()?;
    for (i, first) in paths.iter().enumerate() {
        for (j, second) in paths.iter().enumerate().skip(i + 1) {
            let same = identities[i].is_some() && identities[i] == identities[j];
            if same && !first.may_share_with(second) {
                let (first, second) = (first.what.clone(), second.what.clone());
                return Err(OpenError::Collision { first, second, path: paths[j].path.clone() });
            }
        }
    }
    Ok(())
}

#[derive(PartialEq, Eq)]
enum PathIdentity {
    /// Device and inode of an existing path.
    Inode(u64, u64),
    /// Device and inode of the directory, and name in it.
    Name((u64, u64), PathBuf),
}

/// The identity of a path; `None` when its directory does not exist.
fn path_identity(named: &NamedPath) -> Result<Option<PathIdentity>, OpenError> {
    let failed = |source: io::Error| {
        let source = io::Error::new(source.kind(), format!("{}: {source}", named.path.display()));
        OpenError::Path { what: named.what.clone(), source }
    };
    let inode = |path: &Path| match std::fs::metadata(path) {
        Ok(meta) => Ok(Some((meta.dev(), meta.ino()))),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(failed(e)),
    };
    if let Some((dev, ino)) = inode(&named.path)? {
        return Ok(Some(PathIdentity::Inode(dev, ino)));
    }
    let name = named.path.file_name().unwrap_or_default().into();
    Ok(inode(parent_dir(&named.path))?.map(|dir| PathIdentity::Name(dir, name)))
}

/// Treatment of missing directories of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Directories {
    /// Directories must exist, as for a start of `rtvirtio-iod`.
    MustExist,
    /// `rtvirtio apply` makes them.
    AreMade,
}

/// Checks everything that a start checks: paths, groups, sockets, disks with their locks, formats,
/// sizes and overlaps. Changes nothing and keeps no lock. A running I/O domain of this
/// configuration is no error; the notes mention it.
///
/// # Errors
/// The first error of a start.
pub fn check(file: &File, config: &Path, directories: Directories) -> Result<Vec<String>, OpenError> {
    refuse_collisions(file, config)?;
    let mut notes = Vec::new();
    check_bindable(&file.control, true).map_err(control_error)?;
    socket_group::resolve(file.control_group.as_deref())
        .map_err(|source| OpenError::Path { what: "`control_group`".into(), source })?;
    let running = running_pid(file)?;
    if let Some(pid) = running {
        notes.push(format!("process {pid} answers on {}", file.control.display()));
    }
    let disks = file.devices.iter().flat_map(|d| &d.disks);
    let disks = disks.map(|d| (format!("disk \"{}\"", d.name), &d.socket, d.socket_group.as_deref()));
    let ports = file.networks.iter().flat_map(|n| &n.ports);
    let ports = ports.map(|p| (format!("port \"{}\"", p.name), &p.socket, p.socket_group.as_deref()));
    for (name, socket, group) in disks.chain(ports) {
        let failed = |source| OpenError::Path { what: format!("`socket` of {name}"), source };
        check_bindable(socket, directories == Directories::AreMade).map_err(failed)?;
        socket_group::resolve(group)
            .map_err(|source| OpenError::Path { what: format!("`socket_group` of {name}"), source })?;
        if let Some(listener) = listener_pid(socket).map_err(failed)? {
            let pid = listener.map_err(failed)?;
            if running != Some(pid) {
                let text = format!("{}: {}", socket.display(), listen::in_use(Some(pid)));
                return Err(failed(io::Error::new(io::ErrorKind::AddrInUse, text)));
            }
        }
    }
    // A running I/O domain has its taps: only one process can be attached to each.
    if running.is_none() {
        for network in &file.networks {
            for port in &network.ports {
                let opened = Uplink::open(network, port);
                opened.map_err(|source| OpenError::Uplink { port: port.name.clone(), source })?;
            }
        }
    }
    notes.extend(check_disk_files(file, running)?);
    notes.extend(doubts::warnings(file));
    Ok(notes)
}

fn control_error(source: io::Error) -> OpenError {
    OpenError::Path { what: "`control`".into(), source }
}

/// The process that listens on `control`.
fn running_pid(file: &File) -> Result<Option<u32>, OpenError> {
    let listener = listener_pid(&file.control).map_err(control_error)?;
    listener.transpose().map_err(control_error)
}

fn check_disk_files(file: &File, running: Option<u32>) -> Result<Vec<String>, OpenError> {
    let opened = OpenedDisks::open(file, take_locks(running), |_| true)?;
    let unlocked = opened.locks.iter().any(|lock| !lock.is_held());
    Ok(unlocked
        .then(|| "its disks are in use by that domain, and were not locked".to_owned())
        .into_iter()
        .collect())
}

/// Checks that a socket can be bound: the path has a valid length, and its directory is writable.
fn check_bindable(path: &Path, makes_directory: bool) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    SocketAddrUnix::new(path).map_err(|e| named(e.into()))?;
    let mut dir = parent_dir(path);
    loop {
        match std::fs::metadata(dir) {
            // The start creates the directory of `control`.
            Err(e) if e.kind() == io::ErrorKind::NotFound && makes_directory => dir = parent_dir(dir),
            Err(e) => return Err(io::Error::new(e.kind(), format!("{}: {e}", dir.display()))),
            Ok(_) => break,
        }
    }
    rustix::fs::access(dir, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{}: {e}", dir.display())))
}

/// The process that listens at a path; `None` when there is none. The inner error: a listener that
/// accepts no connection.
fn listener_pid(path: &Path) -> io::Result<Option<io::Result<u32>>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let address = SocketAddrUnix::new(path).map_err(|e| named(e.into()))?;
    match listen::probe(path, &address).map_err(named)? {
        SocketState::Absent | SocketState::Stale(_) => Ok(None),
        SocketState::Listening(connected) => Ok(Some(peer_pid(connected).map_err(named))),
        SocketState::NotASocket(kind) => Err(named(listen::not_a_socket(kind))),
    }
}

fn peer_pid(connected: Option<OwnedFd>) -> io::Result<u32> {
    let busy =
        || io::Error::new(io::ErrorKind::AddrInUse, "another process listens there and does not answer");
    listen::peer_pid(&connected.ok_or_else(busy)?)
}
