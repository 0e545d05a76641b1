//! Lines of a trace: a [`Mark`] that begins it, an [`Event`] for each request and frame, a [`Mark`]
//! that ends it.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Begin of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// Number of traced devices.
    pub devices: usize,
    /// Number of traced networks.
    pub networks: usize,
    /// Events that are kept for a listener that is slow; more are dropped.
    pub room: usize,
}

/// End of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Events that were sent.
    pub events: u64,
    /// Events that were dropped, because the listener was slow.
    pub dropped: u64,
}

/// A request that was answered, or a frame that was passed on or dropped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event<'a> {
    /// The device of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Cow<'a, str>>,
    /// The network of a frame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Cow<'a, str>>,
    /// The disk or port.
    #[serde(borrow)]
    pub vm: Cow<'a, str>,
    /// The queue of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<u16>,
    /// `read`, `write`, `flush`, `discard`, `write-zeroes`, `refused`; `send` or `receive`.
    #[serde(borrow)]
    pub op: Cow<'a, str>,
    /// Length of the request or frame in bytes.
    pub len: u64,
    /// `real-time`, `best-effort` or `idle`.
    #[serde(borrow)]
    pub class: Cow<'a, str>,
    /// Level in the class.
    pub level: u8,
    /// A reservation covered it.
    pub reserved: bool,
    /// Reason why a request did not reach the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Cow<'a, str>>,
    /// Status byte of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u8>,
    /// `passed`, or the counter of a frame that was dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fate: Option<Cow<'a, str>>,
    /// Arrival on CLOCK_MONOTONIC, in ns.
    pub at_ns: u64,
    /// Time in the queue, in ns.
    pub wait_ns: u64,
    /// Time at the device or on the link, in ns.
    pub device_ns: u64,
    /// Sum of `wait_ns` and `device_ns`, in ns.
    pub total_ns: u64,
}

impl Event<'_> {
    /// Whether it is a frame that was not passed on, or a request that was refused.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        self.refused.is_some() || self.fate.as_ref().is_some_and(|fate| fate != "passed")
    }
}

/// A line that is no event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Mark {
    /// First line of a trace.
    Begin {
        /// Sources of the trace.
        trace: Begin,
    },
    /// Last line of a trace.
    End {
        /// Numbers of events sent and dropped.
        end: End,
    },
    /// The trace failed, or was refused because another listener traces the I/O domain.
    Failed {
        /// Reason of the failure.
        error: String,
    },
}

/// A line of a trace.
#[derive(Clone, Debug, PartialEq)]
pub enum Line<'a> {
    /// Most lines are events.
    Event(Event<'a>),
    /// Begin, end, or a failure.
    Mark(Mark),
}

impl<'a> Line<'a> {
    /// Reads a line.
    ///
    /// # Errors
    /// Neither an event with all that is required, nor a mark.
    pub fn parse(line: &'a [u8]) -> serde_json::Result<Self> {
        let wrong = match serde_json::from_slice(line) {
            Ok(event) => return Ok(Self::Event(event)),
            Err(wrong) => wrong,
        };
        serde_json::from_slice(line).map(Self::Mark).map_err(|_| wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &str = r#"{"device":"d","vm":"a","queue":1,"op":"read","len":4096,"class":"real-time","level":4,"reserved":true,"refused":"outside_disk","status":2,"at_ns":9,"wait_ns":1,"device_ns":2,"total_ns":3}"#;
    const FRAME: &str = r#"{"network":"n","vm":"p","op":"send","len":64,"class":"idle","level":7,"reserved":false,"fate":"no_buffer","at_ns":9,"wait_ns":1,"device_ns":2,"total_ns":3}"#;

    #[test]
    fn events_and_marks_go_both_ways() {
        for text in [REQUEST, FRAME] {
            let Line::Event(event) = Line::parse(text.as_bytes()).unwrap() else { panic!("{text}") };
            assert!(event.is_dropped());
            assert_eq!(serde_json::to_string(&event).unwrap(), text);
        }
        let (begin, end) = (Begin { devices: 1, networks: 2, room: 3 }, End { events: 4, dropped: 5 });
        for mark in [Mark::Begin { trace: begin }, Mark::End { end }, Mark::Failed { error: "x".into() }] {
            let text = serde_json::to_string(&mark).unwrap();
            assert_eq!(Line::parse(text.as_bytes()).unwrap(), Line::Mark(mark));
        }
    }

    #[test]
    fn an_event_without_its_times_is_an_error_and_unknown_fields_are_not() {
        for field in ["len", "level", "at_ns", "wait_ns", "device_ns", "total_ns", "vm", "reserved"] {
            let text = FRAME.replace(&format!("\"{field}\""), "\"other\"");
            let error = Line::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(&format!("missing field `{field}`")), "{error}");
        }
        assert!(Line::parse(FRAME.replace("}", ",\"later\":1}").as_bytes()).is_ok());
        assert!(Line::parse(b"").is_err());
    }
}
