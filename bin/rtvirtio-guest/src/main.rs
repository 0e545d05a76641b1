//! `rtvirtio-guest`: arguments and output.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use rtvirtio_arguments::{Section, print, print_error};
use rtvirtio_reporter::bpf::Watch;
use rtvirtio_reporter::{Device, Echo, EchoOptions, RunOptions, StartOptions, run, start};
use rtvirtio_startup::SLICE_IDLE;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Says to the host, from inside a guest, what is urgent: tasks on vCPUs, start-ups of programs.
/// Answers the frames of its verification.
#[derive(Debug, Parser)]
#[command(
    name = "rtvirtio-guest",
    version,
    after_help = "EXAMPLES\n  rtvirtio-guest start firefox                          its I/O is favoured while it starts\n  rtvirtio-guest bpf                                    report all real-time tasks, until stopped\n  \
    rtvirtio-guest run --urgent cyclictest -p 80 -D 10    one command, urgent while it runs\n  rtvirtio-guest status                                 \
    state of the urgency page\n  rtvirtio-guest echo --port 7007                       answers `rtvirtio verify --network-peer` of the host\n\nThe host has [vm.urgency] in its spec and runs `rtvirtio keep`."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer UDP datagrams, for `rtvirtio verify --network-peer` on the host
    Echo(EchoArguments),
    /// Watch the kernel's scheduler and report what each vCPU runs (needs root)
    Bpf,
    /// Run a command at a real-time priority, and report it as urgent until it ends
    Run(RunArguments),
    /// Start a command, and have this machine's I/O favoured until it has started
    Start(StartArguments),
    /// Say whether a host offers the urgency page and follows it
    Status,
}

#[derive(Args, Debug)]
struct RunArguments {
    /// The command is urgent (the default; there is no other kind yet)
    #[arg(long)]
    urgent: bool,
    /// Real-time priority in this guest, 1 to 99
    #[arg(long, value_name = "N", default_value_t = 80, value_parser = clap::value_parser!(u32).range(1..=99))]
    priority: u32,
    /// Take turns with its equals (SCHED_RR)
    #[arg(long)]
    round_robin: bool,
    /// The command with its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    argv: Vec<String>,
}

#[derive(Args, Debug)]
struct EchoArguments {
    /// The port; 7, which is the default of the host, takes root
    #[arg(long, value_name = "PORT", default_value_t = 7)]
    port: u16,
    /// For so many seconds; without an end when not given
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// Differentiated services code point of the answers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..64))]
    dscp: Option<u8>,
}

#[derive(Args, Debug)]
struct StartArguments {
    /// End of the start-up phase after so many seconds at the latest; the host's limit holds too
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Leave its I/O priority in this guest as it is (otherwise as of `ionice -c 1` meanwhile)
    #[arg(long)]
    no_ionice: bool,
    /// BFQ's slice_idle of this guest's disks meanwhile, in ms (8 otherwise; needs root); a longer
    /// one stays. 0 leaves it as it is
    #[arg(long, value_name = "MS", default_value_t = SLICE_IDLE, value_parser = clap::value_parser!(u32).range(0..=1000))]
    slice_idle: u32,
    /// The command with its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    argv: Vec<String>,
}

fn main() -> ExitCode {
    let arguments: Arguments = match rtvirtio_arguments::parse(Section::Admin) {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    let done = match arguments.command {
        Command::Echo(of) => echo(&of),
        Command::Bpf => watch(),
        Command::Run(of) => {
            let options = RunOptions { priority: of.priority, round_robin: of.round_robin };
            run(&of.argv, options)
                .map(|code| ExitCode::from(u8::try_from(code).unwrap_or(1)))
                .map_err(Into::into)
        }
        Command::Start(of) => {
            let longest = Duration::from_secs(of.seconds);
            let options = StartOptions { longest, real_time: !of.no_ionice, slice_idle: of.slice_idle };
            start(&of.argv, options, &mut |note| print_error(&format!("rtvirtio-guest: {note}")))
                .map(|code| ExitCode::from(u8::try_from(code).unwrap_or(1)))
                .map_err(Into::into)
        }
        Command::Status => status(),
    };
    done.unwrap_or_else(|e| {
        print_error(&format!("rtvirtio-guest: {e:#}"));
        ExitCode::FAILURE
    })
}

fn echo(of: &EchoArguments) -> anyhow::Result<ExitCode> {
    let length = of.seconds.map(Duration::from_secs);
    let echo = Echo::bind(EchoOptions { port: of.port, length, dscp: of.dscp })
        .map_err(|e| anyhow::anyhow!("UDP port {}: {e}", of.port))?;
    print(&format!("answering on UDP port {}\n", echo.port()?))?;
    let answers = echo.serve()?;
    print(&format!("{answers} answers\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn watch() -> anyhow::Result<ExitCode> {
    // The handlers are installed before the reporting threads start.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let watch = Watch::start()?;
    let _reporter = watch.report(Device::find()?)?;
    if let Some(why) = watch.lacks_timers() {
        print_error(&format!("rtvirtio-guest: timers are not announced: {why}"));
    }
    print("reporting what each vCPU runs; Ctrl-C ends it\n")?;
    signals.forever().next();
    Ok(ExitCode::SUCCESS)
}

fn status() -> anyhow::Result<ExitCode> {
    let device = Device::find()?;
    let region = device.region();
    let word = if region.is_served() { "followed" } else { "offered; no host process follows it now" };
    let doorbell = if region.doorbell().is_some() { "with a doorbell" } else { "no doorbell" };
    print(&format!("{}: {word}, {} vCPUs, {doorbell}\n", device.path().display(), region.vcpus()))?;
    let levels = (0..region.vcpus()).filter_map(|vcpu| Some((vcpu, region.block(vcpu)?.level())));
    for (vcpu, level) in levels.filter(|(_, level)| *level > 0) {
        print(&format!("vCPU {vcpu}: real-time priority {level} on the host\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Arguments::command());
    }
}
