//! URLs of the form `http://HOST[:PORT]/PATH`.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _};

/// Longest URL accepted, which servers support at least (RFC 9110, section 4.1).
const MAX_URL: usize = 8000;

/// URL whose host was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    authority: String,
    path: String,
    address: SocketAddr,
}

/// Error of a URL that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// The text has another form.
    #[error("`{url}` is no address that can be asked: {why}; write http://HOST[:PORT]/PATH")]
    Form {
        /// Text that was given, shortened.
        url: String,
        why: &'static str,
    },
    /// The host name has no address.
    #[error("{url}: cannot look up its host: {source}")]
    Host {
        /// Text that was given.
        url: String,
        /// Error of the look-up.
        source: io::Error,
    },
}

impl Url {
    /// Parses a URL and looks up its host.
    ///
    /// # Errors
    /// [`UrlError`] for another form than `http://HOST[:PORT]/PATH`, or a host without an address.
    pub fn find(text: &str) -> Result<Self, UrlError> {
        let form = |why| UrlError::Form { url: text.chars().take(200).collect(), why };
        if text.len() > MAX_URL || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(form("it is too long, or holds white space"));
        }
        let Some(rest) = text.strip_prefix("http://") else {
            let why = if text.starts_with("https://") {
                "TLS is not spoken: ask a plain port, or say --load 'CMD' with a client that speaks it"
            } else {
                "it does not begin with http://"
            };
            return Err(form(why));
        };
        let (authority, path) = match rest.find(['/', '?', '#']) {
            Some(end) if rest[end..].starts_with('/') => rest.split_at(end),
            Some(_) => return Err(form("a path must begin with /")),
            None => (rest, "/"),
        };
        let path = path.split('#').next().unwrap_or("/");
        if authority.is_empty() || authority.contains('@') {
            return Err(form("it has no host, or a user's name in it"));
        }
        // A colon inside [::1] is no port.
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
        let with_port = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        let host = |source| UrlError::Host { url: text.to_owned(), source };
        let address = with_port
            .to_socket_addrs()
            .map_err(host)?
            .next()
            .ok_or_else(|| host(io::Error::from(io::ErrorKind::NotFound)))?;
        Ok(Self { authority: authority.to_owned(), path: path.to_owned(), address })
    }

    /// URL of a path on a port of this machine.
    #[must_use]
    pub fn local(port: u16, path: &str) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Self { authority: address.to_string(), path: path.to_owned(), address }
    }

    /// Address to connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Host and port as they were given.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Path, with the query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)
    }
}
