use std::path::PathBuf;

use super::*;

#[test]
fn emulation_failure_is_named() {
    let text = "qemu: warning\nKVM internal error. Suberror: 1\nemulation failure\nEAX=0000 EBX=0000\n";
    assert_eq!(internal_error(text), "KVM internal error. Suberror: 1 (emulation failure)");
    let text = "KVM internal error. Suberror: 3\nextra data[0]: 0x80000b0e\n";
    assert_eq!(internal_error(text), "KVM internal error. Suberror: 3 (extra data[0]: 0x80000b0e)");
    assert_eq!(
        internal_error("KVM internal error. Suberror: 1\nRAX=1 RBX=2\n"),
        "KVM internal error. Suberror: 1"
    );
}

#[test]
fn last_lines_skip_empty_ones() {
    assert_eq!(last_lines("a\n\nb\nc\r\n\n", 2), "b; c");
    assert_eq!(last_lines("\n\n", 2), "");
}

#[test]
fn missing_kernel_is_not_a_broken_kvm() {
    if fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        return rtvirtio_testkit::skip("missing_kernel_is_not_a_broken_kvm", "no /dev/kvm that opens");
    }
    let error =
        probe_kvm(&PathBuf::from("/nonexistent/vmlinuz"), &PathBuf::from("/nonexistent/initrd")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/vmlinuz"), "{error}");
}

#[test]
fn no_qemu_says_what_to_install() {
    let error = boot("/nonexistent/qemu", Path::new("k"), Path::new("i")).unwrap_err();
    assert!(error.to_string().contains("install the package qemu-system-x86"), "{error}");
}
