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
    let tables = site.dir.path().join("x.toml");
    std::fs::write(&tables, table(&site, "x")).unwrap();
    let attach = ["iod", "attach", tables.to_str().unwrap(), "--control", control];

    // Refused as at a start; file and domain are as they were.
    let out = site.output(&attach);
    let said = text(&out.stderr);
    assert!(!out.status.success() && said.contains("x.img: cannot open: No such file"), "{said}");
    assert_eq!((read(&config), names(&site, control)), (before.clone(), vec!["a".to_owned()]));

    std::fs::File::create(site.dir.path().join("x.img")).unwrap().set_len(1 << 20).unwrap();
    let (code, changes) = site.json(&attach);
    assert_eq!((code, &changes["changed"][0]), (0, &"disk \"x\": attached".into()), "{changes}");
    assert_eq!(names(&site, control), ["a", "x"]);
    assert!(read(&config).contains("name = \"x\""), "the next start has it too");
    let client = Client::connect(&site.run_dir().join("disks/x.sock"), Options::default()).unwrap();

    // Neither the disk nor the domain goes from under a guest.
    let detach = ["iod", "detach", "x", "--control", control];
    let (kept, out) = (read(&config), site.output(&detach));
    let said = text(&out.stderr);
    assert!(!out.status.success() && said.contains("a guest is attached"), "{said}");
    assert_eq!(read(&config), kept);
    let stop = ["iod", "stop", "--control", control];
    let out = site.output(&stop);
    assert!(!out.status.success() && text(&out.stderr).contains("serves x"), "{}", text(&out.stderr));
    assert_eq!(names(&site, control), ["a", "x"]);
    drop(client);
    wait_for("the guest's end", || site.output(&detach).status.success());
    assert_eq!((read(&config), names(&site, control)), (before, vec!["a".to_owned()]));
    assert!(site.ok(&["iod", "reload", "--dry-run", "--control", control]).contains("no disk would"));

    site.ok(&stop);
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    site.assert_clean();
}
