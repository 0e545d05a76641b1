//! Attributes that a node publishes in the cluster.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::node::NodeAnswer;
use crate::{ClusterContract, Crm, PacemakerError};

/// Longest published reason, in bytes: attributes are for short values.
const LONGEST_REASON: usize = 400;

pub(crate) fn veto(resource: &str) -> String {
    format!("rtvirtio-veto-{resource}")
}

fn takes(resource: &str) -> String {
    format!("rtvirtio-takes-{resource}")
}

fn why(resource: &str) -> String {
    format!("rtvirtio-why-{resource}")
}

/// Answer of one node for one contract, as published.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Published {
    /// Name of the VM's resource.
    pub resource: String,
    pub node: String,
    /// Demand of the contract there, by utilization attribute.
    pub takes: BTreeMap<String, u32>,
    /// Whether the node vetoes the contract.
    pub veto: bool,
    /// Reason for a veto; empty when there is none.
    pub why: String,
}

/// Publishes this node's capacity, and for each contract its demand, veto and reason. No veto is
/// set where the contract is in force.
///
/// # Errors
/// Those of Pacemaker's tools.
pub fn publish(crm: Crm<'_>, node: &str, answer: &NodeAnswer) -> Result<(), PacemakerError> {
    for name in &answer.resources {
        crm.set_capacity(node, name, rtvirtio_capacity::WHOLE.0)?;
    }
    for of in &answer.contracts {
        crm.set_attribute(node, &takes(&of.resource), &takes_text(&of.takes))?;
        let reason = of.refused.as_deref().unwrap_or("-");
        crm.set_attribute(node, &why(&of.resource), &plain(reason))?;
        let is_vetoed = of.refused.is_some() && !of.in_force;
        // Written last: a reader of the veto finds the reason.
        crm.set_attribute(node, &veto(&of.resource), if is_vetoed { "1" } else { "0" })?;
    }
    Ok(())
}

/// Demand as `NAME=N` pairs. Whole numbers only: Pacemaker silently reads a fraction as 0.
fn takes_text(takes: &BTreeMap<String, u32>) -> String {
    let parts: Vec<String> = takes.iter().map(|(name, p)| format!("{name}={p}")).collect();
    parts.join(" ")
}

/// Reason on one line and without quotation marks, as the tools print it.
fn plain(reason: &str) -> String {
    let mut text: String = reason.chars().map(|c| if c.is_control() || c == '"' { ' ' } else { c }).collect();
    let end = (0..=LONGEST_REASON.min(text.len())).rev().find(|i| text.is_char_boundary(*i));
    text.truncate(end.unwrap_or(0));
    text
}

/// Answers of all nodes for these contracts.
///
/// # Errors
/// Those of Pacemaker's tools.
pub fn published(crm: Crm<'_>, contracts: &[ClusterContract]) -> Result<Vec<Published>, PacemakerError> {
    let mut all = Vec::new();
    for of in contracts {
        let by_node = |name: String| -> Result<BTreeMap<String, String>, PacemakerError> {
            Ok(crm.attribute(&name)?.into_iter().collect())
        };
        let (takes, vetoes, reasons) =
            (by_node(takes(&of.resource))?, by_node(veto(&of.resource))?, by_node(why(&of.resource))?);
        for (node, veto) in vetoes {
            let takes = parse_takes(&of.resource, takes.get(&node).map_or("", String::as_str))?;
            let why = reasons.get(&node).filter(|w| *w != "-").cloned().unwrap_or_default();
            all.push(Published { resource: of.resource.clone(), veto: veto != "0", takes, why, node });
        }
    }
    Ok(all)
}

/// Parses `NAME=N NAME=N`. An unknown form is an error, not zero: the contract would be placed
/// where it does not fit.
fn parse_takes(resource: &str, text: &str) -> Result<BTreeMap<String, u32>, PacemakerError> {
    let one = |part: &str| Some((part.split_once('=')?.0.to_owned(), part.split_once('=')?.1.parse().ok()?));
    text.split_whitespace().map(one).collect::<Option<_>>().ok_or_else(|| PacemakerError::Output {
        command: format!("attrd_updater --query --all --name {}", takes(resource)),
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pacemaker reads 0.9 as 0 and 1e3 as 1, and no tool complains.
    #[test]
    fn only_whole_numbers_leave() {
        for n in [0, 1, 999, 1_000, 1_000_000, u32::MAX] {
            let takes = BTreeMap::from([("rtvirtio-cpu".to_owned(), n)]);
            let text = takes_text(&takes);
            let (_, value) = text.split_once('=').unwrap();
            assert!(value.chars().all(|c| c.is_ascii_digit()), "{text}");
            assert_eq!(parse_takes("plc", &text).unwrap(), takes);
        }
        // What a node has, as it is written by `set_capacity`.
        assert!(rtvirtio_capacity::WHOLE.0.to_string().chars().all(|c| c.is_ascii_digit()));
        for fraction in ["0.9", "1e3", "-1"] {
            assert!(parse_takes("plc", &format!("rtvirtio-cpu={fraction}")).is_err(), "{fraction}");
        }
    }

    #[test]
    fn what_a_contract_takes_is_read_whole_or_not_at_all() {
        let takes = parse_takes("plc", "rtvirtio-cpu=264 rtvirtio-disk-sda=17").unwrap();
        assert_eq!(takes.into_values().collect::<Vec<_>>(), [264, 17]);
        assert!(parse_takes("plc", "").unwrap().is_empty());
        for wrong in ["rtvirtio-cpu=", "rtvirtio-cpu=-1", "rtvirtio-cpu=264 rtvirtio-disk-sda"] {
            let error = parse_takes("plc", wrong).unwrap_err().to_string();
            assert!(error.contains("rtvirtio-takes-plc") && error.contains(wrong), "{error}");
        }
    }
}
