//! Clients of a guest's web server.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use rtvirtio_bench::reservation::FILE_BYTES;
use rtvirtio_measure::http::{self, Request, Url};
use rtvirtio_testbed::qemu::{GUEST_PORT, QemuGuest};

use super::guest;
use rtvirtio_console::{Cancelled, Ui};
use rtvirtio_workflow::Progress as _;

/// The file that the guest serves.
const FILE: &str = "/srv/file";
/// Processes of the guest that compute without end.
const SPINNING: &str = "/run/spinning";

/// A port of the loopback interface that nobody uses. Somebody else may take it before QEMU does, which QEMU then says.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Starts a web server in a guest whose network is QEMU's own (its addresses are QEMU's fixed ones).
pub fn serve(vm: &mut QemuGuest) -> anyhow::Result<()> {
    let script = format!(
        "ip link set lo up && ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up && mkdir -p /srv && \
         dd if=/dev/zero of={FILE} bs={FILE_BYTES} count=1 2>/dev/null && httpd -p {GUEST_PORT} -h /srv"
    );
    guest::say(vm, &["sh", "-c", &script])?;
    Ok(())
}

/// Lets every vCPU of a guest compute without end, beside what it serves.
pub fn spin(vm: &mut QemuGuest, vcpus: u16) -> anyhow::Result<()> {
    let script = format!(
        "for i in $(seq {vcpus}); do setsid sh -c 'while :; do :; done' </dev/null >/dev/null 2>&1 & echo $!; done >{SPINNING}"
    );
    guest::say(vm, &["sh", "-c", &script])?;
    Ok(())
}

/// Ends that.
pub fn stop_spinning(vm: &mut QemuGuest) -> anyhow::Result<()> {
    guest::say(vm, &["sh", "-c", &format!("kill -9 $(cat {SPINNING})")])?;
    Ok(())
}

/// A request for the file that the guest behind this port serves.
pub fn request(port: u16) -> Request {
    Request::new(Url::local(port, "/file")).expecting(FILE_BYTES)
}

/// Sends `n` requests, one each `period`: [`http::periodic`]. Ctrl-C is an error.
pub fn periodic(port: u16, n: usize, period: Duration, ui: &Ui) -> anyhow::Result<(Vec<f64>, usize)> {
    match http::periodic(&request(port), n, period, ui.cancel_flag())? {
        Some(answers) => Ok(answers),
        None => Err(Cancelled.into()),
    }
}
