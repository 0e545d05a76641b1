//! Integrity of a guest's data while the I/O domain below it is killed repeatedly.
//!
//! fio writes a region of the disk once, in random order and mixed sizes, with a header and a
//! checksum in each 4 KiB, and reads all of it back. Each round has a seed of its own, which is in
//! the header and decides the contents, and rounds cycle through the same regions. So a lost
//! acknowledged write shows as a block with the header of an earlier round, or with none: *lost*. A
//! block with this round's header and other bytes, or at another place, is *corrupt*. At the end
//! the last round of each region is read once more.

mod measure;
mod page;

pub use measure::{CrashOptions, measure};

use std::path::{Path, PathBuf};

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;

/// Regions that rounds cycle through.
pub const REGIONS: u64 = 4;
/// Bytes of a region.
pub const REGION: u64 = 48 << 20;
/// Requests that fio keeps outstanding.
pub const DEPTH: u32 = 16;
/// Queues of the guest's disk.
pub const QUEUES: u16 = 2;
/// The errno of a block with unexpected content (`EILSEQ`).
const NOT_WHAT_WAS_WRITTEN: i32 = 84;

/// Configuration of the I/O domain.
#[must_use]
pub fn config(disk: &Path, dir: &Path) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"file\"\nwindow = 8\n\
         [[device.disk]]\nname = \"vm\"\nsocket = {:?}\npath = {:?}\nqueues = {QUEUES}\n",
        dir.join("control").display().to_string(),
        socket(dir).display().to_string(),
        disk.display().to_string(),
    )
}

/// Path of the disk's socket.
#[must_use]
pub fn socket(dir: &Path) -> PathBuf {
    dir.join("vm.sock")
}

/// Command line in the guest of a round; `again` only reads back the data that the same round wrote
/// before.
#[must_use]
pub fn fio(region: u64, seed: u64, again: bool) -> Vec<String> {
    let mut args: Vec<String> = [
        "fio",
        "--name=crash",
        "--filename=/dev/vda",
        // Part of the requests read, so that a crash finds both kinds; each block is written at
        // most once in a round.
        "--rw=randrw",
        "--rwmixwrite=70",
        "--bssplit=4k/50:16k/20:64k/30",
        "--ioengine=libaio",
        "--direct=1",
        "--fsync=64",
        "--verify=crc32c",
        "--do_verify=1",
        // Every bad block is reported, not only the first.
        "--continue_on_error=verify",
        "--output-format=json",
    ]
    .map(str::to_owned)
    .to_vec();
    args.push(format!("--iodepth={DEPTH}"));
    args.push(format!("--offset={}", region * REGION));
    args.push(format!("--size={REGION}"));
    args.push(format!("--randseed={seed}"));
    if again {
        args.push("--verify_only".to_owned());
    }
    args
}

/// Result of one run of fio in the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Index of the region.
    pub region: u64,
    /// Seed of the order and contents.
    pub seed: u64,
    /// Whether the data were only read back.
    pub again: bool,
    /// Bytes written, or to be read back.
    pub written: u64,
    /// Bytes read: some among the writes, and all that was written, to verify it.
    pub read: u64,
    /// Flush requests that completed.
    pub flushes: u64,
    /// 1 when the guest saw an I/O error, which ends the round.
    pub io_errors: u64,
    /// Blocks with an earlier content.
    pub lost: u64,
    /// Blocks with any other wrong content.
    pub corrupt: u64,
    /// Longest request in the guest, ms; 0 where the data were only read back.
    pub longest_ms: f64,
}

/// Effect of one `kill -9`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kill {
    /// Time since the begin, s.
    pub at: f64,
    /// Requests that the I/O domain held just before.
    pub outstanding: u64,
    /// From the kill until the guest was attached to the next process, ms.
    pub away_ms: f64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CrashData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Seed of the random moments.
    pub seed: u64,
    /// Kills in the order made.
    pub kills: Vec<Kill>,
    /// Every run of fio.
    pub rounds: Vec<Round>,
    /// I/O errors in the guest kernel's log.
    pub kernel_errors: u64,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Direction,
    write: Direction,
    #[serde(default)]
    sync: Direction,
}

#[derive(Default, Deserialize)]
struct Direction {
    #[serde(default)]
    io_bytes: u64,
    #[serde(default)]
    total_ios: u64,
    #[serde(default)]
    lat_ns: Latency,
}

#[derive(Default, Deserialize)]
struct Latency {
    #[serde(default)]
    max: f64,
}

/// Reads fio's JSON and its complaints.
///
/// # Errors
/// Text that is no output of fio, or of a run that did not verify its writes.
pub fn outcome(round: &Round, json: &str, complaints: &str) -> Result<Round, String> {
    let unlike = |what: &str| format!("{what}; fio printed: {json:.300} {complaints:.300}");
    let begin = json.find('{').ok_or_else(|| unlike("no result"))?;
    let output: Output = serde_json::from_str(&json[begin..]).map_err(|e| unlike(&e.to_string()))?;
    let [job] = output.jobs.as_slice() else { return Err(unlike("not one job")) };
    let (lost, corrupt) = bad_blocks(complaints);
    let io_errors = u64::from(job.error != 0 && job.error != NOT_WHAT_WAS_WRITTEN);
    if job.error == NOT_WHAT_WAS_WRITTEN && lost + corrupt == 0 {
        return Err(unlike("bad blocks without a word about them"));
    }
    if job.error == 0 && (job.write.io_bytes == 0 || job.read.io_bytes < job.write.io_bytes) {
        return Err(unlike("not all that was written was read back"));
    }
    // The requests that `--verify_only` skips have times in fio's output too, which are
    // meaningless.
    let timed = [&job.read, &job.write, &job.sync].into_iter().filter(|_| !round.again);
    let longest = timed.map(|d| d.lat_ns.max).fold(0.0, f64::max);
    Ok(Round {
        written: job.write.io_bytes,
        read: job.read.io_bytes,
        flushes: job.sync.total_ios,
        io_errors,
        lost,
        corrupt,
        longest_ms: longest / 1e6,
        ..*round
    })
}

/// Lost and corrupt blocks by fio's messages (its `verify.c`). A header of another round has
/// another seed or number, a block that was never written has no header.
pub(crate) fn bad_blocks(complaints: &str) -> (u64, u64) {
    let (mut lost, mut corrupt) = (0, 0);
    for line in complaints.lines().filter(|l| l.contains("verify")) {
        let old = ["bad header rand_seed", "bad header numberio", "bad magic header 0, wanted"];
        if old.iter().any(|o| line.contains(o)) {
            lost += 1;
        } else if line.contains("verify: bad") || line.contains("verify failed at") {
            corrupt += 1;
        }
    }
    (lost, corrupt)
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &CrashData) -> Vec<Claim> {
    let n = data.kills.len();
    let sum = |f: &dyn Fn(&Round) -> u64| data.rounds.iter().map(f).sum::<u64>() as f64;
    let most = |all: &mut dyn Iterator<Item = f64>| all.fold(0.0, f64::max);
    let wrote = sum(&|r| if r.again { 0 } else { r.written }) / 1e9;
    let hit = data.kills.iter().filter(|k| k.outstanding > 0).count();
    vec![
        Claim::new(
            "iod.crash.lost",
            format!("blocks of 4 KiB whose acknowledged write was lost after `kill -9` of the domain under a guest, of {wrote:.2} GB written and read back"),
            sum(&|r| r.lost),
            "blocks",
            n,
        )
        .at_most(0.0),
        Claim::new("iod.crash.corrupt", "blocks of 4 KiB with any other wrong content", sum(&|r| r.corrupt), "blocks", n)
            .at_most(0.0),
        Claim::new(
            "iod.crash.io_errors",
            "I/O errors that the guest's fio or kernel saw",
            sum(&|r| r.io_errors) + data.kernel_errors as f64,
            "errors",
            n,
        )
        .at_most(0.0),
        Claim::new(
            "iod.crash.longest_ms",
            "longest request in the guest",
            most(&mut data.rounds.iter().map(|r| r.longest_ms)),
            "ms",
            n,
        ),
        Claim::new(
            "iod.crash.away_ms",
            "longest time from a kill until the guest was attached again; QEMU tries once a second",
            most(&mut data.kills.iter().map(|k| k.away_ms)),
            "ms",
            n,
        ),
        Claim::new("iod.crash.in_flight", "kills that hit the domain with requests in it", hit as f64, "kills", n),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    const GOOD: &str = "fio: this platform\n{\"jobs\":[{\"error\":0,\"read\":{\"io_bytes\":300,\"total_ios\":3,\"lat_ns\":{\"max\":5000000}},\
        \"write\":{\"io_bytes\":200,\"total_ios\":2,\"lat_ns\":{\"max\":1}},\"sync\":{\"total_ios\":1,\"lat_ns\":{\"max\":1200000000}}}]}";

    #[test]
    fn the_configuration_is_one() {
        let text = config(Path::new("/x/disk"), Path::new("/run/x"));
        let file = rtvirtio_domain_config::File::parse(Path::new("x"), &text).unwrap();
        assert_eq!(file.devices[0].disks[0].queues, QUEUES);
    }

    #[test]
    fn a_good_round() {
        let round = outcome(&Round { seed: 7, ..Round::default() }, GOOD, "").unwrap();
        assert_eq!((round.seed, round.written, round.read, round.flushes), (7, 200, 300, 1));
        assert_eq!((round.io_errors, round.lost, round.corrupt, round.longest_ms), (0, 0, 0, 1200.0));
    }

    #[test]
    fn bad_blocks_are_told_apart() {
        let complaints = "verify: bad header rand_seed 1, wanted 2 at file /dev/vda offset 4096, length 4096\n\
            verify: bad magic header 0, wanted acca at file /dev/vda offset 8192, length 4096\n\
            verify: bad magic header 17, wanted acca at file /dev/vda offset 8192, length 4096\n\
            verify: bad header offset 4096, wanted 8192 at file /dev/vda offset 8192, length 4096\n\
            crc32c: verify failed at file /dev/vda offset 10240000, length 4096\n       Expected CRC: 6a\n       Received CRC: 00\n\
            verify: bad header numberio 3, wanted 9 at file /dev/vda offset 4096, length 4096\n";
        let json = GOOD.replace("\"error\":0", "\"error\":84");
        let round = outcome(&Round::default(), &json, complaints).unwrap();
        assert_eq!((round.lost, round.corrupt, round.io_errors), (3, 3, 0));
        let again = outcome(&Round { again: true, ..Round::default() }, GOOD, "").unwrap();
        assert_eq!(again.longest_ms, 0.0);
        let round = outcome(&Round::default(), &GOOD.replace("\"error\":0", "\"error\":5"), "").unwrap();
        assert_eq!((round.lost, round.corrupt, round.io_errors), (0, 0, 1));
    }

    #[test]
    fn what_was_not_verified_is_no_result() {
        for (from, to) in
            [("\"error\":0", "\"error\":84"), ("\"io_bytes\":300", "\"io_bytes\":199"), ("{\"jobs\"", "x")]
        {
            assert!(outcome(&Round::default(), &GOOD.replace(from, to), "").is_err(), "{to}");
        }
    }

    #[test]
    fn claims_add_up_and_need_kills() {
        let host = HostFacts { cpus: 1, ..HostFacts::default() };
        let round = outcome(&Round::default(), GOOD, "").unwrap();
        let mut data = CrashData {
            schema: CrashData::SCHEMA.to_owned(),
            host,
            command: String::new(),
            generated: String::new(),
            seed: 1,
            kills: Vec::new(),
            rounds: vec![round, round],
            kernel_errors: 0,
        };
        assert!(!claims(&data)[0].met, "no kills show nothing");
        data.kills = vec![Kill { at: 1.0, outstanding: 3, away_ms: 900.0 }];
        assert!(claims(&data).iter().all(|c| c.met));
        data.rounds[1].lost = 2;
        let lost = &claims(&data)[0];
        assert_eq!((lost.value, lost.met), (2.0, false));
    }
}
