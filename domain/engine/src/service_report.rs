//! Parts of the status that disks and ports have in common.

use rtvirtio_domain_protocol::status::{Refusal, Regulators, Service};
use rtvirtio_sched::Contract;
use rtvirtio_stats::LatencyReader;
use rtvirtio_units::Percentile;

use crate::log::Refusals;

/// Latency and service of one direction of a disk or port.
pub(crate) fn service(latencies: &LatencyReader, contract: Contract, bytes: u64, cap_hits: u64) -> Service {
    let latencies = latencies.snapshot();
    Service {
        bytes: Some(bytes),
        p50_ns: Some(latencies.at(Percentile(50.0)).0),
        p99_ns: Some(latencies.at(Percentile(99.0)).0),
        p9999_ns: Some(latencies.tail().0),
        max_ns: Some(latencies.max().0),
        alpha_bytes_per_second: Some(contract.bytes_per_second),
        delta_ns: Some(contract.longest_gap_ns),
        cap_hits: Some(cap_hits),
    }
}

/// Report of delays by regulators, from the lateness of each piece or frame.
pub(crate) fn regulators(lateness: &LatencyReader) -> Regulators {
    let lateness = lateness.snapshot();
    Regulators {
        held: Some(lateness.n()),
        late_p50_ns: Some(lateness.at(Percentile(50.0)).0),
        late_p9999_ns: Some(lateness.tail().0),
    }
}

/// Last refusal; `None` without any.
pub(crate) fn last_refusal(refusals: &Refusals) -> Option<Refusal> {
    refusals.last().map(|last| Refusal {
        why: last.why,
        seconds_ago: last.at.elapsed().as_secs(),
        count: last.count,
    })
}
