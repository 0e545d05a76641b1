//! Ageing of devices: windows of the kernel's counters against their profiles.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::{BlockDevice, Root, trusted};
use rtvirtio_model::ageing::{Ageing, AgeingWindow, Completed, Part, Profiled, WINDOW_S};
use rtvirtio_model::fingerprint;
use rtvirtio_spec::{Device, Spec};
use serde::{Deserialize, Serialize};

use crate::device_windows::idles;
use crate::dirs::{Dirs, write_state};
use crate::error::Kind;
use crate::plan::load_profile;

/// Name of the file in the state directory.
const FILE: &str = "ageing.json";

/// Stalls since the last sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SampleStalls {
    /// Time in which the host stood still, s; 0 where nothing watched.
    pub host_s: f64,
    /// Longest standstill of the device, s; `None` where nothing watched.
    pub standstill_s: Option<f64>,
}

/// A device with its current window.
#[derive(Debug, Default)]
struct Watched {
    /// Begin of the window; `None` before the first sample, and after a gap.
    begin: Option<(Instant, DeviceIo)>,
    stalls: SampleStalls,
    ageing: Option<Ageing>,
    /// Reason why the profile cannot be read; `None` where it can, or there is none.
    unread: Option<String>,
}

/// Levels of a device as saved, with its profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredLevels {
    /// Fingerprint of the part of the profile that counts.
    profile: String,
    levels: [i8; Part::ALL.len()],
}

impl StoredLevels {
    fn from_ageing(ageing: &Ageing) -> Self {
        Self { profile: name_of(ageing.profiled()), levels: ageing.levels() }
    }
}

/// Name of the part of a profile that windows are compared with.
fn name_of(profiled: &Profiled) -> String {
    fingerprint(format!("{profiled:?}").as_bytes())
}

/// Devices against their profiles. Levels are kept in a file, so that a restart of the service
/// forgets no slower device.
#[derive(Debug, Default)]
pub struct DeviceAgeing {
    watched: BTreeMap<PathBuf, Watched>,
    /// Levels as saved; `None` before the first sample.
    kept: Option<BTreeMap<PathBuf, StoredLevels>>,
    /// Reason why the file of levels cannot be used.
    unread: Option<String>,
}

impl DeviceAgeing {
    /// Samples some devices. Of others no window goes on, and what is known stays.
    pub fn sample(
        &mut self,
        devices: &BTreeMap<PathBuf, SampleStalls>,
        root: &Root,
        dirs: &Dirs,
        now: Instant,
    ) {
        for (path, watched) in &mut self.watched {
            if !devices.contains_key(path) {
                watched.begin = None;
            }
        }
        let kept = self.kept.get_or_insert_with(|| {
            let (kept, unread) = match read(&dirs.state) {
                Ok(kept) => (kept, None),
                Err(why) => (BTreeMap::new(), Some(why)),
            };
            self.unread = unread;
            kept
        });
        for (path, stalls) in devices {
            let watched = self.watched.entry(path.clone()).or_default();
            watched.sample((path, kept.get(path)), *stalls, (root, dirs), now);
        }
        let mut known = kept.clone();
        for (path, ageing) in all(&self.watched) {
            known.insert(path.to_owned(), StoredLevels::from_ageing(ageing));
        }
        known.retain(|_, kept| kept.levels.iter().any(|level| *level > 0));
        if known != *kept {
            // Tried again with the next sample where it fails.
            self.unread = save(&dirs.state, &known).err();
            if self.unread.is_none() {
                *kept = known;
            }
        }
    }

    /// Reasons why a slower device may go unnoticed.
    pub fn problems(&self) -> impl Iterator<Item = String> + '_ {
        let of_devices = self.watched.iter().filter_map(|(path, watched)| {
            let why = watched.unread.as_ref()?;
            Some(format!("whether {} is slower than its profile is not known: {why}", path.display()))
        });
        self.unread.clone().into_iter().chain(of_devices)
    }

    /// Devices of which windows have been seen, by path.
    pub fn all(&self) -> impl Iterator<Item = (&Path, &Ageing)> {
        all(&self.watched)
    }
}

fn all(watched: &BTreeMap<PathBuf, Watched>) -> impl Iterator<Item = (&Path, &Ageing)> {
    watched.iter().filter_map(|(path, watched)| Some((path.as_path(), watched.ageing.as_ref()?)))
}

/// Levels as saved; none where there is no file.
fn read(state: &Path) -> Result<BTreeMap<PathBuf, StoredLevels>, String> {
    let path = state.join(FILE);
    let failed = |why: &dyn std::fmt::Display| {
        format!(
            "devices that were slower before the service started are to be found anew: cannot read {}: {why}; \
             remove the file",
            path.display()
        )
    };
    match trusted::read_config(&path, trusted::CONFIG_LIMIT) {
        Ok(text) => serde_json::from_slice(&text).map_err(|e| failed(&e)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(e) => Err(failed(&e)),
    }
}

fn save(state: &Path, known: &BTreeMap<PathBuf, StoredLevels>) -> Result<(), String> {
    let text = serde_json::to_vec_pretty(known).map_err(|e| e.to_string())?;
    write_state(state, FILE, &text)
        .map_err(|e| format!("a restart of the service would forget which devices are slower: {e}"))
}

impl Watched {
    fn sample(
        &mut self,
        (path, kept): (&Path, Option<&StoredLevels>),
        stalls: SampleStalls,
        (root, dirs): (&Root, &Dirs),
        now: Instant,
    ) {
        let Some(seen) = counters(path, root) else {
            self.begin = None;
            return;
        };
        let Some((at, first)) = self.begin else {
            self.begin_at(now, seen);
            if let (None, Some(kept)) = (&self.ageing, kept) {
                let profiled = self.profiled(path, dirs).filter(|of| name_of(of) == kept.profile);
                self.ageing = profiled.map(|profiled| Ageing::restored(profiled, kept.levels));
            }
            return;
        };
        self.stalls.host_s += stalls.host_s;
        let standstills = self.stalls.standstill_s.into_iter().chain(stalls.standstill_s);
        self.stalls.standstill_s = standstills.reduce(f64::max);
        let seconds = now.saturating_duration_since(at).as_secs_f64();
        if seconds < WINDOW_S {
            return;
        }
        // While the profile cannot be read, what is known stays.
        if let (Some(done), Some(profiled)) = (seen.since(&first), self.profiled(path, dirs)) {
            self.end(&done, seconds, profiled);
        }
        self.begin_at(now, seen);
    }

    fn begin_at(&mut self, now: Instant, seen: DeviceIo) {
        (self.begin, self.stalls) = (Some((now, seen)), SampleStalls::default());
    }

    /// Profile of the device; `None` where there is none, or it cannot be read.
    fn profiled(&mut self, path: &Path, dirs: &Dirs) -> Option<Profiled> {
        let (profiled, unread) = match profiled_of(path, dirs) {
            Ok(profiled) => (profiled, None),
            Err(why) => (None, Some(why)),
        };
        self.unread = unread;
        profiled
    }

    /// Ends a window. A new profile begins anew.
    fn end(&mut self, done: &DeviceIo, seconds: f64, profiled: Profiled) {
        let ageing = self.ageing.take().filter(|ageing| *ageing.profiled() == profiled);
        let ageing = self.ageing.insert(ageing.unwrap_or_else(|| Ageing::new(profiled)));
        ageing.see(&window(done, seconds, self.stalls));
    }
}

/// Profile of a device; `None` where there is none.
fn profiled_of(path: &Path, dirs: &Dirs) -> Result<Option<Profiled>, String> {
    let spec = Spec { device: Device::Path(path.to_owned()), vms: Vec::new() };
    match load_profile(&spec, None, dirs) {
        Ok(profile) => Profiled::new(&profile).map(Some).map_err(|e| e.to_string()),
        Err(e) if e.kind() == Kind::NotMeasured => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

/// Counters of a device; `None` where it is gone, or its requests wait for the elevator, so that
/// their time is not the device's.
fn counters(path: &Path, root: &Root) -> Option<DeviceIo> {
    let device = BlockDevice::find(root, path).ok()?;
    let seen = DeviceIo::read(root, &device).ok()?;
    (!idles(&device, root)).then_some(seen)
}

fn window(done: &DeviceIo, seconds: f64, stalls: SampleStalls) -> AgeingWindow {
    let completed = |n, bytes, time: Duration| Completed { n, bytes, time_s: time.as_secs_f64() };
    AgeingWindow {
        seconds,
        read: completed(done.reads, done.read_bytes, done.read_time),
        write: completed(done.writes, done.write_bytes, done.write_time),
        busy_s: done.busy.as_secs_f64(),
        in_flight_s: done.in_flight.as_secs_f64(),
        standstill_s: stalls.standstill_s,
        flushes: done.flushes,
        flush_s: done.flush_time.as_secs_f64(),
        host_stalled_s: stalls.host_s,
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::Profile;
    use rtvirtio_model::ageing::FOLLOW;

    use super::*;

    /// A drive's profile: 132 us for a read of 4 KiB.
    const PROFILE: &str = include_str!("../../learn/data/qlc-nvme.profile.json");

    fn reads(ms: u64) -> DeviceIo {
        let time = Duration::from_millis(ms);
        DeviceIo {
            reads: 10_000,
            read_bytes: 10_000 * 4096,
            read_time: time,
            busy: time,
            in_flight: time,
            ..DeviceIo::default()
        }
    }

    #[test]
    fn windows_of_the_kernels_counters_show_a_slower_device_and_a_new_profile_begins_anew() {
        let profile: Profile = serde_json::from_str(PROFILE).unwrap();
        let of = |profile: &Profile| Profiled::new(profile).unwrap();
        let mut watched = Watched::default();
        let mut see = |ms: u64, profile: &Profile| {
            watched.end(&reads(ms), WINDOW_S, of(profile));
            watched.ageing.as_ref().and_then(Ageing::alarm)
        };
        for _ in 0..20 {
            assert_eq!(see(1_322, &profile), None);
        }
        for _ in 1..FOLLOW {
            assert_eq!(see(3_966, &profile), None);
        }
        let alarm = see(3_966, &profile).unwrap();
        assert!(alarm.contains("reads take up to 3"), "{alarm}");
        // Measured anew, the device is as it is.
        assert_eq!(see(3_966, &profile.slowed(3.0)), None);
    }

    #[test]
    fn a_device_that_is_gone_says_nothing_and_ends_nothing() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("s"), run: dir.path().join("r") };
        let root = Root::new(dir.path());
        let mut all = DeviceAgeing::default();
        let devices = BTreeMap::from([(PathBuf::from("/dev/gone"), SampleStalls::default())]);
        all.sample(&devices, &root, &dirs, Instant::now());
        assert_eq!((all.all().count(), all.watched.len(), dirs.state.exists()), (0, 1, false));
    }

    #[test]
    fn levels_are_read_as_they_were_saved_and_damage_is_said() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let profile: Profile = serde_json::from_str(PROFILE).unwrap();
        let mut ageing = Ageing::new(Profiled::new(&profile).unwrap());
        for _ in 0..FOLLOW {
            ageing.see(&window(&reads(3_966), WINDOW_S, SampleStalls::default()));
        }
        let known = BTreeMap::from([(PathBuf::from("/dev/sdz"), StoredLevels::from_ageing(&ageing))]);
        assert_eq!(read(dir.path()), Ok(BTreeMap::new()));
        save(dir.path(), &known).unwrap();
        let read_back = read(dir.path()).unwrap();
        assert_eq!(read_back, known);
        let kept = &read_back[Path::new("/dev/sdz")];
        assert_eq!(kept.profile, name_of(&Profiled::new(&profile).unwrap()));
        assert_ne!(kept.profile, name_of(&Profiled::new(&profile.slowed(3.0)).unwrap()));
        let restored = Ageing::restored(Profiled::new(&profile).unwrap(), kept.levels);
        assert_eq!(restored.alarm(), ageing.alarm());
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        let dirs = Dirs { state: dir.path().to_owned(), run: dir.path().join("r") };
        let mut all = DeviceAgeing::default();
        all.sample(&BTreeMap::new(), &Root::new(dir.path()), &dirs, Instant::now());
        let problems: Vec<String> = all.problems().collect();
        assert!(
            matches!(&problems[..], [one] if one.contains("ageing.json") && one.contains("remove")),
            "{problems:?}"
        );
        profiled_of(&dir.path().join("no-disk"), &dirs).unwrap_err();
    }
}
