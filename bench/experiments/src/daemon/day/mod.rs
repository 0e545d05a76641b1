//! A scripted day of eight hours: the same VMs, loads and faults once under a plan that `rtvirtio
//! apply` has put in force, and once under the service.

mod run;
mod setup;

use crate::experiment::Experiment;
use std::path::Path;
use std::time::Duration;

use rtvirtio_measure::HostFacts;
use rtvirtio_report::svg::{Axis, Series, Spread};
use serde::{Deserialize, Serialize};

pub use run::{DayOptions, measure};

use crate::claims::Claim;
use crate::page::xy::{axis, plot, table};
use crate::page::{Plot, Section};
use crate::report::{ExperimentReport, read};

/// File name of the picture.
const PICTURE: &str = "daemon-day.svg";

/// Fault at the beginning of an hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// No fault: load, device and settings are as declared.
    Nothing,
    /// The least critical VM, which the plan limits, is restarted in a new cgroup, as libvirt does.
    Restart,
    /// The most critical VM gets another I/O thread.
    Thread,
    /// A tool removes the limit of the least critical VM, not through the service.
    Limit,
    /// A neighbour sends a multiple of its declared rate.
    Flood,
    /// The device takes twice as long for each request.
    Slow,
    /// The fault of the hour before ends.
    Over,
}

impl Fault {
    /// Description for pages and reports.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Nothing => "as declared",
            Self::Restart => "a VM is started again",
            Self::Thread => "a thread is added",
            Self::Limit => "a limit is taken away by hand",
            Self::Flood => "a neighbour floods",
            Self::Slow => "the device slows by half",
            Self::Over => "as declared again",
        }
    }
}

/// Faults, one for each hour.
pub const DAY: [Fault; 8] = [
    Fault::Nothing,
    Fault::Thread,
    Fault::Flood,
    Fault::Over,
    Fault::Slow,
    Fault::Over,
    Fault::Limit,
    Fault::Restart,
];

/// Verdicts of one measured window of an hour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Hour, an index of [`DAY`].
    pub hour: usize,
    /// End of the window, s from the beginning of the day.
    pub at_s: f64,
    /// Targets shown to be missed.
    pub missed: usize,
    /// Targets shown to hold.
    pub met: usize,
    /// Targets shown neither way.
    pub unproven: usize,
    /// p99 of the most critical VM's task, in ms.
    pub p99_ms: f64,
}

/// Time from a fault to its correction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reaction {
    /// Hour of the fault, an index of [`DAY`].
    pub hour: usize,
    /// Until the settings were correct again, s; `None` where they were not within the time limit.
    pub set_s: Option<f64>,
    /// Until the end of the first window after `set_s` in which no target was missed.
    pub verified_s: Option<f64>,
}

/// Event in the service's history.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Said {
    /// Time of the event, s from the beginning of the day.
    pub at_s: f64,
    /// Text of the event, after the name of its VM.
    pub text: String,
}

/// The day once, under a static plan or under the service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Course {
    /// Whether under the service; else under a static plan.
    pub service: bool,
    /// The windows, in order.
    pub windows: Vec<Window>,
    /// Reactions to the faults that need one.
    pub reactions: Vec<Reaction>,
    /// Events of the service; empty under a static plan.
    pub said: Vec<Said>,
}

impl Course {
    fn missed(&self) -> usize {
        self.windows.iter().map(|w| w.missed).sum()
    }

    fn targets(&self) -> usize {
        self.windows.iter().map(|w| w.missed + w.met + w.unproven).sum()
    }

    fn reaction(&self, to: Fault) -> Option<&Reaction> {
        self.reactions.iter().find(|reaction| DAY.get(reaction.hour) == Some(&to))
    }
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DayData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Length of a window, s.
    pub window_s: f64,
    /// Under a static plan, and under the service.
    pub courses: Vec<Course>,
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &DayData) -> Vec<Claim> {
    let mut out = Vec::new();
    for (service, id, what) in [
        (false, "daemon.day.missed_static", "targets missed in a window of the scripted day, static plan"),
        (true, "daemon.day.missed", "the same under the service"),
    ] {
        if let Some(course) = data.courses.iter().find(|c| c.service == service) {
            out.push(Claim::new(id, what, course.missed() as f64, "targets", course.targets()));
        }
    }
    let courses = data.courses.iter().filter(|c| c.service);
    let to = [Fault::Flood, Fault::Slow];
    let reactions: Vec<f64> =
        courses.flat_map(|c| to.iter().filter_map(|to| c.reaction(*to)?.verified_s)).collect();
    out.push(Claim::new(
        "daemon.day.react_s",
        "from a change of load or of the device to the end of the first window without a miss, after the new plan where one was made, the longest",
        reactions.iter().copied().fold(0.0, f64::max),
        "s",
        reactions.len(),
    ));
    out
}

fn picture(data: &DayData) -> Plot {
    let series = |(index, course): (usize, &Course)| Series {
        name: if course.service { "the service" } else { "a static plan" }.to_owned(),
        index,
        dashed: !course.service,
        points: course
            .windows
            .iter()
            .map(|w| {
                let minutes = w.at_s / 60.0;
                let hour = DAY.get(w.hour).map_or("", |mishap| mishap.description());
                (minutes, w.p99_ms, format!("{minutes:.1} min, {hour}: {:.1} ms", w.p99_ms))
            })
            .collect(),
    };
    let y = Axis { format: |ms| format!("{ms} ms"), ..axis("p99 of the controller's reads", Spread::Log) };
    let x = axis("minutes", Spread::Linear);
    let limit = Some((setup::TARGET_MS as f64, "target".to_owned()));
    let all = data.courses.iter().enumerate().map(series).collect();
    plot("A scripted day", x, y, all, limit)
}

/// The picture of a saved result, with its file name.
pub fn svg(path: &Path) -> anyhow::Result<(&'static str, String)> {
    Ok((PICTURE, picture(&read(path)?).standalone_svg()))
}

impl Experiment for DayData {
    const FORM: &str = "rtvirtio-daemon-day/1";
    const FILE: &str = "daemon-day.json";
    const TITLE: &str = "rtvirtio: a day of the service";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let find = |service: bool| self.courses.iter().find(|c| c.service == service);
        let of = |course: Option<&Course>, hour: usize| {
            let Some(course) = course else { return ["-".to_owned(), "-".to_owned()] };
            let windows = || course.windows.iter().filter(move |w| w.hour == hour);
            let missed: usize = windows().map(|w| w.missed).sum();
            let all: usize = windows().map(|w| w.missed + w.met + w.unproven).sum();
            let worst = windows().map(|w| w.p99_ms).fold(0.0, f64::max);
            [format!("{missed} of {all}"), format!("{worst:.1}")]
        };
        let seconds = |seconds: Option<f64>| seconds.map_or("-".to_owned(), |s| format!("{s:.1}"));
        let row = |(hour, mishap): (usize, &Fault)| {
            let reaction = find(true).and_then(|c| c.reactions.iter().find(|r| r.hour == hour));
            let reaction = [reaction.and_then(|r| r.set_s), reaction.and_then(|r| r.verified_s)].map(seconds);
            [
                vec![mishap.description().to_owned()],
                of(find(false), hour).into(),
                of(find(true), hour).into(),
                reaction.into(),
            ]
            .concat()
        };
        let head = [
            "hour",
            "static: missed",
            "worst p99, ms",
            "service: missed",
            "worst p99, ms",
            "set after, s",
            "verified after, s",
        ];
        let lead = format!(
            "{}; {}. Three emulated guests on an emulated eMMC; windows of {:.0} s. A controller reads 4 KiB, its p99 is to be below {} ms; a historian reads \
                 64 KiB, and more than it declares in the flood; a batch VM reads as fast as it can.",
            self.host.device,
            self.command,
            self.window_s,
            setup::TARGET_MS
        );
        let section = Section {
            title: "A scripted day".to_owned(),
            plots: vec![("p99 of the controller's reads".to_owned(), picture(self))],
            tables: vec![table("By hour", &head, DAY.iter().enumerate().map(row).collect())],
            ..Section::default()
        };
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section])
    }
}

/// A time in seconds, to the millisecond.
fn rounded(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    fn course(service: bool, missed: usize, verified: Option<f64>) -> Course {
        let window = |hour| Window {
            hour,
            at_s: 20.0 * hour as f64,
            missed,
            met: 2 - missed,
            unproven: 0,
            p99_ms: 3.0,
        };
        let reaction =
            |hour| Reaction { hour, set_s: verified, verified_s: verified.map(|s| s + hour as f64) };
        Course {
            service,
            windows: (0..DAY.len()).map(window).collect(),
            reactions: [2, 4].map(reaction).into(),
            said: Vec::new(),
        }
    }

    #[test]
    fn the_longest_reaction_of_the_service_counts() {
        let data = DayData {
            schema: DayData::SCHEMA.to_owned(),
            host: HostFacts::default(),
            command: String::new(),
            generated: String::new(),
            window_s: 20.0,
            courses: vec![course(false, 1, Some(1_000.0)), course(true, 0, Some(30.0))],
        };
        let claims = claims(&data);
        let of = |id: &str| claims.iter().find(|c| c.id == id).map(|c| (c.value, c.n)).unwrap();
        assert_eq!(of("daemon.day.missed_static"), (8.0, 16));
        assert_eq!(of("daemon.day.missed"), (0.0, 16));
        assert_eq!(of("daemon.day.react_s"), (34.0, 2));
    }
}
