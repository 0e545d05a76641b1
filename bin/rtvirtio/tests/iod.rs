//! Disks of a running I/O domain come and go by its commands.

use std::path::Path;

use rtvirtio_domain_client::{Client, Options};
use rtvirtio_testkit::site::{Site, can_run, text, wait_for};

/// The table of a disk in a file of its own.
fn table(site: &Site, name: &str) -> String {
    let (dir, run) = (site.dir.path().display(), site.run_dir());
    format!(
        "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"{name}\"\nsocket = \"{}/disks/{name}.sock\"\npath = \"{dir}/{name}.img\"\n",
        run.display()
    )
}

fn names(site: &Site, control: &str) -> Vec<String> {
    let (_, status) = site.json(&["iod", "status", "--control", control]);
    let vms = status["vms"].as_array().unwrap_or_else(|| panic!("{status}"));
    vms.iter().map(|vm| vm["name"].as_str().unwrap().to_owned()).collect()
}

/// Ends the I/O domain as a crash does, and waits until that is seen.
fn crash(site: &Site) {
    let (_, status) = site.json(&["status"]);
    let pid = status["domain"]["pids"][0].as_i64().unwrap_or_else(|| panic!("{status:#}")) as i32;
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    wait_for("the domain's end", || site.json(&["status"]).1["domain"]["pids"] == serde_json::json!([]));
}

/// What was attached, and every other change of the file, outlives a crash of the I/O domain and
/// its `revert`.
#[test]
fn a_configuration_that_was_changed_outlives_its_domain() {
    let test = "a_configuration_that_was_changed_outlives_its_domain";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let source = site.domain_of_a_file();
    let source = source.to_str().unwrap();
    site.ok(&["apply", source]);
    let control = site.run_dir().join("iod.sock");
    let control = control.to_str().unwrap();
    let image = site.dir.path().join("x.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let tables = site.write("x.toml", &table(&site, "x"));
    site.ok(&["iod", "attach", &tables, "--control", control]);
    let applied = site.state_dir().join("iod.toml");
    let config = std::fs::read_to_string(&applied).unwrap();
    let again = ["apply", applied.to_str().unwrap()];

    crash(&site);
    // Status and the refusal of another file name how to start it again.
    let remedy = format!("`rtvirtio {}`", again.join(" "));
    let said = text(&site.output(&["status"]).stdout);
    assert!(said.contains("NOT RUNNING") && said.contains(&remedy), "{said}");
    let said = text(&site.output(&["apply", source]).stderr);
    assert!(said.contains(&remedy), "{said}");
    // A start that fails loses nothing.
    std::fs::rename(&image, site.dir.path().join("elsewhere")).unwrap();
    assert!(!site.output(&again).status.success());
    assert_eq!(std::fs::read_to_string(&applied).unwrap(), config);
    std::fs::rename(site.dir.path().join("elsewhere"), &image).unwrap();
    site.ok(&again);
    assert_eq!(names(&site, control), ["a", "x"]);

    crash(&site);
    let said = site.ok(&["revert"]);
    let kept = site.state_dir().join("iod.last.toml");
    assert!(said.contains(&format!("`rtvirtio apply {}`", kept.display())), "{said}");
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), config);
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    site.ok(&["apply", kept.to_str().unwrap()]);
    assert_eq!(names(&site, control), ["a", "x"]);
    // Also of one that is stopped: the file that it was applied from has another text by now.
    site.ok(&["iod", "detach", "x", "--control", control]);
    let config = std::fs::read_to_string(&applied).unwrap();
    let (_, stopped) = site.json(&["iod", "stop", "--control", control]);
    assert_eq!(stopped["kept"], kept.to_str().unwrap(), "{stopped:#}");
    assert_eq!(std::fs::read_to_string(&kept).unwrap(), config);
    // One that nobody has changed is where it came from.
    site.ok(&["apply", source]);
    crash(&site);
    let (_, reverted) = site.json(&["revert"]);
    assert_eq!(reverted["domain"], serde_json::json!({ "fate": "stopped", "pids": [] }), "{reverted:#}");
    site.assert_clean();
}

/// A disk that has grown has its new size by a reload; one that shrinks is named with what works.
#[test]
fn a_disk_grows_by_a_reload_and_never_shrinks() {
    let test = "a_disk_grows_by_a_reload_and_never_shrinks";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    site.ok(&["apply", site.domain_of_a_file().to_str().unwrap()]);
    let control = site.run_dir().join("iod.sock");
    let control = control.to_str().unwrap();
    let reload = ["iod", "reload", "--control", control];
    assert_eq!(site.ok(&reload), "nothing is new\n");
    let image = std::fs::File::options().write(true).open(site.dir.path().join("disk.img")).unwrap();
    image.set_len(32 << 20).unwrap();
    assert_eq!(site.ok(&reload), "in force: disk \"a\": size 16MiB -> 32MiB\n");
    let size = || Client::connect(&site.run_dir().join("disks/a.sock"), Options::default()).unwrap().capacity;
    assert_eq!(size(), 32 << 20);
    image.set_len(16 << 20).unwrap();
    let said = site.ok(&reload);
    assert!(
        said.contains("has 16MiB for it by now, and its guest sees 32MiB") && said.contains("detach a"),
        "{said}"
    );
    // What is named works.
    let tables = site.write("a.toml", &table(&site, "a").replace("a.img", "disk.img"));
    let detach = ["iod", "detach", "a", "--control", control];
    wait_for("the guest's end", || site.output(&detach).status.success());
    site.ok(&["iod", "attach", &tables, "--control", control]);
    assert_eq!((size(), site.ok(&reload).as_str()), (16 << 20, "nothing is new\n"));
    // A smaller size needs more than a restart, too.
    let config = site.state_dir().join("iod.toml");
    let sized =
        std::fs::read_to_string(&config).unwrap().replace("disk.img\"", "disk.img\"\nsize = \"8MiB\"");
    std::fs::write(&config, sized).unwrap();
    let said = text(&site.output(&reload).stderr);
    assert!(
        said.contains("disk \"a\": size") && said.contains("detach and attach it while its VM is off"),
        "{said}"
    );
    site.ok(&["revert", "--stop-domain"]);
    site.assert_clean();
}

#[test]
fn disks_are_attached_and_detached_and_the_domain_is_stopped() {
    let test = "disks_are_attached_and_detached_and_the_domain_is_stopped";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    site.ok(&["apply", site.domain_of_a_file().to_str().unwrap()]);
    let control = site.run_dir().join("iod.sock");
    let control = control.to_str().unwrap();
    let config = site.state_dir().join("iod.toml");
    let before = std::fs::read_to_string(&config).unwrap();
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let tables = site.write("x.toml", &table(&site, "x"));
    let attach = ["iod", "attach", &tables, "--control", control];

    // Refused as at a start; file and I/O domain are as they were.
    let said = site.refused(&attach);
    assert!(said.contains("x.img: cannot open: No such file"), "{said}");
    assert_eq!((read(&config), names(&site, control)), (before.clone(), vec!["a".to_owned()]));

    std::fs::File::create(site.dir.path().join("x.img")).unwrap().set_len(1 << 20).unwrap();
    let (code, changes) = site.json(&attach);
    assert_eq!((code, &changes["changed"][0]), (0, &"disk \"x\": attached".into()), "{changes}");
    assert_eq!(names(&site, control), ["a", "x"]);
    assert!(read(&config).contains("name = \"x\""), "the next start has it too");
    let client = Client::connect(&site.run_dir().join("disks/x.sock"), Options::default()).unwrap();

    // Neither the disk nor the I/O domain goes from under a guest.
    let detach = ["iod", "detach", "x", "--control", control];
    let (kept, said) = (read(&config), site.refused(&detach));
    assert!(said.contains("a guest is attached") && said.contains("`chardev-remove`"), "{said}");
    assert_eq!(read(&config), kept);
    let stop = ["iod", "stop", "--control", control];
    let said = site.refused(&stop);
    assert!(said.contains("serves x"), "{said}");
    assert_eq!(names(&site, control), ["a", "x"]);
    drop(client);
    wait_for("the guest's end", || site.output(&detach).status.success());
    assert_eq!((read(&config), names(&site, control)), (before, vec!["a".to_owned()]));
    assert!(site.ok(&["iod", "reload", "--dry-run", "--control", control]).contains("no disk or port would"));

    site.ok(&stop);
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    site.assert_clean();
}
