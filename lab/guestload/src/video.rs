//! A reader like a video player's: frames of one size at a fixed rate, through a buffer.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::time::{Duration, Instant};

/// Frames per second of play.
const RATE: u32 = 24;
/// Bytes of a frame: 6.3 MB/s.
const FRAME: usize = 256 << 10;
/// Frames that the buffer holds: three seconds.
const BUFFER: u64 = 72;
/// Alignment of direct reads.
const ALIGN: usize = 4096;

/// Reads frames from `offset` on with direct I/O, over `span` bytes again and again, for so many
/// seconds of play. Play begins when the buffer is full; a frame that is read after its time of
/// play is late. Prints frames, late ones, the longest lateness and the time until play began, both
/// in ms.
pub fn video(path: &str, offset: u64, span: u64, seconds: u64) -> crate::Done {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
    let file = OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let mut memory = vec![0_u8; FRAME + ALIGN];
    let skip = memory.as_ptr().align_offset(ALIGN);
    let frame = memory.get_mut(skip..skip + FRAME).ok_or("no aligned buffer")?;
    let places = (span / FRAME as u64).max(1);
    let opened = Instant::now();
    let total = BUFFER + u64::from(RATE) * seconds;
    let (mut begin, mut late, mut worst) = (None, 0_u64, Duration::ZERO);
    for number in 0..total {
        // Frame n needs the room of frame n - BUFFER, which is free once that is played.
        if let Some(begin) = begin.filter(|_| number >= BUFFER) {
            let room = moment(begin, number - BUFFER);
            std::thread::sleep(room.saturating_duration_since(Instant::now()));
        }
        file.read_exact_at(frame, offset + number % places * FRAME as u64)?;
        let now = Instant::now();
        if number + 1 == BUFFER {
            begin = Some(now);
        }
        if let Some(begin) = begin.filter(|_| number >= BUFFER) {
            let lateness = now.saturating_duration_since(moment(begin, number));
            late += u64::from(!lateness.is_zero());
            worst = worst.max(lateness);
        }
    }
    let filled = begin.map_or(Duration::ZERO, |begin| begin.duration_since(opened));
    println!("{} {late} {:.3} {:.3}", total - BUFFER, worst.as_secs_f64() * 1e3, filled.as_secs_f64() * 1e3);
    Ok(())
}

/// Time at which a frame is played.
fn moment(begin: Instant, number: u64) -> Instant {
    begin + Duration::from_nanos(number * 1_000_000_000 / u64::from(RATE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_played_at_their_rate() {
        let begin = Instant::now();
        assert_eq!(moment(begin, 24) - begin, Duration::from_secs(1));
        assert_eq!(moment(begin, 72) - begin, Duration::from_secs(3));
    }
}
