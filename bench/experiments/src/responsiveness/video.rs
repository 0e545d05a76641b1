//! Two VMs that play a video next to readers of the host: number of late frames.
//!
//! The paper's outlook (section VI): soft real time, and more than one VM on the device. Each guest
//! reads 24 frames of 256 KiB a second through a buffer of three seconds.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use rtvirtio_apply::Raised;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::qemu::{DiskRegion, GUEST_DISK, GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::starts::{Change, LARGEST_WEIGHT, Raise};
use serde::{Deserialize, Serialize};

use super::cell::{DISK, Load, Plane};
use super::load::HostReaders;
use crate::backend::Backend;
use crate::guest;
use crate::iod_startup::{Tuning, tuned_device};
use rtvirtio_harness::test_bed::TestBed;

/// Program in the guest.
const PROGRAM: &str = "rtvirtio-guestload";
/// Rate of each VM, bytes/s: 24 times 256 KiB.
const RATE: f64 = 24.0 * 262_144.0;
/// Size of the I/O domain's pieces, bytes.
const PIECE: u64 = 64 << 10;
/// Largest reservation of each player that the I/O domain admits with the other's, in percent of
/// the device: it admits 95 at most.
const LARGEST_SHARE: f64 = 47.0;
/// Time limit beyond the length of the video, under load and emulation.
const EXTRA_TIMEOUT: Duration = Duration::from_secs(120);
/// Index of the group of the host's readers, after those of the two VMs.
const READERS: usize = 2;

/// Frames played by one VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Frames {
    /// Frames that were played.
    pub frames: u64,
    /// Frames that were read after they were due.
    pub late: u64,
    /// Longest lateness of a frame, ms.
    pub worst_ms: f64,
    /// Time until the buffer was full for the first time, ms.
    pub filled_ms: f64,
}

/// Frames of both VMs next to a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Video {
    /// The device, such as `emmc`.
    pub device: String,
    /// Way in which the VMs are served.
    pub plane: Plane,
    pub host_load: String,
    /// Frames of each VM.
    pub vms: Vec<Frames>,
}

/// Two guests of a plane, with the backends that serve them.
struct Players<'a> {
    guests: Vec<QemuGuest>,
    raise: Option<Raise>,
    domain: Option<Backend>,
    dir: &'a Path,
}

fn socket(dir: &Path, disk: usize) -> PathBuf {
    dir.join(format!("disk{disk}.sock"))
}

/// Share of the device's time that a player needs, by the declared costs.
fn share(tuning: &Tuning) -> f64 {
    let (base, per_mib) = (tuning.read.0.as_secs_f64(), tuning.read.1.as_secs_f64());
    RATE / PIECE as f64 * (base + per_mib * PIECE as f64 / f64::from(1 << 20))
}

/// Configuration of the I/O domain: a reservation for each player a quarter above its need, or the
/// largest that it admits, and a disk for the readers.
fn config(tuning: &Tuning, device: &Path, dir: &Path) -> String {
    let share = (share(tuning) * 125.0).ceil().min(LARGEST_SHARE);
    let mut s = tuned_device(tuning, dir);
    let _ = writeln!(s, "policy = \"edf\"\nwindow = 1\nquantum = \"{PIECE}B\"");
    for disk in 0..=READERS {
        // The readers share the second player's part: they only read.
        let offset = disk.min(1) as u64 * DISK;
        let _ = write!(
            s,
            "[[device.disk]]\nname = \"disk{disk}\"\nsocket = {:?}\npath = {:?}\noffset = \"{offset}B\"\nsize = \"{DISK}B\"\nshared = true\nformat = \"raw\"\n",
            socket(dir, disk).display().to_string(),
            device.display().to_string(),
        );
        if disk < READERS {
            let _ = writeln!(s, "reserve = {{ share = \"{share}%\", burst = \"200ms\", deadline = \"1s\" }}");
        }
    }
    s
}

impl<'a> Players<'a> {
    fn boot(
        bed: &TestBed<'_>,
        plane: Plane,
        tuning: Option<&Tuning>,
        dir: &'a Path,
        labs: &LabHost,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        let (device, _) = bed.without_elevator()?;
        let mut players = Self { guests: Vec::new(), raise: None, domain: None, dir };
        if plane == Plane::Domain {
            let tuning = tuning.context("the device's service times are not known")?;
            players.domain = Some(Backend::start_domain(dir, &config(tuning, &device, dir))?);
        } else {
            bed.renew_elevator("bfq")?;
        }
        let image = labs.guest_image(Kernel::Standard, progress)?;
        let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
        progress.step(&format!("booting two guests, plane {plane}"));
        for vm in 0..READERS {
            let disk = match plane {
                Plane::Domain => GuestDisk::VhostUser { socket: socket(dir, vm), queues: Some(1) },
                _ => DiskRegion { path: device.clone(), offset: Bytes(vm as u64 * DISK), size: Bytes(DISK) }
                    .into(),
            };
            // Under the I/O domain the groups have no effect.
            let group = if plane == Plane::Default { READERS } else { vm };
            let config = QemuConfig {
                accel,
                cgroup_procs: vec![bed.cgroup_procs(group)?],
                ..QemuConfig::new(&format!("player{vm}"), image.clone(), disk, &dir.join("run"))
            };
            let mut guest = QemuGuest::start(&config)?;
            let path = guest::program(PROGRAM)?;
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            let there = format!("/usr/bin/{PROGRAM}");
            guest.write_file(&there, &bytes)?;
            guest::run_command(&mut guest, &["chmod", "755", &there])?;
            guest.write_file("/sys/block/vda/queue/scheduler", b"none")?;
            players.guests.push(guest);
        }
        if plane == Plane::Kernel {
            let names = ["vm0", "vm1"];
            let raised = Raised { weight: LARGEST_WEIGHT, slice_idle: None };
            let mut raise = Raise::begin(&names, raised, &bed.binding()?, bed.dirs())?;
            for name in names {
                ensure!(raise.set(name, true)? == Change::Done, "the weight of {name} was not raised");
            }
            players.raise = Some(raise);
        }
        Ok(players)
    }

    /// Plays in both VMs at once.
    fn play(
        &mut self,
        bed: &TestBed<'_>,
        load: &Load,
        seconds: u64,
        progress: &dyn Progress,
    ) -> anyhow::Result<Vec<Frames>> {
        let readers = if self.domain.is_some() {
            HostReaders::on_domain(load, &socket(self.dir, READERS))?
        } else {
            let device = bed.path().display().to_string();
            HostReaders::on_device(load, &device, &[bed.cgroup_procs(READERS)?])?
        };
        progress.pause(Duration::from_secs(2))?;
        let (span, seconds_text) = (DISK.to_string(), seconds.to_string());
        let argv = [PROGRAM, "video", GUEST_DISK, "0", &span, &seconds_text];
        let mut processes = Vec::new();
        for guest in &mut self.guests {
            processes.push(guest.spawn(&argv)?);
        }
        let mut all = Vec::new();
        for (guest, process) in self.guests.iter_mut().zip(processes) {
            let timeout = Duration::from_secs(seconds) + EXTRA_TIMEOUT;
            let output = guest::wait_for_exit(guest, process, timeout, progress, &mut || Ok(()))?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            all.push(read_frames(&text).with_context(|| format!("the guest printed {text:?}: {why}"))?);
        }
        readers.end()?;
        Ok(all)
    }

    fn end(mut self) -> anyhow::Result<()> {
        if let Some(raise) = self.raise.take() {
            raise.end()?;
        }
        for guest in self.guests.drain(..) {
            guest.stop()?;
        }
        Ok(())
    }
}

/// Parses the output of the guest's program.
fn read_frames(text: &str) -> Option<Frames> {
    let fields: Vec<&str> = text.split_whitespace().collect();
    let [frames, late, worst, filled] = fields.as_slice() else { return None };
    Some(Frames {
        frames: frames.parse().ok()?,
        late: late.parse().ok()?,
        worst_ms: worst.parse().ok()?,
        filled_ms: filled.parse().ok()?,
    })
}

/// Plays under each plane next to each of its loads. `on_run` is called with each result.
#[expect(clippy::too_many_arguments, reason = "what is measured, where, and who hears of it")]
pub fn measure(
    bed: &TestBed<'_>,
    tuning: Option<&Tuning>,
    what: &[(Plane, Vec<String>)],
    seconds: u64,
    dir: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
    on_run: &mut dyn FnMut(Video) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if let Some(tuning) = tuning {
        let needed = 2.0 * share(tuning);
        ensure!(
            needed < 0.9,
            "{}: two videos take {:.0} % of its time: name another device, or leave --video out",
            bed.device.name,
            needed * 100.0
        );
    }
    for (plane, loads) in what {
        // Sockets of one plane are not reused by the next.
        let dir = dir.join(format!("video-{plane}"));
        std::fs::create_dir(&dir)?;
        let mut players = Players::boot(bed, *plane, tuning, &dir, labs, progress)?;
        for host_load in loads {
            let load = Load::of_host(host_load).with_context(|| format!("no host load `{host_load}`"))?;
            progress.step(&format!("two videos of {seconds} s, plane {plane}, host {host_load}"));
            let vms = players.play(bed, &load, seconds, progress)?;
            let (device, host_load) = (bed.device.name.clone(), host_load.clone());
            on_run(Video { device, plane: *plane, host_load, vms })?;
        }
        players.end()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    /// Tuning of the emulated eMMC.
    fn tuning() -> Tuning {
        Tuning {
            quantum: Bytes::from_kib(16),
            urgent_quantum: Bytes::from_kib(128),
            window: 1,
            read: (Nanos(200_000), Nanos(13_000_000)),
            write: (Nanos(600_000), Nanos(42_000_000)),
            stall: Nanos(30_000_000),
        }
    }

    #[test]
    fn the_players_have_what_they_need_and_the_readers_the_rest() {
        // 96 pieces a second of 0.2 ms and 64 KiB at 13 ms a MiB.
        let needed = share(&tuning());
        assert!((needed - 96.0 * (0.000_2 + 0.013 / 16.0)).abs() < 1e-9, "{needed}");
        let text = config(&tuning(), Path::new("/dev/loop0"), Path::new("/run/x"));
        let file = rtvirtio_domain_config::File::parse(Path::new("x"), &text).unwrap();
        let sched = file.devices[0].sched();
        assert_eq!(sched.vms.len(), 3);
        assert!(sched.vms[0].normal.is_some() && sched.vms[1].normal.is_some());
        assert!(sched.vms[2].normal.is_none());
    }

    #[test]
    fn frames_are_read_from_what_is_printed() {
        let frames = read_frames("480 3 12.5 900.125\n").unwrap();
        assert_eq!((frames.frames, frames.late, frames.worst_ms, frames.filled_ms), (480, 3, 12.5, 900.125));
        assert!(read_frames("480 3\n").is_none());
    }
}
