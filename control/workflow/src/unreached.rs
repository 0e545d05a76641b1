//! Error for a VM's monitor that is not reached, with the remedy.

use std::io::{self, ErrorKind};
use std::path::Path;

use rtvirtio_vmm::VmmError;

use crate::error::{Error, Kind};

/// QEMU listens on its socket as long as it runs, and only its user and root may connect.
pub(crate) fn unreached(error: VmmError, socket: &Path) -> Error {
    let kind = match &error {
        VmmError::Connect { source, .. } => Some(io::Error::kind(source)),
        _ => None,
    };
    let socket = socket.display();
    match kind {
        Some(ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Error::new(
            Kind::NotRunning,
            format!("it does not run: no QEMU listens on {socket}: start it, or correct `qmp` of the spec"),
        ),
        Some(ErrorKind::PermissionDenied) => {
            Error::new(Kind::System, format!("its monitor {socket} is of another user: run it with sudo"))
        }
        _ => Error::from(error)
            .within("name the VM by `pid` or `cgroup` where its monitor is taken".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use rtvirtio_vmm::Qmp;

    use super::*;

    #[test]
    fn a_vm_that_is_off_is_told_from_one_that_may_not_be_asked() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let socket = dir.path().join("qmp");
        let asked = |path: &Path| Qmp::connect(path, Duration::from_secs(60)).err().unwrap();
        // Nothing there, then the socket of a QEMU that has ended.
        let none = unreached(asked(&socket), &socket);
        drop(UnixListener::bind(&socket).unwrap());
        let ended = unreached(asked(&socket), &socket);
        for off in [none, ended] {
            assert_eq!(off.kind(), Kind::NotRunning);
            assert!(off.to_string().starts_with("it does not run"), "{off}");
        }
        let denied = io::Error::from(ErrorKind::PermissionDenied);
        let denied = VmmError::Connect { peer: "QMP".to_owned(), source: denied };
        assert!(unreached(denied, &socket).to_string().contains("with sudo"));
        let other = io::Error::from(ErrorKind::WouldBlock);
        let other = VmmError::Connect { peer: "QMP".to_owned(), source: other };
        assert!(format!("{:#}", unreached(other, &socket)).contains("where its monitor is taken"));
    }
}
