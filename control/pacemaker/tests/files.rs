//! The cluster file, and the XML written for Pacemaker.

use std::collections::BTreeMap;
use std::fs;

use rtvirtio_pacemaker_control::{
    METADATA, PacemakerError, Published, constraints_xml, demands, load, primitive_xml, without_capacity,
};
use rtvirtio_testkit::tempdir;

const SPEC: &str = "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"plc\"\nqmp = \"/run/plc.qmp\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";

#[test]
fn contracts_have_resources_and_specs() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("plc.toml"), SPEC).unwrap();
    let file = dir.path().join("site.toml");
    let read = |text: &str| {
        fs::write(&file, text).unwrap();
        load(&file)
    };
    let all = read("[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\npriority = 7\n").unwrap();
    assert_eq!((all[0].resource.as_str(), all[0].priority), ("plc", 7));
    assert!(all[0].spec_file.is_absolute());
    // Without `priority` the spec's criticality decides.
    for (word, priority) in [("low", -100), ("medium", 0), ("high", 100)] {
        let vm = format!("name = \"plc\"\ncriticality = \"{word}\"\n");
        fs::write(dir.path().join("plc.toml"), SPEC.replace("name = \"plc\"\n", &vm)).unwrap();
        let all = read("[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\n").unwrap();
        assert_eq!(all[0].priority, priority);
    }
    for (text, says) in [
        ("[[contract]]\nresource = \"p<c\"\nspec = \"plc.toml\"\n", "letters"),
        ("[[contract]]\nresource = \"vm-100\"\nspec = \"plc.toml\"\n", "another name"),
        ("[[contract]]\nresource = \"plan\"\nspec = \"plc.toml\"\n", "another name"),
        (
            "[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\n[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\n",
            "two contracts",
        ),
        ("[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\nprio = 1\n", "prio"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let missing = read("[[contract]]\nresource = \"plc\"\nspec = \"none.toml\"\n");
    assert!(matches!(missing, Err(PacemakerError::Spec(_))), "{missing:?}");
}

#[test]
fn a_demand_is_the_most_over_the_nodes_that_could_promise_it() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("plc.toml"), SPEC).unwrap();
    let file = dir.path().join("site.toml");
    fs::write(&file, "[[contract]]\nresource = \"plc\"\nspec = \"plc.toml\"\n").unwrap();
    let contracts = load(&file).unwrap();
    let on = |node: &str, cpu: u32, disk: u32| Published {
        resource: "plc".to_owned(),
        node: node.to_owned(),
        takes: BTreeMap::from([("rtvirtio-cpu".to_owned(), cpu), ("rtvirtio-disk-vda".to_owned(), disk)]),
        veto: false,
        why: String::new(),
    };
    // The third node refuses the contract even alone.
    let all = [on("n1", 200, 90), on("n2", 150, 300), on("n3", 1_000_000, 40)];
    let expected = [("rtvirtio-cpu".to_owned(), 200), ("rtvirtio-disk-vda".to_owned(), 300)];
    assert_eq!(demands(&contracts, &all)[0].takes, BTreeMap::from(expected));
    let primitive = roxmltree::Document::parse(&primitive_xml(&contracts[0]))
        .map(|d| d.root_element().attribute("id").map(str::to_owned));
    assert_eq!(primitive.unwrap().as_deref(), Some("plc-contract"));
    let constraints = constraints_xml(&contracts);
    let xml = roxmltree::Document::parse(&constraints).unwrap();
    let kinds: Vec<&str> = xml.root_element().children().map(|c| c.tag_name().name()).collect();
    assert_eq!(kinds, ["rsc_location", "rsc_colocation", "rsc_order"]);
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    assert!(roxmltree::Document::parse_with_options(METADATA, options).is_ok());
}

/// `placement-strategy` makes all utilization count, including that added by heartbeat's agent.
#[test]
fn a_resource_that_could_run_nowhere_is_named() {
    let cib = |node: &str, domain: &str, more: &str| {
        format!(
            "<cib><configuration><nodes><node id=\"1\" uname=\"n1\">{node}</node><node id=\"2\" uname=\"n2\"/></nodes>\
             <resources><group id=\"g\"><primitive id=\"plc\" class=\"ocf\" provider=\"heartbeat\" type=\"VirtualDomain\">\
             <instance_attributes id=\"a\">{domain}</instance_attributes></primitive></group>\
             <primitive id=\"ip\" class=\"ocf\" provider=\"heartbeat\" type=\"IPaddr2\">{more}</primitive></resources></configuration></cib>"
        )
    };
    let pair = |name: &str, value: &str| format!("<nvpair id=\"{name}\" name=\"{name}\" value=\"{value}\"/>");
    let set = |text: &str| format!("<utilization id=\"u\">{text}</utilization>");
    let names = ["cpu", "host_memory", "hv_memory"];
    let off: String = names.map(|n| pair(&format!("autoset_utilization_{n}"), "False")).concat();
    let all: String = names.map(|n| pair(n, "8")).concat();
    let found = |cib: String| without_capacity(&cib).unwrap();
    assert_eq!(found(cib("", "", "")), names.map(|n| format!("plc takes {n}")));
    assert_eq!(found(cib("", &off, "")), Vec::<String>::new());
    assert_eq!(found(cib(&set(&all), "", "")), Vec::<String>::new(), "one node has them");
    let ours = pair("rtvirtio-cpu", "400");
    assert_eq!(found(cib("", &off, &set(&(pair("bandwidth", "3") + &ours)))), ["ip takes bandwidth"]);
    assert!(without_capacity("<cib").is_err());
}
