//! Files named by the user.

use std::path::Path;

use rtvirtio_apply::StateDir;
use rtvirtio_workflow::{write_file, write_state};

use crate::Global;

/// Writes a result to the path that the user gave; a symbolic link there is followed. Paths in the
/// state directory are written by [`write_state`].
pub fn write_result(path: &Path, content: &[u8], global: &Global) -> anyhow::Result<()> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(dir), Some(name)) if dir.starts_with(&global.state_dir) => {
            StateDir::open_or_create(&global.state_dir)?;
            Ok(write_state(dir, name, content)?)
        }
        _ => Ok(write_file(path, content)?),
    }
}
