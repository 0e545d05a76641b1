//! The power switch of a cluster's nodes. It is outside of them, so a node without a link is
//! switched off too.
//!
//! A fence agent on any node makes a file `NODE.XXXXXX` in a directory that all nodes share; when
//! no process of that node is left the switch makes `NODE.XXXXXX.done`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::ClusterError;
use super::node::Outlet;
use super::script;

/// Interval of checks for requests.
const PAUSE: Duration = Duration::from_millis(20);
/// Suffix of the answer to a request.
const DONE: &str = "done";

/// The fence agent. Options are lines `key=value` on standard input; `@POWER@` is the directory.
const AGENT: &str = r#"#!/bin/sh
action= node=
while IFS='=' read -r key value; do
  case $key in
  action) action=$value ;;
  nodename) node=$value ;;
  esac
done
case $action in
metadata)
  cat <<'XML'
<?xml version="1.0"?>
<resource-agent name="fence_lab" shortdesc="Power switch of the laboratory">
<longdesc>Switches a node of the laboratory off.</longdesc>
<parameters>
<parameter name="action" unique="0" required="1"><content type="string" default="off"/><shortdesc lang="en">What to do</shortdesc></parameter>
<parameter name="nodename" unique="0" required="0"><content type="string"/><shortdesc lang="en">The node</shortdesc></parameter>
</parameters>
<actions><action name="off"/><action name="status"/><action name="monitor"/><action name="metadata"/></actions>
</resource-agent>
XML
  ;;
monitor | status | start | stop | validate-all) test -d '@POWER@' ;;
off)
  request=$(mktemp "@POWER@/$node.XXXXXX") || exit 1
  tries=0
  until [ -e "$request.done" ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || exit 1
    sleep 0.1
  done
  ;;
*) exit 1 ;;
esac
"#;

/// State that the switch's thread shares with the cluster.
#[derive(Default)]
struct Shared {
    end: AtomicBool,
    outlets: Mutex<BTreeMap<String, Outlet>>,
    offs: Mutex<Vec<(String, Instant)>>,
}

/// The power switch. Its thread ends when this is dropped; the nodes stay as they are.
pub(super) struct Power {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Power {
    /// Starts the thread, with requests in `dir`, and writes the fence agent into `agents`.
    pub(super) fn start(dir: PathBuf, agents: &Path) -> Result<Self, ClusterError> {
        for path in [dir.as_path(), agents] {
            fs::create_dir_all(path).map_err(|e| ClusterError::io(path, e))?;
        }
        script(&agents.join("fence_lab"), &AGENT.replace("@POWER@", &dir.display().to_string()))?;
        let shared = Arc::new(Shared::default());
        let of = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !of.end.load(Ordering::Relaxed) {
                of.serve(&dir);
                std::thread::sleep(PAUSE);
            }
        });
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Connects a node; replaces a previous one of the same name.
    pub(super) fn connect(&self, node: &str, outlet: Outlet) {
        locked(&self.shared.outlets).insert(node.to_owned(), outlet);
    }

    /// Time of the last switch-off of a node on request: no process of it was left.
    pub(super) fn switched_off(&self, node: &str) -> Option<Instant> {
        locked(&self.shared.offs).iter().rev().find(|(name, _)| name == node).map(|(_, at)| *at)
    }
}

impl Drop for Power {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn serve(&self, dir: &Path) {
        for request in fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()) {
            let name = request.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let answer = dir.join(format!("{name}.{DONE}"));
            let Some((node, id)) = name.split_once('.') else { continue };
            if id.ends_with(DONE) || answer.exists() {
                continue;
            }
            // No answer for an unknown node, or one with processes left: the agent fails.
            let Some(outlet) = locked(&self.outlets).get(node).cloned() else { continue };
            if outlet.off() {
                locked(&self.offs).push((node.to_owned(), Instant::now()));
                let _ = fs::write(answer, "");
            }
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
