//! Keeps fio from busy waiting: a shared object that `LD_PRELOAD` puts in front of the C library's
//! `nanosleep`.
//!
//! At its start fio measures how long a sleep of a microsecond takes, ten times, and takes the
//! *longest* for the system's granularity. Every later wait that is shorter it spends spinning
//! (`fio_time_init` and `usec_sleep` in fio's time.c). One unlucky sleep on a busy host or in an
//! emulated guest, and fio never sleeps again: it then measures the processor that it wastes
//! itself.
//!
//! Here those ten sleeps take no time. Should even then a part of the calibration take long,
//! because the processor was given to another process meanwhile, fio is executed again from the
//! start: it has done nothing yet. All other sleeps are real, and end when they should: the
//! thread's timer slack, 50 us by default, is set to its least (`PR_SET_TIMERSLACK` in prctl(2);
//! threads that are created later inherit it).
//!
//! Built by `build.rs`; no part of any crate, so it needs nothing but a C library.

#![no_std]

use core::ffi::{c_char, c_int, c_long, c_ulong};
use core::ptr;
use core::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, Ordering};

#[repr(C)]
pub struct Timespec {
    seconds: i64,
    nanoseconds: c_long,
}

unsafe extern "C" {
    fn clock_gettime(clock: c_int, now: *mut Timespec) -> c_int;
    fn clock_nanosleep(clock: c_int, flags: c_int, request: *const Timespec, left: *mut Timespec) -> c_int;
    fn __errno_location() -> *mut c_int;
    fn prctl(option: c_int, arg2: c_ulong, arg3: c_ulong, arg4: c_ulong, arg5: c_ulong) -> c_int;
    fn getenv(name: *const c_char) -> *const c_char;
    fn setenv(name: *const c_char, value: *const c_char, overwrite: c_int) -> c_int;
    fn execv(path: *const c_char, argv: *const *const c_char) -> c_int;
    fn abort() -> !;
}

const CLOCK_REALTIME: c_int = 0;
const CLOCK_MONOTONIC: c_int = 1;
const PR_SET_TIMERSLACK: c_int = 29;
/// Length of fio's calibration sleeps, and their number. fio may request as short a sleep later;
/// that one is real.
const CALIBRATION_NS: c_long = 1_000;
const CALIBRATION_SLEEPS: u32 = 10;
/// Longest time from one of these sleeps to the next. An emulated processor takes 0.03 to 0.14 ms;
/// fio then spins for as long at the end of each wait.
const UNDISTURBED_NS: i64 = 300_000;
/// Environment variable that counts the attempts by a letter; the last attempt is used as it is.
const ATTEMPT: &core::ffi::CStr = c"RTVIRTIO_FIO_ATTEMPT";
const FIRST_ATTEMPT: u8 = b'a';
const LAST_ATTEMPT: u8 = b'h';

/// Time of fio's last calibration sleep, in ns; zero before the first.
static LAST: AtomicI64 = AtomicI64::new(0);
/// Number of calibration sleeps so far.
static SLEEPS: AtomicU32 = AtomicU32::new(0);
/// The program's arguments; null where the C library does not pass them to initialisers (musl).
static ARGV: AtomicPtr<*const c_char> = AtomicPtr::new(ptr::null_mut());

extern "C" fn at_load(_argc: c_int, argv: *const *const c_char, _env: *const *const c_char) {
    // An emulated processor has to translate code that it runs for the first time; better now than
    // while fio looks.
    for _ in 0..2 {
        calibration();
    }
    LAST.store(0, Ordering::Relaxed);
    // Back to the default (prctl(2)): the least slack shows that fio's own calls came through here.
    // SAFETY: prctl with this option takes one number.
    unsafe { prctl(PR_SET_TIMERSLACK, 0, 0, 0, 0) };
    if cfg!(target_env = "gnu") {
        ARGV.store(argv.cast_mut(), Ordering::Relaxed);
    }
}

/// glibc calls what this section lists, with the arguments of `main`, before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = at_load;

/// nanosleep(2), but for fio's calibration.
///
/// # Safety
/// As nanosleep(2): `request` is readable, `left` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nanosleep(request: *const Timespec, left: *mut Timespec) -> c_int {
    // SAFETY: the caller vouches for `request`.
    if unsafe { (*request).seconds == 0 && (*request).nanoseconds == CALIBRATION_NS }
        && SLEEPS.fetch_add(1, Ordering::Relaxed) < CALIBRATION_SLEEPS
    {
        calibration();
        return 0;
    }
    // SAFETY: the same pointers as the caller's; errno is the thread's own.
    unsafe {
        match clock_nanosleep(CLOCK_REALTIME, 0, request, left) {
            0 => 0,
            error => {
                *__errno_location() = error;
                -1
            }
        }
    }
}

fn calibration() {
    let mut now = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: `now` is writable; prctl with this option takes one number.
    unsafe {
        clock_gettime(CLOCK_MONOTONIC, &mut now);
        prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    }
    let now = now.seconds * 1_000_000_000 + now.nanoseconds;
    let last = LAST.swap(now, Ordering::Relaxed);
    if last != 0 && now - last > UNDISTURBED_NS {
        start_again();
    }
}

/// Executes the program anew, as the same process; returns when that cannot be done or has been
/// done often enough.
fn start_again() {
    let argv = ARGV.load(Ordering::Relaxed);
    if argv.is_null() {
        return;
    }
    // SAFETY: fio has one thread when it calibrates, so nothing changes the environment meanwhile.
    // A value that getenv gives has at least its final zero. `argv` is what the program was started
    // with.
    unsafe {
        let before = getenv(ATTEMPT.as_ptr());
        let attempt = if before.is_null() { FIRST_ATTEMPT } else { *before.cast::<u8>() };
        if (FIRST_ATTEMPT..LAST_ATTEMPT).contains(&attempt) {
            setenv(ATTEMPT.as_ptr(), [attempt + 1, 0].as_ptr().cast(), 1);
            execv(c"/proc/self/exe".as_ptr(), argv);
        }
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the process, never returns.
    unsafe { abort() }
}
