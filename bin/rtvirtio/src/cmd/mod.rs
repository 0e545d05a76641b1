//! One module per command.

pub mod apply;
pub mod bench;
pub mod check;
pub mod demo;
pub mod domain;
pub mod iod;
pub mod keep;
pub mod lab;
pub mod plan;
pub mod profile;
pub mod profile_cpu;
pub mod simulate;
pub mod threads;
pub mod tune;
pub mod verify;

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::Context;
use rtvirtio_report::text::Style;
use serde::Serialize;

use crate::ui::Ui;

/// How text is drawn on standard output.
pub fn style() -> Style {
    let tty = std::io::stdout().is_terminal();
    let width = if tty { terminal_width() } else { 100 };
    let utf8 = ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
        .is_none_or(|v| v.to_ascii_lowercase().contains("utf"));
    Style { colour: tty && std::env::var_os("NO_COLOR").is_none(), ascii: !utf8, width }
}

fn terminal_width() -> usize {
    rustix::termios::tcgetwinsize(std::io::stdout())
        .map_or(100, |size| usize::from(size.ws_col).clamp(80, 160))
}

/// Prints the result: JSON when asked, else the text.
pub fn show<T: Serialize>(ui: &Ui, value: &T, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let out = if ui.json { serde_json::to_string_pretty(value)? + "\n" } else { text() };
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(out.as_bytes()).and_then(|()| stdout.flush()) {
        // `rtvirtio plan | head` is not an error.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Writes a result file so that a crash leaves the old or the new one.
pub fn write_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut file =
        tempfile::NamedTempFile::new_in(dir).with_context(|| format!("cannot write in {}", dir.display()))?;
    file.write_all(content).with_context(|| format!("cannot write {}", path.display()))?;
    file.as_file().sync_all().with_context(|| format!("cannot write {}", path.display()))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(mode)?;
    file.persist(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

/// Fails in one line when not root.
pub fn need_root(what: &str) -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        Ok(())
    } else {
        anyhow::bail!("{what} needs root: run it with sudo")
    }
}
