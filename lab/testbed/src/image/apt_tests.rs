use super::*;

#[test]
fn policy_of_several_packages() {
    let text = "fio:\n  Installed: 3.33-3\n  Candidate: 3.33-3\n  Version table:\n *** 3.33-3 500\n\
                linux-image-6.1.0-56-cloud-amd64:\n  Installed: (none)\n  Candidate: 6.1.192-2\n\
                mawk:\n  Installed: (none)\n  Candidate: (none)\n";
    assert_eq!(parse_candidate(text, "fio").as_deref(), Some("3.33-3"));
    assert_eq!(parse_candidate(text, "linux-image-6.1.0-56-cloud-amd64").as_deref(), Some("6.1.192-2"));
    assert_eq!(parse_candidate(text, "mawk"), None);
    assert_eq!(parse_candidate(text, "absent"), None);
}

#[test]
fn alternatives_architectures_and_virtual_packages() {
    let text = "fio\n  Depends: libaio1\n |Depends: debconf\n  Depends: <debconf-2.0>\n    cdebconf\n  PreDepends: libc6:any\n";
    assert_eq!(parse_depends(text), ["libaio1", "debconf", "libc6"]);
}

#[test]
fn unknown_package_says_update() {
    let error = candidates(&["rtvirtio-no-such-package"]).unwrap_err();
    assert!(error.to_string().contains("apt-get update"), "{error}");
    let error = resolve("rtvirtio-no-such-package").unwrap_err();
    assert!(error.to_string().contains("rtvirtio-no-such-package"), "{error}");
}
