//! The group that may connect to a socket.

use std::io;

/// The id of a group by name or number, if this process may give a socket to it.
///
/// # Errors
/// An unknown group, or one that this process is no member of.
pub fn resolve(name: Option<&str>) -> io::Result<Option<u32>> {
    let Some(name) = name else { return Ok(None) };
    let id = match name.parse() {
        Ok(id) => id,
        Err(_) => id_of(name)?,
    };
    let ours = || rustix::process::getgroups().is_ok_and(|all| all.iter().any(|g| g.as_raw() == id));
    let may = rustix::process::geteuid().is_root() || rustix::process::getegid().as_raw() == id || ours();
    if may {
        return Ok(Some(id));
    }
    let text = format!("this user is not in group \"{name}\", and only root may give a socket to it");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

fn id_of(name: &str) -> io::Result<u32> {
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("there is no group \"{name}\""));
    let name = std::ffi::CString::new(name).map_err(|_| unknown())?;
    // Large groups need more than libc's suggested size.
    let mut buffer = vec![0_u8; 1 << 20];
    // SAFETY: all zeroes is a value of this plain structure of numbers and pointers.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to memory that outlives the call, and the buffer's length is its
    // own.
    let e = unsafe {
        libc::getgrnam_r(name.as_ptr(), &mut entry, buffer.as_mut_ptr().cast(), buffer.len(), &mut found)
    };
    match (e, found.is_null()) {
        (0, false) => Ok(entry.gr_gid),
        (0, true) => Err(unknown()),
        (e, _) => Err(io::Error::from_raw_os_error(e)),
    }
}
