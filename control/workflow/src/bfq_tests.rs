use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rtvirtio_kernel::BlockDevice;

use super::*;
use crate::fixtures::put;
use crate::progress::Quiet;

/// Records warnings.
#[derive(Default)]
struct Warned(Quiet, Mutex<Vec<String>>);

impl Progress for Warned {
    fn warn(&self, text: &str) {
        self.1.lock().unwrap().push(text.to_owned());
    }
    fn cancel_flag(&self) -> &AtomicBool {
        self.0.cancel_flag()
    }
}

#[test]
fn a_device_without_bfq_is_named_with_the_remedy() {
    let (_dir, root) = crate::fixtures::root();
    let disk = BlockDevice { name: "sdz".to_owned(), dev: "8:16".to_owned(), partition: None };
    let stack = Stack { device: disk.clone(), disks: vec![disk.clone()], notes: Vec::new() };
    let warned = |offered: &str| {
        put(&root, disk.queue("scheduler"), offered);
        let progress = Warned::default();
        load_or_warn(&stack, &root, &progress);
        progress.1.into_inner().unwrap()
    };
    assert_eq!(warned("mq-deadline [none] bfq\n"), [""; 0]);
    let lines = warned("mq-deadline [none]\n");
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in ["the plan does without BFQ", "sdz", "modprobe bfq"] {
        assert!(lines[0].contains(part), "{part}: {lines:?}");
    }
}

#[test]
fn a_module_is_found_by_its_name_alone() {
    let (_dir, root) = crate::fixtures::root();
    assert!(!has_module(&root, "6.1.0", "bfq"));
    let list =
        "kernel/block/kyber-iosched.ko.xz:\nkernel/block/bfq.ko.xz: kernel/x/a.ko.xz\nkernel/x/a.ko:\n";
    put(&root, "/lib/modules/6.1.0/modules.dep", list);
    for (module, found) in
        [("bfq", true), ("a", true), ("kyber-iosched", true), ("kyber", false), ("x", false)]
    {
        assert_eq!(has_module(&root, "6.1.0", module), found, "{module}");
    }
    assert!(!has_module(&root, "6.2.0", "bfq"));
}
