use super::*;

#[test]
fn a_module_is_found_by_its_name_alone() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    assert!(!has_module(&root, "6.1.0", "bfq"));
    std::fs::create_dir_all(root.at("/lib/modules/6.1.0")).unwrap();
    let list =
        "kernel/block/kyber-iosched.ko.xz:\nkernel/block/bfq.ko.xz: kernel/x/a.ko.xz\nkernel/x/a.ko:\n";
    std::fs::write(root.at("/lib/modules/6.1.0/modules.dep"), list).unwrap();
    for (module, found) in
        [("bfq", true), ("a", true), ("kyber-iosched", true), ("kyber", false), ("x", false)]
    {
        assert_eq!(has_module(&root, "6.1.0", module), found, "{module}");
    }
    assert!(!has_module(&root, "6.2.0", "bfq"));
}
