//! `rtvirtio-iod`: the I/O domain's process.

mod control;
mod manager;
mod sandbox;
mod trace;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use rtvirtio_arguments::{Section, print};
use rtvirtio_domain_config::File;
use rtvirtio_domain_resources::check::{self, Directories};
use rtvirtio_domain_resources::doubts;
use rtvirtio_domain_resources::handover::Passed;
use rtvirtio_engine::confine::Role;
use rtvirtio_engine::domain::OpenedDomain;
use rtvirtio_engine::end::EndLimit;
use rtvirtio_engine::log::write_line;
use rustix::mm::MlockAllFlags;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::control::{Control, Served, reload};
use crate::manager::Manager;
use crate::sandbox::Sandbox;

/// Longest time from a signal to the end, for requests at devices: well below that of systemd, 90
/// s.
const END: Duration = Duration::from_secs(10);

/// Serves disks and network cards of VMs over vhost-user; schedules every request and frame.
#[derive(Debug, Parser)]
#[command(
    name = "rtvirtio-iod",
    version,
    after_help = "EXAMPLES\n  rtvirtio-iod --config /etc/rtvirtio/iod.toml --check     check the file\n  rtvirtio-iod --config /etc/rtvirtio/iod.toml\n\n\
    `rtvirtio iod` reads its status, reloads its file, attaches and detaches disks, and stops it.\n\n\
    QEMU connects with (before 9.2: reconnect=1)\n  -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem\n  -chardev socket,id=c0,path=/run/vm0.sock,reconnect-ms=20 -device vhost-user-blk-pci,chardev=c0"
)]
struct Args {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Check what a start checks (the file, disks, formats, sockets, groups), change nothing, and
    /// end
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    let args: Args = match rtvirtio_arguments::parse(Section::Admin) {
        Ok(args) => args,
        Err(code) => return code,
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            write_line(describe(&e));
            ExitCode::FAILURE
        }
    }
}

/// Text of an error with its causes, each once: many errors contain the text of their cause.
fn describe(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn run(args: &Args) -> anyhow::Result<()> {
    let file = File::load(&args.config)?;
    if args.check {
        let disks: usize = file.devices.iter().map(|d| d.disks.len()).sum();
        let notes = check::check(&file, &args.config, Directories::MustExist)?;
        let path = args.config.display();
        let mut text = String::new();
        if !file.devices.is_empty() || file.networks.is_empty() {
            text += &format!("{path}: {} devices, {disks} disks\n", file.devices.len());
        }
        if !file.networks.is_empty() {
            let ports: usize = file.networks.iter().map(|n| n.ports.len()).sum();
            text += &format!("{path}: {} networks, {ports} ports\n", file.networks.len());
        }
        text.extend(notes.iter().map(|note| format!("{note}\n")));
        return Ok(print(&text)?);
    }
    // Files and sockets are created for this user only, unless another mode is set explicitly.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signals")?;
    // Each guest passes file descriptors: memory, kicks, calls.
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, files);
    // Order: open everything with a path, confine the process, start threads.
    check::refuse_collisions(&file, &args.config)?;
    let opened = OpenedDomain::open(&file)?;
    warn_of_formats(&file);
    doubts::warnings(&file).iter().for_each(write_line);
    let mut control = Control::bind(&file.control, file.control_group.as_deref())?;
    let manager = Manager::connect();
    let sandbox = Sandbox::enter(&file, &args.config)?;
    let confine = sandbox.confine()?;
    // Threads inherit the mask, so that this thread gets all signals.
    mask_signals(libc::SIG_BLOCK).context("signals")?;
    // What is there is read in; later memory when it is first used, since that of guests that have
    // connected by then is not ours to fill.
    let locked = rustix::mm::mlockall(MlockAllFlags::CURRENT);
    let domain = opened.start(&confine)?;
    // Memory that depends on guests' requests is reserved by now, and locked when it is first used.
    let all = rustix::mm::mlockall(MlockAllFlags::CURRENT | MlockAllFlags::ONFAULT);
    if let Err(e) = locked.and(all) {
        write_line(format_args!("memory is not locked and may be swapped out ({e}); raise LimitMEMLOCK"));
    }
    let running = domain.running();
    let served = Served {
        engines: domain.handles(),
        running: running.clone(),
        config: std::path::absolute(&args.config).unwrap_or_else(|_| args.config.clone()),
        end: signals.handle(),
    };
    control.serve(served, &confine)?;
    manager.watch(running.liveness(), &confine)?;
    let end = EndLimit::start(running.clone(), END, &confine).context("cannot confine a thread")?;
    mask_signals(libc::SIG_UNBLOCK).context("signals")?;
    confine.apply(Role::Control).context("cannot confine the main thread")?;
    write_line(sandbox.describe(&file, domain.is_ring_restricted()));
    // The parent may be gone, and with it the pipe's reading end; guests are served even so.
    let mut out = std::io::stdout();
    let _ = writeln!(out, "ready").and_then(|()| out.flush());
    manager.notify(&[NotifyState::Ready]);
    for signal in signals.forever() {
        if signal != SIGHUP {
            break;
        }
        // The result is in the log.
        let _ = reload(&running, &args.config, Passed::default(), false);
    }
    manager.notify(&[NotifyState::Stopping]);
    end.begin();
    drop(control);
    drop(domain);
    Ok(())
}

/// Warns of disks without a declared format: a guest may write an image's signature there, and the
/// next start would refuse the disk.
fn warn_of_formats(file: &File) {
    let undeclared = file.devices.iter().flat_map(|d| &d.disks).filter(|d| d.format.is_none());
    let names: Vec<&str> = undeclared.map(|d| d.name.as_str()).collect();
    if !names.is_empty() {
        write_line(format_args!(
            "no format is declared for {}: a guest that writes an image's first bytes prevents the next start; set `format = \"raw\"`",
            names.join(", ")
        ));
    }
}

/// Blocks or unblocks the handled signals in the calling thread, and in threads that it starts
/// later.
fn mask_signals(how: libc::c_int) -> std::io::Result<()> {
    // SAFETY: the set is local, emptied before use, and not kept by any of the calls.
    let done = unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            libc::sigaddset(&mut set, signal);
        }
        libc::pthread_sigmask(how, &set, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(done)) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Args::command());
    }
}
