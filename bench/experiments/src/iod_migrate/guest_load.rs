//! Load of a guest that moves, and what it says of its disk afterwards.

use std::ops::Range;

use rtvirtio_vmm::agent::ExecOutput;

use super::Findings;
use crate::iod_crash::bad_blocks;

/// File in the guest that ends the load.
pub const STOP: &str = "/tmp/stop";
/// File in the guest with a line for each sum: part and sum.
pub const SUMS: &str = "/tmp/sums";
/// Parts of 4 MiB that are read; fio writes the disk before them.
const PARTS: Range<usize> = 8..16;
/// Command that reads part `$i`.
const PART: &str = "dd if=/dev/vda bs=4M skip=$i count=1 2>/dev/null";
/// A run of fio. Each has a seed of its own, which its blocks' headers hold.
const FIO: &str = "fio --name=v --filename=/dev/vda --rw=randrw --bssplit=4k/60:64k/40 --size=24M \
                   --io_size=64G --time_based --runtime=20 --direct=1 --ioengine=libaio --iodepth=16 \
                   --verify=crc32c --verify_fatal=1 --verify_backlog=64 --rate_iops=50";

fn ascending() -> Vec<String> {
    PARTS.map(|part| part.to_string()).collect()
}

/// Script that writes the parts, and prints their sums in order.
pub fn fill() -> String {
    let order = ascending().join(" ");
    format!(
        "dd if=/dev/urandom of=/dev/vda bs=1M seek=32 count=32 oflag=direct 2>/dev/null || exit 1; \
         for i in {order}; do {PART} | md5sum | cut -c 1-32; done"
    )
}

/// Script that writes and verifies until it is to stop, or fio finds an error.
pub fn writer() -> String {
    format!(
        "n=0; while [ ! -e {STOP} ]; do {FIO} --randseed=$((n + 1)) > /tmp/fio 2>&1 && \
         grep -q 'err= 0' /tmp/fio || {{ cat /tmp/fio; echo; echo $n runs; exit 1; }}; n=$((n + 1)); done; \
         echo $n runs"
    )
}

/// Script that reads the parts until it is to stop. The device reads them into the page cache,
/// where they are summed a while later: a page that the log has missed has another content then.
pub fn reader() -> String {
    let mut order = ascending();
    let up = order.join(" ");
    order.reverse();
    let [up, down] = [up, order.join(" ")].map(|order| {
        format!(
            "echo 1 > /proc/sys/vm/drop_caches; for i in {order}; do {PART} > /dev/null; done; sleep 1; \
             for i in {order}; do echo $i $({PART} | md5sum | cut -c 1-32) >> {SUMS}; done"
        )
    });
    format!("while [ ! -e {STOP} ]; do {up}; {down}; done")
}

/// Sums that [`fill`] printed.
///
/// # Errors
/// Text without exactly one sum for each part.
pub fn expected(printed: &str) -> anyhow::Result<Vec<String>> {
    let sums: Vec<String> = printed.lines().map(str::to_owned).collect();
    let is_sum = |sum: &String| sum.len() == 32 && sum.bytes().all(|b| b.is_ascii_hexdigit());
    if sums.len() != PARTS.len() || !sums.iter().all(is_sum) {
        anyhow::bail!("the guest printed no sum for each part: {printed:.300}");
    }
    Ok(sums)
}

/// Adds what fio found.
pub fn add_writer(findings: &mut Findings, output: &ExecOutput) {
    let text =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    let runs = text.lines().rev().find_map(|line| line.strip_suffix(" runs")?.parse::<u64>().ok());
    findings.fio_runs = runs.unwrap_or(0);
    if output.success() && runs.is_some() {
        return;
    }
    let (lost, corrupt) = bad_blocks(&text);
    findings.bad_blocks = lost + corrupt;
    findings.errors += u64::from(lost + corrupt == 0);
}

/// Adds the lines of [`SUMS`]; a line that is no sum counts as wrong.
pub fn add_sums(findings: &mut Findings, lines: &str, expected: &[String]) {
    let is_right = |line: &str| {
        let (part, sum) = line.split_once(' ')?;
        let index = part.parse::<usize>().ok()?.checked_sub(PARTS.start)?;
        Some(expected.get(index)? == sum)
    };
    for line in lines.lines() {
        findings.sums += 1;
        findings.wrong_sums += u64::from(is_right(line) != Some(true));
    }
}

/// Adds the errors in the kernel's log.
pub fn add_kernel(findings: &mut Findings, log: &str) {
    let is_error = |line: &&str| line.contains("I/O error") || line.contains("BUG:");
    findings.errors += log.lines().filter(is_error).count() as u64;
}
