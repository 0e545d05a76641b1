//! CPU load of other programs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Period in which a part-time thread runs and sleeps.
const DUTY: Duration = Duration::from_millis(20);

/// Threads that use CPUs until this is dropped.
pub(crate) struct Busy(Arc<AtomicBool>, Vec<std::thread::JoinHandle<()>>);

impl Busy {
    /// Threads that use so many CPUs, the last one part of its time.
    pub fn start(cpus: f64) -> std::io::Result<Self> {
        let mut busy = Self(Arc::default(), Vec::new());
        for n in 0..cpus.ceil() as usize {
            let (stop, share) = (Arc::clone(&busy.0), (cpus - n as f64).min(1.0));
            let spin = move || {
                while !stop.load(Ordering::Relaxed) {
                    let begin = Instant::now();
                    while begin.elapsed() < DUTY.mul_f64(share) {
                        std::hint::spin_loop();
                    }
                    std::thread::sleep(DUTY.mul_f64(1.0 - share));
                }
            };
            busy.1.push(std::thread::Builder::new().name("busy".to_owned()).spawn(spin)?);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.drain(..).for_each(|thread| drop(thread.join()));
    }
}
