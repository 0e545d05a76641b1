//! Specs of one device: the name of the file in errors, and the kernels of guests.

use rtvirtio_spec::Kernel;

#[test]
fn a_file_name_cannot_steer_the_terminal() {
    let errors = rtvirtio_spec::parse("a\u{1b}[2J.toml", "").unwrap_err();
    assert!(!errors.to_string().contains('\u{1b}'));
}

#[test]
fn a_guest_has_the_kernel_that_it_asks_for() {
    let vm = |name: &str, kernel: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\nlab = \"qemu\"\n{kernel}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        )
    };
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n{}{}{}",
        vm("a", ""),
        vm("b", "kernel = \"standard\""),
        vm("c", "kernel = \"rt\"")
    );
    let spec = rtvirtio_spec::parse("x.toml", &text).unwrap();
    let kernels: Vec<Kernel> = spec.vms.iter().map(|vm| vm.kernel).collect();
    assert_eq!(kernels, [Kernel::Standard, Kernel::Standard, Kernel::Rt]);
}
