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

#[test]
fn a_kernel_is_one_package_or_three() {
    let whole = |_: &str| Ok(vec!["kmod".to_owned(), "linux-base".to_owned()]);
    assert_eq!(with_parts("linux-image-6.1.0".into(), &whole).unwrap(), ["linux-image-6.1.0"]);
    // What `apt-cache depends` of Debian sid names, 2026-11.
    let parts = |package: &str| {
        let names: &[&str] = match package {
            "linux-image-7.2.13+deb14-cloud-amd64" => &[
                "linux-base",
                "dracut",
                "linux-base-7.2.13+deb14-cloud-amd64",
                "linux-binary-7.2.13+deb14-cloud-amd64",
                "linux-modules-7.2.13+deb14-cloud-amd64",
            ],
            "linux-base-7.2.13+deb14-cloud-amd64" => &[],
            _ => &["kmod", "linux-base-7.2.13+deb14-cloud-amd64", "linux-image-7.2.13+deb14-cloud-amd64"],
        };
        Ok(names.iter().map(|name| (*name).to_owned()).collect())
    };
    let found = with_parts("linux-image-7.2.13+deb14-cloud-amd64".into(), &parts).unwrap();
    let kinds = ["image", "base", "binary", "modules"];
    assert_eq!(found, kinds.map(|kind| format!("linux-{kind}-7.2.13+deb14-cloud-amd64")));
    let unknown = |package: &str| Err(ImageError::NoPackage { package: package.to_owned() });
    assert!(with_parts("linux-image-7.2".into(), &unknown).is_err());
}

#[test]
fn a_kernel_lies_in_boot_or_with_its_modules() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let packages = Packages::new(dir.path(), &|_| {});
    let error = packages.kernel().unwrap_err().to_string();
    assert!(error.contains("find a kernel"), "{error}");
    let put = |path: &str| {
        let path = dir.path().join(UNPACKED).join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, b"").unwrap();
        path
    };
    put("usr/lib/modules/7.2.13-amd64/modules.builtin");
    assert!(packages.kernel().is_err(), "modules alone are no kernel");
    let kernel = put("usr/lib/modules/7.2.13-amd64/vmlinuz");
    assert_eq!(packages.kernel().unwrap(), ("7.2.13-amd64".to_owned(), kernel));
    let kernel = put("boot/vmlinuz-6.1.0-56-amd64");
    assert_eq!(packages.kernel().unwrap(), ("6.1.0-56-amd64".to_owned(), kernel));
    // A directory that cannot be listed is no missing kernel.
    fs::remove_dir_all(dir.path().join(UNPACKED).join("boot")).unwrap();
    put("boot");
    let error = packages.kernel().unwrap_err().to_string();
    assert!(error.contains("cannot list"), "{error}");
}
