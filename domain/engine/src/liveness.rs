//! Whether the engines answer.

use rtvirtio_sched::VmId;

use crate::engine::{Command, EngineGone, EngineHandle};
use crate::net::{NetCommand, NetHandle};

/// Handles of all engines, to ask whether they answer.
#[derive(Clone, Debug)]
pub struct Liveness {
    devices: Vec<EngineHandle>,
    networks: Vec<NetHandle>,
}

impl Liveness {
    pub(crate) fn new(devices: Vec<EngineHandle>, networks: Vec<NetHandle>) -> Self {
        Self { devices, networks }
    }

    /// Waits until every engine has answered a command; for ever, while one does not.
    pub fn wait(&self) -> Result<(), EngineGone> {
        // The cheapest question: the name in one place, without counters or histograms.
        for engine in &self.devices {
            engine.ask(|reply| Command::Member { vm: VmId(0), reply })?;
        }
        for engine in &self.networks {
            engine.ask(|reply| NetCommand::Member { port: VmId(0), reply })?;
        }
        Ok(())
    }
}
