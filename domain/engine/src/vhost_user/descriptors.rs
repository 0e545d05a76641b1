//! Kick and call descriptors.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use crate::engine::Kick;
use crate::memory::Trust;

/// Kinds of descriptors that announce something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Eventfd,
    Stream,
}

/// Reasons for which a descriptor is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum DescriptorError {
    /// The kernel does not say what it is.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A descriptor that could block the engine, or stay readable and make it spin.
    #[error("{0} is no eventfd; sockets and pipes are accepted with `trust = true` for this disk or port")]
    NoEventfd(String),
    /// A descriptor of another kind, of a trusted front end.
    #[error("{0} is no eventfd, socket or pipe")]
    Other(String),
}

fn kind(file: &File, trust: Trust) -> Result<Kind, DescriptorError> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let text = link.display().to_string();
    let is_stream = ["socket:[", "pipe:["].iter().any(|kind| text.starts_with(kind));
    match trust {
        _ if text == "anon_inode:[eventfd]" => Ok(Kind::Eventfd),
        Trust::Full if is_stream => Ok(Kind::Stream),
        Trust::Full => Err(DescriptorError::Other(text)),
        Trust::None | Trust::HugePages => Err(DescriptorError::NoEventfd(text)),
    }
}

/// Accepts a kick descriptor.
pub(super) fn kick(file: Option<File>, trust: Trust) -> Result<Option<Kick>, DescriptorError> {
    let accept = |file| {
        Ok(match kind(&file, trust)? {
            Kind::Eventfd => Kick::from(file),
            Kind::Stream => Kick::stream(file),
        })
    };
    file.map(accept).transpose()
}

/// Accepts a call descriptor: 8 bytes are written to it, by io_uring.
pub(super) fn call(file: Option<File>, trust: Trust) -> Result<Option<File>, DescriptorError> {
    file.map(|file| kind(&file, trust).map(|_| file)).transpose()
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn descriptors() -> [File; 3] {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let eventfd = rustix::event::eventfd(0, flags).unwrap();
        let socket = OwnedFd::from(UnixStream::pair().unwrap().0);
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        [eventfd, socket, pipe].map(File::from)
    }

    #[test]
    fn sockets_and_pipes_are_of_trusted_front_ends_only() {
        for trust in [Trust::None, Trust::HugePages] {
            let [eventfd, socket, pipe] = descriptors();
            assert!(!kick(Some(eventfd), trust).unwrap().unwrap().fd().is_stream);
            for file in [socket, pipe] {
                let copy = file.try_clone().unwrap();
                let text = kick(Some(file), trust).unwrap_err().to_string();
                assert!(text.contains("is no eventfd") && text.contains("`trust = true`"), "{text}");
                assert!(matches!(call(Some(copy), trust), Err(DescriptorError::NoEventfd(_))));
            }
        }
        let [eventfd, socket, pipe] = descriptors();
        assert!(call(Some(eventfd), Trust::Full).unwrap().is_some());
        assert!(call(Some(socket.try_clone().unwrap()), Trust::Full).unwrap().is_some());
        for file in [socket, pipe] {
            assert!(kick(Some(file), Trust::Full).unwrap().unwrap().fd().is_stream);
        }
        // Always readable, of whatever front end.
        let endless = File::open("/dev/zero").unwrap();
        assert!(matches!(kick(Some(endless), Trust::Full), Err(DescriptorError::Other(_))));
        assert!(kick(None, Trust::None).unwrap().is_none());
    }
}
