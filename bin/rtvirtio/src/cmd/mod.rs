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
pub mod revert;
pub mod simulate;
pub mod status;
pub mod threads;
pub mod tune;
pub mod verify;

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::Context;
use rtvirtio_apply::StateDir;
use rtvirtio_report::text::Style;
use serde::Serialize;

use crate::args::Global;
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

/// Writes a file of the state directory, or of a directory in it, so that a crash leaves the old or the new one. No symbolic link
/// is followed, and a directory that another user owns or can write to is refused.
pub fn write_state(dir: &Path, name: &str, content: &[u8]) -> anyhow::Result<()> {
    let path = dir.join(name);
    let dir = StateDir::open_or_create(dir)?;
    dir.replace(name, 0o644, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a result where the user wants it; a symbolic link there is followed. What is meant for the state directory goes the way
/// of [`write_state`].
pub fn write_result(path: &Path, content: &[u8], global: &Global) -> anyhow::Result<()> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(dir), Some(name)) if dir.starts_with(&global.state_dir) => {
            StateDir::open_or_create(&global.state_dir)?;
            write_state(dir, name, content)
        }
        _ => write_file(path, content),
    }
}

/// Writes a user's file so that a crash leaves the old or the new one. Where it is a symbolic link, what it leads to is written.
pub fn write_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let is_link = match path.symlink_metadata() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        looked => looked.with_context(failed)?.is_symlink(),
    };
    let target = if is_link { path.canonicalize().with_context(failed)? } else { path.to_owned() };
    let path = target.as_path();
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    rtvirtio_kernel::atomic_write(path, content).with_context(failed)?;
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

/// Whether a path exists. What cannot be told, as without permission, is an error and not absence.
pub fn is_there(path: &Path) -> anyhow::Result<bool> {
    path.try_exists().with_context(|| format!("cannot look at {}: run it with sudo?", path.display()))
}
