//! What a process and the kernel hold for it.

/// Resources of the kernel and of the process.
#[derive(Clone, Copy, Debug)]
pub struct Resources {
    /// io_uring requests of this machine; `None` where the kernel does not show them.
    pub requests: Option<i64>,
    /// Open files of this machine.
    pub files: i64,
    pub descriptors: i64,
    pub resident_kib: i64,
    /// Part of it that is neither a file nor shared.
    pub anonymous_kib: i64,
    pub threads: i64,
}

impl Resources {
    pub fn of(pid: u32) -> Self {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
        // Readable by root only.
        let slabs = std::fs::read_to_string("/proc/slabinfo").ok();
        let requests = slabs.and_then(|s| {
            let line = s.lines().find(|l| l.starts_with("io_kiocb "))?.to_owned();
            line.split_ascii_whitespace().nth(1)?.parse().ok()
        });
        let status = text(&format!("/proc/{pid}/status"));
        let field = |name: &str| -> i64 {
            let line = status.lines().find(|l| l.starts_with(name)).expect("a field");
            line.split_ascii_whitespace().nth(1).and_then(|v| v.parse().ok()).expect("a number")
        };
        Self {
            requests,
            files: text("/proc/sys/fs/file-nr")
                .split_ascii_whitespace()
                .next()
                .and_then(|v| v.parse().ok())
                .expect("a number"),
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors").count() as i64,
            resident_kib: field("VmRSS:"),
            anonymous_kib: field("RssAnon:"),
            threads: field("Threads:"),
        }
    }
}
