//! End of the process in bounded time: a device that completes nothing would hold it up for good.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use crate::confine::{Confine, Role};
use crate::log::write_line;
use crate::running::Running;

/// Limit for the end of the process.
#[derive(Debug)]
pub struct EndLimit {
    begin: SyncSender<()>,
}

impl EndLimit {
    /// Starts the thread that ends the process `limit` after [`Self::begin`], unless it has ended
    /// by itself before: requests that a device has not completed are left to it.
    pub fn start(running: Running, limit: Duration, confine: &Confine) -> io::Result<Self> {
        let (begin, begun) = sync_channel(1);
        let watch = move || {
            if begun.recv().is_ok() {
                std::thread::sleep(limit);
                lines(&running.unended(), limit).iter().for_each(write_line);
                // As asked for: a service manager must not start it again.
                std::process::exit(0);
            }
        };
        confine.spawn("iod-end", Role::Control, watch)?;
        Ok(Self { begin })
    }

    /// Begins the time.
    pub fn begin(&self) {
        // Fails only where the thread has ended, which it does with the process.
        let _ = self.begin.send(());
    }
}

fn lines(unended: &[String], limit: Duration) -> Vec<String> {
    let seconds = limit.as_secs();
    if unended.is_empty() {
        return vec![format!("an engine has not ended within {seconds} s: the process ends without it")];
    }
    let line = |what: &String| {
        format!(
            "{what}: requests at it have not ended within {seconds} s, and the process ends without them; whether they \
             were carried out is not known, and front ends that track them have them in flight at the next start"
        )
    };
    unended.iter().map(line).collect()
}
