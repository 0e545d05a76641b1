//! Reads and writes files in the guest: `guest-file-open`, `-read`, `-write`, `-flush`, `-close`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::json;

use super::{GuestAgent, SMALL_REPLY};
use crate::VmmError;

/// Bytes of file data in one message. In base64 that is 64 KiB on the channel; more is not faster,
/// and could make a slow guest exceed one command's time limit.
const CHUNK: usize = 48 * 1024;
/// Largest reply with a chunk in base64 and the JSON around it, in bytes.
const CHUNK_REPLY: usize = CHUNK / 3 * 4 + 1024;

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ReadReply {
    count: usize,
    buf_b64: String,
    eof: bool,
}

#[derive(Deserialize)]
struct WriteReply {
    count: usize,
}

impl GuestAgent {
    /// Reads a whole file, also one of sysfs or procfs, of at most `limit` bytes.
    ///
    /// # Errors
    /// The guest refuses (no such file), [`VmmError::TooLarge`], or an error of the connection.
    pub fn read_file(&mut self, path: &str, limit: usize) -> Result<Vec<u8>, VmmError> {
        let handle = self.open_file(path, "r")?;
        let data = self.read_all(handle, path, limit);
        let closed = self.close_file(handle);
        let data = data?;
        closed?;
        Ok(data)
    }

    /// Replaces a file's content. The agent writes through a buffer, so an error of the kernel (for
    /// a knob that refuses a value) comes with the flush; it is returned like any other.
    ///
    /// # Errors
    /// The guest refuses (no such directory, read-only, invalid value), or an error of the
    /// connection.
    pub fn write_file(&mut self, path: &str, data: &[u8]) -> Result<(), VmmError> {
        let handle = self.open_file(path, "w")?;
        let written = self.write_all(handle, path, data);
        let closed = self.close_file(handle);
        written?;
        closed
    }

    fn open_file(&mut self, path: &str, mode: &str) -> Result<i64, VmmError> {
        let arguments = json!({ "path": path, "mode": mode });
        self.call("guest-file-open", Some(&arguments), SMALL_REPLY).map_err(|e| about(path, e))
    }

    fn close_file(&mut self, handle: i64) -> Result<(), VmmError> {
        self.call::<IgnoredAny>("guest-file-close", Some(&json!({ "handle": handle })), SMALL_REPLY).map(drop)
    }

    fn read_all(&mut self, handle: i64, path: &str, limit: usize) -> Result<Vec<u8>, VmmError> {
        const OP: &str = "guest-file-read";
        let arguments = json!({ "handle": handle, "count": CHUNK });
        let mut data = Vec::new();
        loop {
            let reply: ReadReply =
                self.call(OP, Some(&arguments), CHUNK_REPLY).map_err(|e| about(path, e))?;
            let chunk = STANDARD.decode(&reply.buf_b64).map_err(|e| self.link.protocol(OP, e.to_string()))?;
            if chunk.len() != reply.count {
                let detail = format!("count is {}, but {} bytes came", reply.count, chunk.len());
                return Err(self.link.protocol(OP, detail));
            }
            if data.len() + chunk.len() > limit {
                return Err(VmmError::TooLarge {
                    peer: self.link.peer().into(),
                    operation: format!("{OP} {path}"),
                    limit,
                });
            }
            data.extend_from_slice(&chunk);
            // The agent's fread(3) returns less than asked for only at the end. So a short chunk
            // ends it too: a guest that sends one byte at a time, each just within the time limit,
            // must not block this client.
            if reply.eof || chunk.len() < CHUNK {
                return Ok(data);
            }
        }
    }

    fn write_all(&mut self, handle: i64, path: &str, data: &[u8]) -> Result<(), VmmError> {
        const OP: &str = "guest-file-write";
        let mut rest = data;
        while !rest.is_empty() {
            let chunk = &rest[..rest.len().min(CHUNK)];
            let arguments = json!({ "handle": handle, "buf-b64": STANDARD.encode(chunk) });
            let reply: WriteReply =
                self.call(OP, Some(&arguments), SMALL_REPLY).map_err(|e| about(path, e))?;
            // fwrite(3) writes all or fails; see `read_all` on short ones.
            if reply.count != chunk.len() {
                return Err(self
                    .link
                    .protocol(OP, format!("wrote {} of {} bytes", reply.count, chunk.len())));
            }
            rest = &rest[reply.count..];
        }
        self.call::<IgnoredAny>("guest-file-flush", Some(&json!({ "handle": handle })), SMALL_REPLY)
            .map(drop)
            .map_err(|e| about(path, e))
    }
}

/// Adds the guest's path to a refusal: the agent's own text does not always name it.
fn about(path: &str, error: VmmError) -> VmmError {
    match error {
        VmmError::Refused { peer, operation, class, desc } => {
            VmmError::Refused { peer, operation: format!("{operation} {path}"), class, desc }
        }
        other => other,
    }
}
