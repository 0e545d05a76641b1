//! Commands in a real guest.

use rtvirtio_testbed::qemu::QemuGuest;
use rtvirtio_testkit::HANG;

/// What a script in the guest prints; it has to succeed.
pub fn shell(guest: &mut QemuGuest, script: &str) -> String {
    let output = guest.exec(&["sh", "-c", script], HANG).unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.success(), "{script}: {text}");
    text
}
