use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use super::*;

fn quiet(_: &str) {}

/// A build with the files of `finish`, without packages.
fn small_build(work: &Path) -> Result<String, ImageError> {
    fs::create_dir(work.join(apt::UNPACKED)).unwrap();
    fs::write(work.join("vmlinuz"), "kernel").unwrap();
    let mut tree = Tree::default();
    tree.data("init", b"#!/bin/sh\n".to_vec(), 0o755);
    tree.write(&work.join("initrd.cpio"))?;
    Ok("6.1.0-test".into())
}

#[test]
fn image_is_built_once_also_by_four_at_once() {
    let cache = rtvirtio_testkit::tempdir().unwrap();
    let builds = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let image = build_once(cache.path(), "guest", &Key::new(7), &quiet, &mut |work| {
                    builds.fetch_add(1, Ordering::Relaxed);
                    small_build(work)
                });
                assert_eq!(image.unwrap().release, "6.1.0-test");
            });
        }
    });
    assert_eq!(builds.load(Ordering::Relaxed), 1);
    let mut names: Vec<_> =
        fs::read_dir(cache.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let name = format!("guest-{}", Key::new(7).hex());
    assert_eq!(names, [name.as_str(), "lock"]);
    assert!(!cache.path().join(name).join(apt::UNPACKED).exists());
}

#[test]
fn failed_build_leaves_nothing_and_the_next_one_works() {
    let cache = rtvirtio_testkit::tempdir().unwrap();
    let failed = build_once(cache.path(), "guest", &Key::new(7), &quiet, &mut |work| {
        fs::write(work.join("vmlinuz"), "half").unwrap();
        Err(ImageError::NoPackage { package: "p".into() })
    });
    assert!(failed.is_err());
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1, "only the lock stays");
    // Files of a killed build: the next build removes them and does not use them.
    fs::create_dir(cache.path().join("build-killed")).unwrap();
    let target = cache.path().join(format!("guest-{}", Key::new(7).hex()));
    fs::create_dir(&target).unwrap();
    fs::write(target.join("vmlinuz"), "half").unwrap();
    let image = build_once(cache.path(), "guest", &Key::new(7), &quiet, &mut small_build).unwrap();
    assert_eq!(fs::read(image.kernel).unwrap(), b"kernel");
    assert!(!cache.path().join("build-killed").exists());
}

#[test]
fn old_images_of_the_same_kind_go() {
    let cache = rtvirtio_testkit::tempdir().unwrap();
    let old = std::time::SystemTime::now() - OLD_AGE - Duration::from_secs(60);
    for (name, aged) in
        [("guest-old", true), ("guest-young", false), ("box-old", true), ("rt-guest-old", true)]
    {
        let dir = cache.path().join(name);
        fs::create_dir(&dir).unwrap();
        let manifest = fs::File::create(dir.join(MANIFEST)).unwrap();
        if aged {
            manifest.set_modified(old).unwrap();
        }
    }
    build_once(cache.path(), "guest", &Key::new(7), &quiet, &mut small_build).unwrap();
    assert!(!cache.path().join("guest-old").exists());
    for other in ["guest-young", "box-old", "rt-guest-old"] {
        assert!(cache.path().join(other).exists(), "{other}");
    }
    assert_eq!(kind_name("guest", Kernel::Rt), "rt-guest");
}

#[test]
fn unwritable_cache_is_named() {
    let error = ensure(Path::new("/proc/rtvirtio"), &quiet).unwrap_err();
    assert!(error.to_string().contains("/proc/rtvirtio"), "{error}");
}

#[test]
fn missing_program_says_what_to_do() {
    let error = run(&mut Command::new("rtvirtio-no-such-tool"), "install it").unwrap_err();
    assert!(
        matches!(error, ImageError::NoTool { .. }) && error.to_string().ends_with("install it"),
        "{error}"
    );
    let error = run(Command::new("ls").arg("/nonexistent"), "").unwrap_err();
    assert!(error.to_string().contains("ls /nonexistent failed: "), "{error}");
}

#[test]
fn key_depends_on_every_part_and_on_where_it_ends() {
    let key = |parts: &[&str]| {
        let mut key = Key::new(1);
        parts.iter().for_each(|p| key.add(p));
        key.hex()
    };
    assert_eq!(key(&["ab", "c"]), key(&["ab", "c"]));
    assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
    assert_ne!(key(&["ab"]), key(&["ab", ""]));
}

#[test]
fn image_of_debians_packages() {
    let cache = default_cache();
    let said = RefCell::new(Vec::new());
    let image = ensure(&cache, &|line| said.borrow_mut().push(line.to_owned())).unwrap();
    assert!(image.release.ends_with("-cloud-amd64"), "{}", image.release);
    // The image is found without a build.
    said.borrow_mut().clear();
    assert_eq!(ensure(&cache, &|line| said.borrow_mut().push(line.to_owned())).unwrap(), image);
    assert!(said.borrow().is_empty());
    assert!(fs::metadata(&image.initrd).unwrap().len() > 10 << 20);
}
