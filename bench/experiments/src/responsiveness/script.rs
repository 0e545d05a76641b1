//! The guest's script for one start-up, and its output.

use rtvirtio_startup::SLICE_IDLE;

use super::cell::Plane;
use crate::iod_startup::MOUNT;

/// Bytes of a sector in `/sys/block/DISK/stat`.
pub const SECTOR: u64 = 512;

/// The shell script that starts the application in the guest with cold caches: `$1` is the port,
/// then come the program and its arguments. Prints status; the guest's uptime before and after; the
/// sectors read from its disk before and after; and for the whole script the uptime, the sectors
/// read and those written at the begin, and the latter two at the end.
///
/// The script announces the start itself, as `rtvirtio-guest start` does, whose own start is long
/// on an emulated processor.
pub fn script(plane: Plane, limit: u64) -> String {
    let stat = "read x x s x x x w x </sys/block/vda/stat";
    let (begin, nice, end) = match plane {
        Plane::Default | Plane::Grouped => (String::new(), "", String::new()),
        Plane::Domain | Plane::Kernel => {
            let said = |word: &str| match plane {
                Plane::Kernel => format!("echo {word} >$p; "),
                _ => String::new(),
            };
            let start = format!("start 1 {}", limit * 1_000);
            let raise = format!("{}i=/sys/block/vda/queue/iosched/slice_idle; ", said(&start));
            let begin = format!("{raise}[ ! -e $i ] || {{ read ms <$i; echo {SLICE_IDLE} >$i; }}; ");
            let end = format!("[ ! -e $i ] || echo $ms >$i; {}", said("end 1"));
            (begin, "ionice -c 1 -n 0 ", end)
        }
    };
    // The time includes the announcement of the start.
    format!(
        "p=$1; shift; read u x </proc/uptime; {stat}; g=\"$u $s $w\"; \
         echo 3 >/proc/sys/vm/drop_caches; {stat}; f=$s; read a x </proc/uptime; \
         {begin}{nice}timeout {limit} chroot {MOUNT} \"$@\" >/dev/null; r=$?; {end}read b x </proc/uptime; {stat}; \
         echo $r $a $b $f $s $g $s $w"
    )
}

/// Parsed output of [`script`].
#[derive(Debug, PartialEq)]
pub struct Printed {
    /// 0, or the status of `timeout`, or the application's own.
    pub status: i32,
    /// Duration of the start, s.
    pub seconds: f64,
    /// Bytes read during the start.
    pub read: u64,
    /// Bytes read and written by the whole script, and its duration, s.
    pub all: (u64, f64),
}

/// Parses the output; `None` for any other text.
pub fn read_script(text: &str) -> Option<Printed> {
    let fields: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    let [status, from, to, read, read_after, begin, first_read, first_written, last_read, last_written] =
        fields.try_into().ok()?;
    let bytes = |before: f64, after: f64| (after - before).max(0.0) as u64 * SECTOR;
    Some(Printed {
        status: status as i32,
        seconds: to - from,
        read: bytes(read, read_after),
        all: (bytes(first_read + first_written, last_read + last_written), to - begin),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_says_what_a_start_took() {
        let printed = Printed { status: 0, seconds: 2.25, read: 16 * 512, all: (30 * 512, 3.25) };
        assert_eq!(read_script("0 10.50 12.75 8 24 9.50 3 100 24 109\n"), Some(printed));
        assert_eq!(read_script("0 10.50 12.75\n"), None);
        for plane in Plane::ALL {
            let text = script(plane, 60);
            assert!(text.contains("drop_caches") && text.contains("timeout 60 chroot"), "{text}");
            assert_eq!(text.contains("ionice"), plane >= Plane::Kernel, "{text}");
            assert_eq!(text.contains("echo start 1 60000 >$p"), plane == Plane::Kernel, "{text}");
        }
    }
}
