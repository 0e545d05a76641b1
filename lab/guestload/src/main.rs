//! `rtvirtio-guestload`: loads of the experiments inside a guest. Results go to standard output,
//! errors to standard error.

mod chain;
mod lies;
mod pong;
mod sampled;
mod video;

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_reporter::{Device, Reporter, now};
use rtvirtio_urgency::page::{Mode, RawReport};
use rustix::thread::{CpuSet, sched_setaffinity};

type Done = Result<(), Box<dyn std::error::Error>>;

const USAGE: &str = "usage: rtvirtio-guestload work FILE | switches SECONDS | promote N | lie KIND SECONDS | video FILE OFFSET SPAN SECONDS | sv PORT DISK | pong PORT | chain DISK CYCLES PERIOD_US";
/// Additions in one unit of work: some hundred microseconds of an emulated processor.
const PIECE: u64 = 50_000;
/// Timeout of a change of level by the host.
const LEVEL_TIMEOUT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>();
    let done = match words.as_slice() {
        ["work", file] => work(file),
        ["switches", seconds] => number(seconds).map_err(Into::into).and_then(switches),
        ["promote", n] => number(n).map_err(Into::into).and_then(promote),
        ["lie", kind, seconds] => {
            number(seconds).map_err(Into::into).and_then(|s| lies::lie(kind, Duration::from_secs(s)))
        }
        ["video", file, offset, span, seconds] => number(offset)
            .and_then(|offset| Ok((offset, number(span)?, number(seconds)?)))
            .map_err(Into::into)
            .and_then(|(offset, span, seconds)| video::video(file, offset, span, seconds)),
        ["chain", disk, cycles, period] => number(cycles)
            .and_then(|cycles| Ok((cycles, number(period)?)))
            .map_err(Into::into)
            .and_then(|(cycles, period)| chain::chain(disk, cycles, period)),
        ["pong", port] => port.parse().map_err(Into::into).and_then(pong::serve),
        ["sv", port, disk] => port.parse().map_err(Into::into).and_then(|port| sampled::serve(port, disk)),
        _ => Err(USAGE.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("rtvirtio-guestload: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Computes one unit of work.
fn compute() {
    let sum = (0..PIECE).fold(0_u64, |sum, i| black_box(sum.wrapping_add(i)));
    black_box(sum);
}

/// Works for ever, and writes after each unit the number of units and the time, in nanoseconds of
/// the guest's clock.
fn work(path: &str) -> Done {
    let file = File::create(path)?;
    let mut done = 0_u64;
    loop {
        compute();
        done += 1;
        // Of constant length, so that no reader finds the end of a longer line.
        file.write_all_at(format!("{done:020} {:020}\n", now().0).as_bytes(), 0)?;
    }
}

/// Sends a byte back and forth between two threads on CPU 0: each way is a context switch. Prints
/// the round trips per second.
fn switches(seconds: u64) -> Done {
    let mut set = CpuSet::new();
    set.set(0);
    sched_setaffinity(None, &set)?;
    let pipe = || rustix::pipe::pipe().map(|(from, to)| (File::from(from), File::from(to)));
    let ((mut there, mut to), (mut back, mut from)) = (pipe()?, pipe()?);
    let echo = std::thread::spawn(move || -> io::Result<()> {
        let mut byte = [0];
        while there.read(&mut byte)? > 0 {
            from.write_all(&byte)?;
        }
        Ok(())
    });
    let (start, length) = (Instant::now(), Duration::from_secs(seconds));
    let (mut returned, mut byte) = (0_u64, [0]);
    while start.elapsed() < length {
        for _ in 0..50 {
            to.write_all(&byte)?;
            back.read_exact(&mut byte)?;
        }
        returned += 50;
    }
    println!("{:.1}", returned as f64 / start.elapsed().as_secs_f64());
    drop(to);
    echo.join().map_err(|_| "the other thread panicked")??;
    Ok(())
}

/// Measures `n` times the delay from a report of an urgent task until the host shows a higher
/// level, while this vCPU computes. Prints one delay a line, in nanoseconds of the guest's clock.
fn promote(n: u64) -> Done {
    let reporter = Reporter::begin(Device::find()?, Mode::Region)?;
    let region = reporter.device().region();
    let block = region.block(0).ok_or("no block for vCPU 0")?;
    let mut times = Vec::new();
    for i in 0..n {
        reporter.report(0, &RawReport::default())?;
        reporter.device().ring();
        let start = Instant::now();
        while block.level() > 0 {
            if start.elapsed() > LEVEL_TIMEOUT {
                return Err("the host does not lower this vCPU".into());
            }
        }
        // Not in phase with the host's own periods.
        let pause = Duration::from_micros(1500 + i * 377 % 2000);
        while start.elapsed() < pause {}
        let from = now();
        reporter.report(0, &RawReport { policy: 1, priority: 99, ..RawReport::default() })?;
        reporter.device().ring();
        while block.level() == 0 {
            if start.elapsed() > LEVEL_TIMEOUT {
                return Err("the host does not raise this vCPU".into());
            }
        }
        times.push(now().0 - from.0);
    }
    for time in times {
        println!("{time}");
    }
    Ok(())
}
