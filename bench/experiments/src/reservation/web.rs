//! Clients of a guest's web server.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use super::FILE_BYTES;
use rtvirtio_measure::http::{self, Request, Url};
use rtvirtio_testbed::qemu::{GUEST_PORT, QemuGuest};

use crate::guest;
use rtvirtio_workflow::{Error, Progress};

/// The file that the guest serves.
const FILE: &str = "/srv/file";
/// File of the ids of processes that compute without end.
const SPINNING: &str = "/run/spinning";

/// A free port of the loopback interface. When another process takes it before QEMU does, QEMU
/// fails.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Sets a guest's address in QEMU's user network, which is fixed; may be repeated.
pub const USER_NETWORK: &str =
    "ip link set lo up && ip addr replace 10.0.2.15/24 dev eth0 && ip link set eth0 up";

/// Starts a web server in a guest on QEMU's user network.
pub fn serve(vm: &mut QemuGuest) -> anyhow::Result<()> {
    let script = format!(
        "{USER_NETWORK} && mkdir -p /srv && \
         dd if=/dev/zero of={FILE} bs={FILE_BYTES} count=1 2>/dev/null && httpd -p {GUEST_PORT} -h /srv"
    );
    guest::run_command(vm, &["sh", "-c", &script])?;
    Ok(())
}

/// Lets every vCPU of a guest compute without end, in addition to serving.
pub fn spin(vm: &mut QemuGuest, vcpus: u16) -> anyhow::Result<()> {
    let script = format!(
        "for i in $(seq {vcpus}); do setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 & echo $!; done >{SPINNING}"
    );
    guest::run_command(vm, &["sh", "-c", &script])?;
    Ok(())
}

/// Kills the processes that compute.
pub fn stop_spinning(vm: &mut QemuGuest) -> anyhow::Result<()> {
    guest::run_command(vm, &["sh", "-c", &format!("kill -9 $(cat {SPINNING})")])?;
    Ok(())
}

/// A request for the file that the guest behind this port serves.
pub fn request(port: u16) -> Request {
    Request::new(Url::local(port, "/file")).expecting(FILE_BYTES)
}

/// Sends `n` requests, one each `period`: [`http::periodic`]. Cancellation is an error.
pub fn periodic(
    port: u16,
    n: usize,
    period: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<(Vec<f64>, usize)> {
    match http::periodic(&request(port), n, period, progress.cancel_flag())? {
        Some(answers) => Ok(answers),
        None => Err(Error::cancelled().into()),
    }
}
