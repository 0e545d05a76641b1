//! Round trips of a victim over time, before, during and after its neighbour's load at full speed
//! through a slow link: on QEMU's taps, with a tuned HTB, on OVS-DPDK where it is installed, and on
//! the I/O domain.

use crate::experiment::Experiment;
use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_measure::HostFacts;
use rtvirtio_report::svg::{Axis, Series, Spread};
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use super::ovs;
use super::probe::{RoundTrips, round_trips};
use super::test_bed::{BedOptions, GUESTS, HOST, LINK, NetTestBed, System, Uplink};
use crate::claims::Claim;
use crate::guest::facts;
use crate::page::xy::{axis, plot, table};
use crate::page::{Plot, Section};
use crate::report::{ExperimentReport, read};
use crate::saved::Saved as _;
use crate::stats::rank::nearest_rank;

/// File name of the picture.
const PICTURE: &str = "net-timeline.svg";
/// Period of the victim's requests.
const PERIOD: Duration = Duration::from_millis(1);
/// Start and length of the neighbour's load, and length of the whole measurement.
const BEGIN: Duration = Duration::from_secs(3);
const FLOOD: Duration = Duration::from_secs(5);
const WATCHED: Duration = Duration::from_secs(12);
/// Length of a step of the series.
const STEP: Duration = Duration::from_millis(200);

/// Round trips of one system over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Course {
    /// Network of the guests, and the queueing discipline.
    pub system: String,
    /// Median and longest round trip of each step, in us; `None` where none was answered.
    pub steps: Vec<Option<[u32; 2]>>,
    /// Rate of the link in each step, Mbit/s.
    pub link: Vec<u16>,
    /// Requests without an answer.
    pub lost: u64,
    /// Requests, lost ones included.
    pub n: u64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimelineData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Measured systems, in the order of `SYSTEMS`.
    pub courses: Vec<Course>,
    /// Version of OVS-DPDK, or the reason why it is missing; empty where it was not measured.
    #[serde(default)]
    pub peer: String,
}

/// The systems in the order of the picture, each with its queues.
const SYSTEMS: [(System, &[(&str, Uplink)]); 3] = [
    (System::Tap, &[("taps", Uplink::Fifo), ("taps, HTB", Uplink::Htb)]),
    (System::Dpdk, &[("OVS-DPDK", Uplink::Fifo)]),
    (System::Domain, &[("I/O domain", Uplink::Fifo)]),
];

/// Measures each system once, one after the other: a switch that polls would disturb the others.
/// The result says so where OVS-DPDK is not installed.
pub fn measure_timeline(cap: u32, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<TimelineData> {
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    let (has_dpdk, peer) = match ovs::find() {
        Ok((_, version)) => (true, version),
        Err(why) => {
            progress.warn(&format!("skipped, OVS-DPDK over time: {why}"));
            (false, why)
        }
    };
    let mut data = TimelineData {
        schema: TimelineData::SCHEMA.to_owned(),
        host: HostFacts::default(),
        command: "rtvirtio-bench net --only timeline".to_owned(),
        generated: generated(),
        courses: Vec::new(),
        peer,
    };
    for (system, uplinks) in SYSTEMS {
        if system == System::Dpdk && !has_dpdk {
            continue;
        }
        progress.step(&format!("booting two guests: {}", system.name()));
        let options = BedOptions { cap, ..BedOptions::default() };
        let mut bed = NetTestBed::new(system, (&image, accel), options, None, progress)?;
        data.host = facts(&mut bed.guests[0], accel, format!("veth, {} Mbit/s by tbf", LINK / 1e6))?;
        for (name, uplink) in uplinks {
            progress.pause(Duration::from_secs(1))?;
            data.courses.push(course(name, *uplink, &mut bed)?);
        }
    }
    Ok(data)
}

fn course(name: &str, uplink: Uplink, bed: &mut NetTestBed) -> anyhow::Result<Course> {
    bed.set_uplink(uplink)?;
    let sink = bed.sink()?;
    bed.send_later(BEGIN, FLOOD)?;
    let count = (WATCHED.as_millis() / PERIOD.as_millis()) as u32;
    let (trips, link) = std::thread::scope(|scope| -> anyhow::Result<(RoundTrips, Vec<u16>)> {
        let namespace = &bed.namespace;
        let probing = scope.spawn(move || round_trips(namespace, HOST, GUESTS[0], count, PERIOD));
        let (begin, mut before, mut link) = (Instant::now(), bed.sent_bytes()?, Vec::new());
        for step in 1..=steps() {
            std::thread::sleep((STEP * step as u32).saturating_sub(begin.elapsed()));
            let bytes = bed.sent_bytes()?;
            link.push(((bytes - before) as f64 * 8.0 / STEP.as_secs_f64() / 1e6).round() as u16);
            before = bytes;
        }
        let trips = probing.join().map_err(|_| anyhow::anyhow!("the probe: a defect"))??;
        Ok((trips, link))
    })?;
    drop(sink);
    bed.set_uplink(Uplink::Free)?;
    let n = trips.ns.len() as u64 + trips.lost;
    Ok(Course { system: name.to_owned(), steps: in_steps(&trips), link, lost: trips.lost, n })
}

fn steps() -> usize {
    (WATCHED.as_millis() / STEP.as_millis()) as usize
}

/// Median and longest round trip of each step, by the time at which the request was sent.
fn in_steps(trips: &RoundTrips) -> Vec<Option<[u32; 2]>> {
    let mut all = vec![Vec::new(); steps()];
    for (at, took) in trips.sent.iter().zip(&trips.ns) {
        if let Some(step) = all.get_mut((*at / STEP.as_nanos() as u64) as usize) {
            step.push(*took);
        }
    }
    let us = |ns: u64| (ns / 1_000).min(u32::MAX.into()) as u32;
    let of = |mut step: Vec<u64>| {
        step.sort_unstable();
        Some([us(nearest_rank(&step, 0.5)?), us(*step.last()?)])
    };
    all.into_iter().map(of).collect()
}

/// The claims of a result: none; the experiment shows, and `rtvirtio-bench net` measures.
fn claims(data: &TimelineData) -> Vec<Claim> {
    let lost = data.courses.iter().map(|course| course.lost as f64);
    let n = data.courses.iter().map(|course| course.n as usize).sum();
    vec![Claim::new("net.timeline.lost", "requests of the victim lost over time", lost.sum(), "requests", n)]
}

/// Systems missing in the picture, and the reason; empty without any.
fn missing(data: &TimelineData) -> String {
    let is_there = data.courses.iter().any(|course| course.system == System::Dpdk.name());
    match data.peer.as_str() {
        _ if is_there => String::new(),
        "" => "without OVS-DPDK, which was not measured".to_owned(),
        why => format!("without OVS-DPDK: {why}"),
    }
}

/// Caption of the picture.
fn caption(data: &TimelineData) -> String {
    match missing(data).as_str() {
        "" => format!("longest round trips; OVS-DPDK is {}", data.peer),
        missing => format!("longest round trips, {missing}"),
    }
}

fn picture(data: &TimelineData) -> Plot {
    let series = |(index, course): (usize, &Course)| Series {
        name: course.system.clone(),
        index,
        dashed: false,
        points: course
            .steps
            .iter()
            .enumerate()
            .filter_map(|(i, step)| {
                let ([_, longest], at) = ((*step)?, (i as f64 + 0.5) * STEP.as_secs_f64());
                Some((at, f64::from(longest) / 1e3, format!("{at:.1} s: {:.2} ms", f64::from(longest) / 1e3)))
            })
            .collect(),
    };
    let y = Axis { format: |ms| format!("{ms} ms"), ..axis("longest round trip in 0.2 s", Spread::Log) };
    let x = axis("s; the neighbour sends TCP from about 3 s to 8 s", Spread::Linear);
    let title = match missing(data).as_str() {
        "" => "Round trips of a victim over time".to_owned(),
        missing => format!("Round trips of a victim over time, {missing}"),
    };
    let mut picture = plot(&title, x, y, data.courses.iter().enumerate().map(series).collect(), None);
    if let Plot::Xy(xy) = &mut picture {
        xy.heading = missing(data);
    }
    picture
}

/// The picture of a saved result, with its file name.
pub fn svg(path: &Path) -> anyhow::Result<(&'static str, String)> {
    Ok((PICTURE, picture(&read(path)?).standalone_svg()))
}

impl Experiment for TimelineData {
    const FORM: &str = "rtvirtio-net-timeline/1";
    const FILE: &str = "net-timeline.json";
    const TITLE: &str = "rtvirtio: networks of the I/O domain";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let row = |course: &Course| {
            let longest = |from: f64, to: f64| {
                let part = |second: f64| (second / STEP.as_secs_f64()) as usize;
                let steps = course.steps.get(part(from)..part(to)).unwrap_or_default();
                let longest = steps.iter().flatten().map(|step| step[1]).max();
                longest.map_or("-".to_owned(), |us| format!("{:.1}", f64::from(us) / 1e3))
            };
            let most = course.link.iter().max().copied().unwrap_or(0);
            let counts = [course.n.to_string(), course.lost.to_string(), most.to_string()];
            [
                vec![course.system.clone(), longest(0.0, 3.0), longest(3.0, 9.0), longest(10.0, 12.0)],
                counts.to_vec(),
            ]
            .concat()
        };
        let head = ["", "before, ms", "during, ms", "after, ms", "n", "lost", "most Mbit/s"];
        let section = Section {
            title: "A flood begins and ends".to_owned(),
            plots: vec![(caption(self), picture(self))],
            tables: vec![table("longest round trips", &head, self.courses.iter().map(row).collect())],
            ..Section::default()
        };
        let lead = format!("{}; {}.", self.host.device, self.command);
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_fall_into_their_steps() {
        let step = STEP.as_nanos() as u64;
        let trips =
            RoundTrips { ns: vec![3_000, 1_000, 2_000, 9_000], sent: vec![0, 5, step - 1, step], lost: 0 };
        let steps = in_steps(&trips);
        assert_eq!(steps[..3], [Some([2, 3]), Some([9, 9]), None]);
        assert_eq!(steps.len(), 60);
    }

    #[test]
    fn the_caption_says_what_is_not_measured() {
        let course = |system: &str| Course {
            system: system.to_owned(),
            steps: vec![Some([100, 200])],
            link: vec![1],
            lost: 0,
            n: 1,
        };
        let mut data = TimelineData {
            schema: TimelineData::SCHEMA.to_owned(),
            host: HostFacts::default(),
            command: String::new(),
            generated: String::new(),
            courses: vec![course("taps"), course("I/O domain")],
            peer: String::new(),
        };
        assert!(caption(&data).contains("not measured"), "a file of an earlier version");
        data.peer = "it is not installed".to_owned();
        assert!(caption(&data).ends_with("without OVS-DPDK: it is not installed"), "{}", caption(&data));
        assert!(picture(&data).standalone_svg().contains("it is not installed"));
        data.courses.push(course(System::Dpdk.name()));
        data.peer = "ovs-vswitchd 3.1".to_owned();
        assert!(caption(&data).ends_with("OVS-DPDK is ovs-vswitchd 3.1"));
        assert!(!picture(&data).standalone_svg().contains("without"));
    }
}
