//! What the kernel prints (sysfs, procfs, cgroups): any text is refused, or read so that it means
//! the same when it is printed again.
//!
//! Layout of the input: which file it is, then its text.

use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::text::{
    cpu_list, elevators, has_word, io_max_limit, is_dev, jiffies_readbacks, throttle_limit, weights,
};
use rtvirtio_kernel::{Root, mounts, process, task};

/// Reads a text as each of the files that it may be.
///
/// # Panics
/// When what was read means something else when it is printed again.
pub fn play(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    match kind % 10 {
        0 => {
            if let Some(e) = elevators(&text) {
                assert!(e.available.contains(&e.current), "{e:?}");
                let shown: Vec<String> = e.available.iter().map(|name| format!("[{name}]")).collect();
                assert!(shown.contains(&format!("[{}]", e.current)));
            }
        }
        1 => {
            if let Some(cpus) = cpu_list(&text) {
                let list: Vec<String> = cpus.iter().map(u32::to_string).collect();
                assert_eq!(cpu_list(&list.join(",")), Some(cpus));
            }
        }
        2 => {
            if let Some(w) = weights(&text) {
                let mut again = w.default.map(|d| format!("default {d}\n")).unwrap_or_default();
                for (dev, weight) in &w.devices {
                    assert!(is_dev(dev), "{dev:?}");
                    again += &format!("{dev} {weight}\n");
                }
                assert_eq!(weights(&again), Some(w));
            }
        }
        3 => {
            let limit = throttle_limit(&text, "8:0");
            let line = limit.map(|l| format!("8:0 {l}\n")).unwrap_or_default();
            assert_eq!(throttle_limit(&line, "8:0"), limit);
            // The lines of other devices are not this one's.
            assert_eq!(throttle_limit("8:01 7\n18:0 7\n", "8:0"), None);
        }
        4 => {
            for key in ["rbps", "wbps", "riops", "wiops"] {
                let limit = io_max_limit(&text, "8:0", key);
                let line = limit.map(|l| format!("8:0 {key}={l}\n")).unwrap_or_default();
                assert_eq!(io_max_limit(&line, "8:0", key), limit);
            }
        }
        5 => {
            if let Ok(attr) = text.parse::<Attr>() {
                assert_eq!(attr.to_string().parse(), Ok(attr), "{text:?}");
                assert!(attr.is(&attr));
            }
            let number = text.trim().parse::<u64>().unwrap_or_default();
            assert!(jiffies_readbacks(number).iter().all(|ms| *ms >= number.min(u64::MAX / 1_000)));
            assert_eq!(has_word(&text, "io"), text.split_whitespace().any(|w| w == "io"));
        }
        file => {
            // A directory that stands for `/`.
            let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
            let name =
                ["1/task/1/stat", "1/task/1/cgroup", "1/status", "self/mountinfo"][usize::from(file - 6)];
            let path = dir.path().join("proc").join(name);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            std::fs::write(path, bytes).expect("a file");
            read(&Root::new(dir.path()), file);
        }
    }
}

fn read(root: &Root, file: u8) {
    let words = |e: rtvirtio_kernel::HostError| assert!(!e.to_string().is_empty());
    match file {
        6 => task::stat(root, 1, 1).map_or_else(words, |s| assert!(s.cpu_time.as_secs_f64().is_finite())),
        7 => task::cgroups(root, 1, 1).map_or_else(words, |all| assert!(all.iter().all(|m| !m.has("a,b")))),
        8 => process::locked_memory(root, 1)
            .map_or_else(words, |(locked, all)| assert!(locked % 1024 == 0 && all % 1024 == 0)),
        _ => mounts::mounts(root).map_or_else(words, |all| assert!(all.iter().all(|m| !m.fs.contains(' ')))),
    }
}
