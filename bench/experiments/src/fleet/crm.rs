//! Placement by Pacemaker itself: `crm_simulate` on a CIB of the same instance, without a cluster.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use rtvirtio_capacity::Scalars;

use super::instance::Instance;
use super::peers;

/// Contracts that Pacemaker's scheduler places on this instance; `None` where it is not installed.
///
/// # Errors
/// When it refuses the CIB.
pub fn placed(instance: &Instance) -> anyhow::Result<Option<usize>> {
    let mut file = tempfile::Builder::new().prefix("rtvirtio-cib-").suffix(".xml").tempfile()?;
    file.write_all(cib(instance).as_bytes())?;
    let mut simulate = Command::new("crm_simulate");
    simulate.arg("--xml-file").arg(file.path()).arg("--simulate").env("LC_ALL", "C").stdin(Stdio::null());
    let out = match simulate.output() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        out => out.context("crm_simulate")?,
    };
    let text = String::from_utf8_lossy(&out.stdout);
    ensure!(out.status.success(), "crm_simulate: {} {text}", String::from_utf8_lossy(&out.stderr));
    // `  * Start      v17     ( h3 )` in the summary of the transition.
    Ok(Some(text.lines().filter(|l| l.trim_start().starts_with("* Start ")).count()))
}

/// CIB of an idle cluster: every node is online, no resource runs yet. Demands are those of a real
/// cluster, with a rule that keeps a VM away from nodes that refuse it even alone.
fn cib(instance: &Instance) -> String {
    let mut s = String::from(
        "<cib validate-with=\"pacemaker-3.8\" admin_epoch=\"0\" epoch=\"1\" num_updates=\"0\" have-quorum=\"1\"><configuration><crm_config>\
         <cluster_property_set id=\"c\"><nvpair id=\"c1\" name=\"placement-strategy\" value=\"balanced\"/>\
         <nvpair id=\"c2\" name=\"stonith-enabled\" value=\"false\"/></cluster_property_set></crm_config><nodes>",
    );
    let utilization = |id: &str, [disk, net, cpu]: peers::Amount| {
        format!(
            "<utilization id=\"{id}-u\"><nvpair id=\"{id}-d\" name=\"disk\" value=\"{disk}\"/><nvpair id=\"{id}-n\" name=\"net\" value=\"{net}\"/><nvpair id=\"{id}-c\" name=\"cpu\" value=\"{cpu}\"/></utilization>"
        )
    };
    // Writing to a String cannot fail.
    for h in 0..instance.hosts.len() {
        let _ = write!(
            s,
            "<node id=\"{}\" uname=\"h{h}\">{}</node>",
            h + 1,
            utilization(&format!("h{h}"), peers::FULL)
        );
    }
    s.push_str("</nodes><resources>");
    let demands = peers::demands(instance);
    let mut constraints = String::new();
    for (v, (kind, priority)) in instance.vms.iter().enumerate() {
        let _ = write!(
            s,
            "<primitive id=\"v{v}\" class=\"ocf\" provider=\"pacemaker\" type=\"Dummy\"><meta_attributes id=\"v{v}-m\">\
             <nvpair id=\"v{v}-p\" name=\"priority\" value=\"{priority}\"/></meta_attributes>{}</primitive>",
            utilization(&format!("v{v}"), demands[usize::from(*kind)])
        );
        for (h, class) in instance.hosts.iter().enumerate() {
            if !Scalars::fit(&instance.classes[*class].scalars(&instance.kinds[usize::from(*kind)])) {
                let _ = write!(
                    constraints,
                    "<rsc_location id=\"v{v}-h{h}\" rsc=\"v{v}\" node=\"h{h}\" score=\"-INFINITY\"/>"
                );
            }
        }
    }
    let _ = write!(s, "</resources><constraints>{constraints}</constraints></configuration><status>");
    for h in 0..instance.hosts.len() {
        let _ = write!(
            s,
            "<node_state id=\"{}\" uname=\"h{h}\" in_ccm=\"true\" crmd=\"online\" join=\"member\" expected=\"member\"/>",
            h + 1
        );
    }
    s + "</status></cib>"
}
