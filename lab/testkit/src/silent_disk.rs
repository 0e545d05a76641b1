//! A file system whose server does not answer, as a network disk may not.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// FUSE file system without a server, mounted over a directory: whoever asks for a file there waits
/// in the kernel until this is dropped, and then gets an error. Needs root and `/dev/fuse`.
#[derive(Debug)]
pub struct SilentDisk {
    dir: PathBuf,
    /// The server's side, from which nothing is read.
    server: Option<File>,
}

impl SilentDisk {
    /// Mounts the file system; the directory must exist.
    #[must_use]
    pub fn mount(dir: &Path) -> Self {
        let server = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let options = CString::new(options).unwrap();
        mount("rtvirtio-test", dir, "fuse", MountFlags::empty(), options.as_c_str()).unwrap();
        Self { dir: dir.to_owned(), server: Some(server) }
    }
}

impl Drop for SilentDisk {
    fn drop(&mut self) {
        // Ends the requests that wait.
        self.server = None;
        let _ = unmount(&self.dir, UnmountFlags::DETACH);
    }
}
