//! Parts of the experiment, measured together or separately.

use std::collections::BTreeMap;

use rtvirtio_daemon::word;
use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use super::NetData;

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Contracts in virtual time.
    Simulated,
    /// Round trips of the victim, idle and while its neighbour is flooded.
    Flood,
    /// Round trips through a slow link that the neighbour fills.
    Uplink,
    /// Round trips while another guest attacks.
    Hostile,
    /// Kills of the I/O domain.
    Crash,
    /// Frames per second of one port, alone and of 64.
    Frames,
    /// TCP transfer of a guest.
    Tcp,
    /// Pings as in the paper.
    Ping,
    /// Sampled values to a disk and back.
    Sv,
    /// A polling I/O domain next to OVS-DPDK.
    Polling,
    /// Requests to a web server while its neighbour sends without end.
    Web,
}

impl Part {
    /// All parts, in the order of the options.
    pub const ALL: [Self; 11] = [
        Self::Simulated,
        Self::Flood,
        Self::Uplink,
        Self::Hostile,
        Self::Crash,
        Self::Frames,
        Self::Tcp,
        Self::Ping,
        Self::Sv,
        Self::Polling,
        Self::Web,
    ];
    /// Parts in a file that does not say when each was measured.
    const UNNAMED: [Self; 7] =
        [Self::Simulated, Self::Flood, Self::Uplink, Self::Hostile, Self::Crash, Self::Frames, Self::Tcp];

    /// Name in result files and as an option.
    #[must_use]
    pub fn name(self) -> String {
        word(&self)
    }

    pub(super) fn has_guests(self) -> bool {
        !matches!(self, Self::Simulated | Self::Frames | Self::Web)
    }

    /// Whether the part compares guests on taps with guests on the I/O domain.
    pub(super) fn is_of_pair(self) -> bool {
        self.has_guests() && !matches!(self, Self::Sv | Self::Polling)
    }
}

/// Host, command and date of a part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartFacts {
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
}

impl NetData {
    /// Host, command and date of each part.
    #[must_use]
    pub fn facts(&self) -> BTreeMap<Part, PartFacts> {
        if !self.parts.is_empty() {
            return self.parts.clone();
        }
        Part::UNNAMED.map(|part| (part, self.facts_of_run())).into()
    }

    /// Host, command and date of the latest measurement.
    fn facts_of_run(&self) -> PartFacts {
        let (host, command, generated) = (self.host.clone(), self.command.clone(), self.generated.clone());
        PartFacts { host, command, generated }
    }

    /// Records the latest measurement for these parts.
    pub(super) fn note_facts<'a>(&mut self, parts: impl IntoIterator<Item = &'a Part>) {
        let facts = self.facts_of_run();
        self.parts.extend(parts.into_iter().map(|part| (*part, facts.clone())));
    }

    /// Replaces the parts that another result holds; the other parts stay as they are.
    pub fn merge(&mut self, new: Self) {
        let parts = new.facts();
        self.parts = self.facts();
        self.parts.extend(parts.clone());
        (self.host, self.command, self.generated) = (new.host, new.command, new.generated);
        for part in parts.into_keys() {
            match part {
                Part::Simulated => self.simulated = new.simulated,
                Part::Flood => self.replace_paths(&new.paths, false),
                Part::Hostile => self.replace_paths(&new.paths, true),
                Part::Uplink => {
                    self.uplinks.clone_from(&new.uplinks);
                    self.promises.clone_from(&new.promises);
                }
                Part::Crash => self.crashes = new.crashes.clone(),
                Part::Frames => {
                    self.frames_one_port.clone_from(&new.frames_one_port);
                    self.frames_of_many.clone_from(&new.frames_of_many);
                    self.floods.clone_from(&new.floods);
                }
                Part::Tcp => {
                    self.tcp.clone_from(&new.tcp);
                    self.tcp_cut.clone_from(&new.tcp_cut);
                }
                Part::Ping => self.pings.clone_from(&new.pings),
                Part::Sv => self.sv.clone_from(&new.sv),
                Part::Polling => self.polling.clone_from(&new.polling),
                Part::Web => self.web.clone_from(&new.web),
            }
        }
    }

    fn replace_paths(&mut self, new: &[super::PathData], attacked: bool) {
        let is_of = |path: &super::PathData| (path.situation == super::Situation::Attack) == attacked;
        self.paths.retain(|path| !is_of(path));
        self.paths.extend(new.iter().filter(|path| is_of(path)).cloned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::{PathData, Situation, SvData, claims};

    fn data(command: &str, situations: &[Situation]) -> NetData {
        let path = |situation: &Situation| PathData {
            domain: true,
            situation: *situation,
            tails: crate::net::Tails { n: 100, p50: 7, ..Default::default() },
            flood: None,
            attacks: None,
            cpus: 0.1,
        };
        NetData {
            paths: situations.iter().map(path).collect(),
            ..NetData::new(HostFacts::default(), command.to_owned(), command.to_owned())
        }
    }

    /// A part that is measured later replaces its own values alone, and says when.
    #[test]
    fn a_part_is_merged_into_a_file_of_the_others() {
        let mut old = data("first", &[Situation::Idle, Situation::Flood, Situation::Attack]);
        old.frames_one_port = vec![1.0];
        let mut new = data("later", &[Situation::Attack, Situation::Attack]);
        let run = crate::net::SvRun { flooded: true, contract: true, n: 40, p999: 9, ..Default::default() };
        new.sv = Some(SvData { target_ns: rtvirtio_units::Nanos(10), runs: vec![run] });
        new.note_facts(&[Part::Hostile, Part::Sv]);
        old.merge(new);
        let of = |situation| old.paths.iter().filter(|path| path.situation == situation).count();
        assert_eq!([Situation::Idle, Situation::Flood, Situation::Attack].map(of), [1, 1, 2]);
        assert_eq!(old.frames_one_port, [1.0]);
        let facts = old.facts();
        assert_eq!(facts.len(), 8);
        assert_eq!(
            (facts[&Part::Sv].command.as_str(), facts[&Part::Hostile].command.as_str()),
            ("later", "later")
        );
        assert_eq!(facts[&Part::Flood].generated, "first");
        let claims = claims(&old);
        let n = |id: &str| claims.iter().find(|claim| claim.id == id).map(|claim| claim.n);
        assert_eq!((n("net.sv.lost"), n("net.hostile.lost"), n("net.kpps")), (Some(40), Some(200), Some(1)));
        assert_eq!(n("net.ping.mean_over_idle"), None, "what is not measured claims nothing");
        let again: NetData = serde_json::from_str(&serde_json::to_string(&old).unwrap()).unwrap();
        assert_eq!(again, old);
    }
}
