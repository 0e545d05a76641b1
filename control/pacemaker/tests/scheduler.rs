//! Decisions of Pacemaker's scheduler on the CIB written for it.

use std::fs;
use std::path::Path;
use std::process::Command;

use rtvirtio_pacemaker_control::{constraints_xml, load, primitive_xml};
use rtvirtio_testkit::{Need, has, tempdir};

/// The operation that started a resource.
fn started(id: &str, call: u32) -> String {
    let key = "1:1:0:00000000-0000-0000-0000-000000000000";
    format!(
        "<lrm_rsc_op id=\"{id}_last_0\" operation_key=\"{id}_start_0\" operation=\"start\" crm_feature_set=\"3.16.2\" transition-key=\"{key}\" \
         transition-magic=\"0:0;{key}\" call-id=\"{call}\" rc-code=\"0\" op-status=\"0\" interval=\"0\"/>"
    )
}

fn simulate(cib: &Path, args: &[&str]) -> String {
    let out =
        Command::new("crm_simulate").arg("-S").arg("-x").arg(cib).args(args).env("LC_ALL", "C").output();
    let out = out.unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    text
}

/// With fencing, a VM leaves a node where its contract cannot be put back.
#[test]
fn a_contract_that_cannot_be_put_back_kills_no_node() {
    if !has("a_contract_that_cannot_be_put_back_kills_no_node", &[Need::Program("crm_simulate")]) {
        return;
    }
    let dir = tempdir().unwrap();
    let spec = "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"plc\"\nqmp = \"/run/plc.qmp\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";
    fs::write(dir.path().join("plc.toml"), spec).unwrap();
    let file = dir.path().join("site.toml");
    fs::write(&file, "[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\n").unwrap();
    let contracts = load(&file).unwrap();
    let ban = "<rsc_location id=\"ban\" rsc=\"plc\" node=\"n1\" score=\"-INFINITY\"/></constraints>";
    let online = "in_ccm=\"true\" crmd=\"online\" join=\"member\" expected=\"member\"";
    let cib = format!(
        "<cib validate-with=\"pacemaker-3.8\" admin_epoch=\"0\" epoch=\"1\" num_updates=\"0\" have-quorum=\"1\"><configuration>\
         <crm_config><cluster_property_set id=\"c\"><nvpair id=\"c1\" name=\"stonith-enabled\" value=\"true\"/></cluster_property_set></crm_config>\
         <nodes><node id=\"1\" uname=\"n1\"/><node id=\"2\" uname=\"n2\"/></nodes>\
         <resources><primitive id=\"power\" class=\"stonith\" type=\"fence_dummy\"/>\
         <primitive id=\"plc\" class=\"ocf\" provider=\"heartbeat\" type=\"anything\"/>{}</resources>{}</configuration>\
         <status><node_state id=\"1\" uname=\"n1\" {online}><lrm id=\"1\"><lrm_resources>\
         <lrm_resource id=\"plc\" class=\"ocf\" provider=\"heartbeat\" type=\"anything\">{}</lrm_resource>\
         <lrm_resource id=\"plc-contract\" class=\"ocf\" provider=\"rtvirtio\" type=\"contract\">{}</lrm_resource>\
         </lrm_resources></lrm></node_state><node_state id=\"2\" uname=\"n2\" {online}/></status></cib>",
        primitive_xml(&contracts[0]),
        constraints_xml(&contracts).replace("</constraints>", ban),
        started("plc", 5),
        started("plc-contract", 6),
    );
    let (before, after) = (dir.path().join("before.xml"), dir.path().join("after.xml"));
    fs::write(&before, cib).unwrap();
    let fail = ["-F", "plc-contract_stop_0@n1=1", "-O", after.to_str().unwrap()];
    let text = simulate(&before, &fail);
    assert!(text.contains("Pretending action") && text.contains("(failure ignored)"), "{text}");
    assert!(!text.contains("UNCLEAN") && !text.contains("blocked"), "{text}");
    // The VM moves as ordered, and its contract follows; the node is not fenced.
    let text = simulate(&after, &[]);
    for line in ["plc             stop on n1", "plc             start on n2", "plc-contract    start on n2"] {
        assert!(text.contains(&format!("Resource action: {line}")), "{line}: {text}");
    }
    assert!(!text.to_lowercase().contains("fencing"), "{text}");
}
