//! The client of the socket: one request, one answer.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest answer.
const LARGEST: u64 = 64 << 20;

/// Asks the service.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No service listens.
    #[error("no rtvirtiod answers on {socket}: {source}; start it with `systemctl start rtvirtiod`")]
    NotThere {
        /// The socket.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// It answered something else than an answer.
    #[error("rtvirtiod on {socket} did not answer as it should: {why}")]
    Answer {
        /// The socket.
        socket: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It refused.
    #[error("rtvirtiod: {why}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// Its reason.
        why: String,
    },
}

impl Client {
    /// Of a socket; nothing is asked yet.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Of a run directory, if a service listens there.
    #[must_use]
    pub fn find(run: &Path) -> Option<Self> {
        let socket = crate::service::socket(run);
        UnixStream::connect(&socket).is_ok().then(|| Self::new(socket))
    }

    /// Reads.
    ///
    /// # Errors
    /// When there is no answer, or it is no such value.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask("GET", path)
    }

    /// Asks for a change.
    ///
    /// # Errors
    /// As [`Client::get`]; [`ClientError::Refused`] with the reason.
    pub fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask("POST", path)
    }

    fn ask<T: DeserializeOwned>(&self, method: &str, path: &str) -> Result<T, ClientError> {
        let body = self.text(method, path)?;
        serde_json::from_str(&body).map_err(|e| self.wrong(&e))
    }

    /// The body of an answer.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn text(&self, method: &str, path: &str) -> Result<String, ClientError> {
        let failed = |source| ClientError::NotThere { socket: self.socket.clone(), source };
        let mut stream = UnixStream::connect(&self.socket).map_err(failed)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        // HTTP/1.0: the answer is not cut in pieces, and ends with the connection.
        let request = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let mut answer = Vec::new();
        stream.take(LARGEST).read_to_end(&mut answer).map_err(failed)?;
        let answer = String::from_utf8(answer).map_err(|e| self.wrong(&e))?;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| self.wrong(&"it has no head"))?;
        let status = head.split_ascii_whitespace().nth(1).and_then(|code| code.parse::<u16>().ok());
        match status {
            Some(200..300) => Ok(body.to_owned()),
            Some(status) => {
                let why: Option<String> = serde_json::from_str::<serde_json::Value>(body)
                    .ok()
                    .and_then(|v| Some(v.get("error")?.as_str()?.to_owned()));
                Err(ClientError::Refused { status, why: why.unwrap_or_else(|| body.to_owned()) })
            }
            None => Err(self.wrong(&"it has no status")),
        }
    }

    fn wrong(&self, why: &dyn std::fmt::Display) -> ClientError {
        ClientError::Answer { socket: self.socket.clone(), why: why.to_string() }
    }
}
