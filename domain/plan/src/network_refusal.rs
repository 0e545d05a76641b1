//! Reasons for flows of a network without a reservation, and targets that would be admitted.

use rtvirtio_capacity::LINK_HEADROOM;
use rtvirtio_domain_config::{FileError, Network, RateConfig};
use rtvirtio_sched::bound::Refusal;
use rtvirtio_units::Nanos;

use crate::flow::{Class, FlowPromise};

/// Longest target of a spec.
const MAX_TARGET: Nanos = Nanos(3_600_000_000_000);

/// The frames of a port that admission refuses a reservation.
pub(crate) struct RefusedClass {
    pub(crate) port: usize,
    /// Class of the refused frames.
    pub(crate) class: Class,
    /// Reservation that was refused.
    rate: RateConfig,
    /// Reason of the refusal.
    pub(crate) reason: String,
}

impl RefusedClass {
    /// From a configuration that includes the refused reservation.
    pub(crate) fn new(
        config: &Network,
        (port, class): (usize, Class),
        rate: RateConfig,
        error: &FileError,
    ) -> Self {
        Self { port, class, rate, reason: reason(config, port, error) }
    }

    /// The smallest deadline with which the class is admitted next to all reservations of the
    /// configuration: under EDF a longer one never asks for more, so this is found by bisection.
    /// Three digits, rounded up. `None` where none is.
    fn least_deadline(&self, config: &Network) -> Option<Nanos> {
        let mut trial = config.clone();
        let mut is_admitted = |deadline: Nanos| {
            *self.class.reserve(&mut trial.ports[self.port]) = Some(RateConfig { deadline, ..self.rate });
            trial.check().is_ok()
        };
        if !is_admitted(MAX_TARGET) {
            return None;
        }
        let (mut refused, mut admitted) = (self.rate.deadline.0.min(MAX_TARGET.0 - 1), MAX_TARGET.0);
        while admitted - refused > 1 {
            let middle = refused + (admitted - refused) / 2;
            if is_admitted(Nanos(middle)) { admitted = middle } else { refused = middle }
        }
        Some(three_digits_up(Nanos(admitted)))
    }

    /// The largest rate that fits the link, as words; flows of this class are in `flows`.
    fn largest_rate(&self, config: &Network, flows: &[&FlowPromise]) -> String {
        let left = config.unreserved();
        let needed = format!(
            "with {:.0} % more for what the spec does not name, the frames need {} on the wire, and {} of the link are left",
            (LINK_HEADROOM - 1.0) * 100.0,
            bits(self.rate.rate.0),
            bits(left)
        );
        // Rounded down, so that it fits.
        let fits = |flow: &FlowPromise| (flow.rate.0 * left / self.rate.rate.0).floor();
        match flows {
            [one] if fits(one) >= 1.0 => format!("{needed}: lower its rate to {}/s", fits(one)),
            _ => format!("{needed}: lower the rates of this VM's flows, or of others with a target"),
        }
    }
}

/// A rate of the link in Mbit/s, the unit of users.
fn bits(bytes_per_second: f64) -> String {
    format!("{:.2}Mbit/s", bytes_per_second * 8.0 / 1e6)
}

/// Rounds up to three digits, so that a message can be read and copied.
fn three_digits_up(time: Nanos) -> Nanos {
    let mut unit = 1;
    while time.0 / unit >= 1_000 {
        unit *= 10;
    }
    Nanos(time.0.div_ceil(unit) * unit)
}

fn reason(config: &Network, port: usize, error: &FileError) -> String {
    match (config.admission(), error) {
        (Err(Refusal::Deadline { vm, needed, blocking, latency, .. }), _) if vm == port => format!(
            "{needed} may pass in the worst case: {blocking} behind frames that the link has already, {latency} while the host does not run the thread, the rest behind \
             this VM's own frames and those of more urgent flows"
        ),
        (Err(Refusal::Deadline { vm, .. }), _) => {
            let other = config.ports.get(vm).map_or("another port", |port| port.name.as_str());
            format!("the promise of {other}, whose target is shorter, would no longer hold")
        }
        (_, FileError::Network { what, .. }) => what.clone(),
        (_, other) => other.to_string(),
    }
}

/// Writes the reason and the smallest target that would be admitted into the refused flows.
pub(crate) fn refusals(config: &Network, refused: &[RefusedClass], flows: &mut [FlowPromise]) {
    for class in refused {
        let is_of = |flow: &FlowPromise| {
            flow.port == class.port && flow.is_sent_in(class.class) && flow.target.is_some()
        };
        let least = class.least_deadline(config);
        let all: Vec<&FlowPromise> =
            flows.iter().filter(|f| f.port == class.port && f.is_sent_in(class.class)).collect();
        let without = least.is_none().then(|| class.largest_rate(config, &all));
        let tightest = all.iter().filter(|flow| flow.target.is_some());
        let tightest = tightest.min_by_key(|flow| flow.target.map(|target| target.latency));
        let tightest = tightest.map(|flow| flow.flow.clone()).unwrap_or_default();
        for flow in flows.iter_mut().filter(|flow| is_of(flow)) {
            let Some(target) = flow.target else { continue };
            let remedy = match (least, &without) {
                (Some(least), _) if target.latency < least => {
                    format!("the smallest target that is admitted next to all others is {least}")
                }
                (Some(least), _) => format!(
                    "it shares a reservation with \"{tightest}\", for which the smallest target that is admitted next to all others is {least}"
                ),
                (None, why) => format!("no target is admitted: {}", why.as_deref().unwrap_or_default()),
            };
            flow.unpromised = Some(format!("{}; {remedy}", class.reason));
            flow.least_target = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_rounded_up_and_survive_the_text() {
        for (time, rounded) in [(999, 999), (1_000, 1_000), (1_331_432, 1_340_000), (59_800_001, 59_900_000)]
        {
            let found = three_digits_up(Nanos(time));
            assert_eq!(found, Nanos(rounded));
            assert_eq!(found.to_string().parse(), Ok(found));
        }
    }
}
