//! Host facts, the method of counting, and the limits of the numbers.

use rtvirtio_measure::VmKind;

use super::{ReportInput, section};
use crate::words;
use rtvirtio_text::xml;

fn host(report: &ReportInput<'_>) -> String {
    let h = &report.result.host;
    let rows = [
        ("kernel", h.kernel.clone()),
        ("CPUs", h.cpus.to_string()),
        ("VMM", h.vmm.clone()),
        ("accelerator", h.accelerator.clone()),
        ("device", h.device.clone()),
    ];
    let list: String = rows.iter().map(|(k, v)| format!("<dt>{k}</dt><dd>{}</dd>", xml(v))).collect();
    section("host", "The host", &format!("<dl>{list}</dl>\n"))
}

fn counting() -> String {
    let items = [
        "Latency counts from the moment at which a request was due, not from when it could be issued. A stalled queue \
         therefore shows in every request that had to wait behind it.",
        "A target is met when its percentile holds at 95\u{a0}% confidence and at least 99\u{a0}% of the declared rate was kept. \
         It is missed when more requests lie above it than the percentile allows, or the rate was not kept.",
        "It is unproven when nothing contradicts it but the run was too short. For p99.99 that takes about \
         30\u{202f}000 requests without a single one above the target (ln\u{a0}20 / 0.0001), and more for every one above it.",
        "With fewer than 10\u{202f}000 requests p99.99 is not known; the maximum replaces it and is marked *.",
    ];
    let list: String = items.iter().map(|i| format!("<li>{}</li>", xml(i))).collect();
    section("counting", "How it was counted", &format!("<ul>{list}</ul>\n"))
}

fn limits(report: &ReportInput<'_>) -> String {
    let result = report.result;
    let mut items = Vec::new();
    if words::is_twin(&result.host) {
        items.push(
            "The device is emulated. Its queueing is real (the kernel's own block layer and scheduler), its service times \
             are a model's; they say nothing on a particular drive.",
        );
    }
    if result.runs.iter().any(|r| matches!(r.kind, VmKind::Process | VmKind::Mixed)) {
        items.push(
            "Process VMs have no guest kernel and no virtio path. They show the host's scheduling, not what a guest adds.",
        );
    }
    if result.runs.iter().any(|r| matches!(r.kind, VmKind::Qemu | VmKind::Mixed))
        && result.host.accelerator == "tcg"
    {
        items.push(
            "Under TCG the guests' CPUs are emulated in software. Latencies hold the emulator's own delays, above all \
             when the guests keep the host's CPUs busy; under KVM they are shorter.",
        );
    }
    items.push(
        "The confidence takes requests as independent. Stalls hit neighbours together, so a rare long stall can be \
         missing from a run; several runs at different times are the remedy.",
    );
    items.push("What happens less often than a run is long is not in its numbers.");
    let notes: String = report.notes.iter().map(|n| format!("<li>{}</li>", xml(n))).collect();
    let list: String = items.iter().map(|i| format!("<li>{}</li>", xml(i))).collect();
    section("limits", "What these numbers do not say", &format!("<ul>{list}{notes}</ul>\n"))
}

/// Three short sections that let a reader judge the numbers.
pub(super) fn sections(report: &ReportInput<'_>) -> String {
    host(report) + &counting() + &limits(report)
}
