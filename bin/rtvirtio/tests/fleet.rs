//! `rtvirtio fleet` on the example, and its mistakes.

use rtvirtio_testkit::site::{Site, text};

#[test]
fn the_example_says_what_fits_where_and_what_to_buy() {
    let site = Site::new();
    let (code, out) = site.json(&["fleet", "examples/fleet/fleet.toml"]);
    assert_eq!(out["schema"], "rtvirtio.fleet.v1", "{out:#}");
    let contracts = out["contracts"].as_array().unwrap();
    assert_eq!(contracts.len(), 11, "{out:#}");
    assert!(contracts.iter().all(|c| c["host"].is_string()), "{out:#}");
    assert_eq!(contracts.iter().filter(|c| c["in_force"] == true).count(), 1);
    let lost = out["losses"].as_array().unwrap().iter().any(|l| l["lost"] != serde_json::json!([]));
    assert_eq!(code, if lost { 2 } else { 0 }, "{out:#}");
    assert_eq!(lost, out["buy"].as_array().is_some_and(|b| !b.is_empty()), "{out:#}");
    let shown = site.output(&["fleet", "examples/fleet/fleet.toml"]);
    let shown = text(&shown.stdout);
    for part in ["plc-1", "old/panel", "loss of", "thousandths", "declared"] {
        assert!(shown.contains(part), "no {part} in {shown}");
    }
    site.assert_clean();
}

#[test]
fn a_mistake_is_an_error_with_its_place() {
    let site = Site::new();
    let file = site.write("fleet.toml", "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\nwidth = 3\n");
    let out = site.output(&["fleet", &file]);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert!(
        said.contains("width") && said.contains("line 4") && said.contains("docs/reference/fleet-toml.md"),
        "{said}"
    );
}

#[test]
fn commands_for_proxmox_are_printed() {
    let site = Site::new();
    site.write(
        "plc.toml",
        "[device]\npath = \"/dev/sda\"\n[[vm]]\nname = \"plc\"\nproxmox = 100\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
         rate = \"100/s\"\ntarget = { percentile = \"p99.99\", latency = \"60ms\" }\n",
    );
    let file = &site.write(
        "fleet.toml",
        "[[host]]\nname = \"pve\"\ncount = 2\ntwin = \"qlc-nvme\"\n[[contracts]]\nspec = \"plc.toml\"\n",
    );
    for (option, command) in
        [("--proxmox", "rules add node-affinity rtvirtio-100"), ("--proxmox=8", "groupadd rtvirtio-100")]
    {
        let out = site.output(&["fleet", file, option]);
        let shown = text(&out.stdout);
        assert!(out.status.success() && shown.contains(command), "{shown}{}", text(&out.stderr));
        let (code, out) = site.json(&["fleet", file, option]);
        assert_eq!(code, 0);
        assert!(out["rules"][0]["commands"][0].as_str().unwrap().contains(command), "{out:#}");
    }
    let (_, out) = site.json(&["fleet", "examples/fleet/fleet.toml", "--proxmox"]);
    assert_eq!(out["without"].as_array().map(Vec::len), Some(11), "{out:#}");
}
