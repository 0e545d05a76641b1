//! Chosen limits as lines of a spec.

use rtvirtio_planner::neighbours::NeighbourLimit;
use rtvirtio_spec::HostSpec;
use rtvirtio_traffic::{Tspec, Unit};
use toml_edit::{DocumentMut, InlineTable, Item, Table, Value};

use crate::error::{Result, bail, ensure};

/// A limit as a spec has it, such as `{ rate = "500/s", burst = 6 }`.
#[must_use]
pub fn as_toml(tspec: &Tspec) -> String {
    inline(tspec).to_string()
}

fn inline(tspec: &Tspec) -> InlineTable {
    let per_second = |n: u64| match tspec.unit {
        Unit::Requests => Value::from(format!("{n}/s")),
        Unit::Bytes => Value::from(format!("{n}B/s")),
    };
    let burst = match tspec.unit {
        // A spec takes no larger ones.
        Unit::Requests => Value::from(i64::try_from(tspec.burst).unwrap_or(i64::MAX)),
        Unit::Bytes => Value::from(format!("{}B", tspec.burst)),
    };
    let mut table = InlineTable::new();
    table.insert("rate", per_second(tspec.rate));
    table.insert("burst", burst);
    if let Some(peak) = tspec.peak {
        table.insert("peak", per_second(peak));
    }
    table
}

/// The text of a spec with the chosen limits in the tables of their VMs. The rest of it stays as it
/// is, comments too. `name` is its file's.
///
/// # Errors
/// [`Kind::File`](crate::Kind::File) for a text without a `[[vm]]` of the VM, or in which its
/// `traffic` is no table.
pub fn with_limits<'l>(
    name: &str,
    text: &str,
    limits: impl IntoIterator<Item = &'l NeighbourLimit>,
) -> Result<String> {
    let mut doc = match text.parse::<DocumentMut>() {
        Ok(doc) => doc,
        Err(e) => bail!(File, "{name}: {e}"),
    };
    let chosen: Vec<&NeighbourLimit> = limits.into_iter().filter(|limit| !limit.given).collect();
    for limit in &chosen {
        let is_its = |vm: &&mut Table| vm.get("name").and_then(Item::as_str) == Some(&limit.vm);
        let vms = doc.get_mut("vm").and_then(Item::as_array_of_tables_mut);
        let Some(vm) = vms.and_then(|vms| vms.iter_mut().find(is_its)) else {
            bail!(
                File,
                "{name}: vm {} has no `[[vm]]` table of its own: put its line into the spec by hand",
                limit.vm
            );
        };
        let traffic = vm.entry("traffic").or_insert_with(|| {
            let mut table = Table::new();
            table.set_dotted(true);
            Item::Table(table)
        });
        let Some(traffic) = traffic.as_table_like_mut() else {
            bail!(File, "{name}: `traffic` of vm {} is no table", limit.vm);
        };
        traffic.insert(limit.direction.name(), Item::Value(Value::from(inline(&limit.tspec))));
    }
    let text = doc.to_string();
    // Checks that the spec now parses to the chosen limits.
    let spec = HostSpec::parse(name, &text)?;
    for limit in chosen {
        let vm = spec.vms().iter().find(|vm| vm.name == limit.vm);
        let has = vm.is_some_and(|vm| {
            Tspec::all(&vm.traffic).any(|(d, tspec)| (d, tspec) == (limit.direction, limit.tspec))
        });
        ensure!(has, File, "{name}: vm {} keeps another limit: put its line in by hand", limit.vm);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use rtvirtio_traffic::{Arrival, Direction};
    use rtvirtio_units::Bytes;

    use super::*;
    use crate::error::Kind;

    const SPEC: &str = "\
# The plant.
[device]
path = \"/dev/sdz\"

[[vm]]
name = \"batch\" # at night
cgroup = \"/batch\"

[[vm.task]]
name = \"bulk\"
op = \"mixed\"
write_share = \"30%\"
block = \"16KiB\"
";

    fn limit(direction: Direction, rate: u64, peak: Option<u64>) -> NeighbourLimit {
        NeighbourLimit {
            vm: "batch".to_owned(),
            direction,
            block: Bytes::from_kib(16),
            tspec: Tspec { unit: Unit::Requests, rate, burst: 30, peak, largest: 1 },
            kept: Arrival { rate: rate as f64, burst: 30.0, peak: None },
            given: false,
        }
    }

    #[test]
    fn limits_stand_in_their_vms_table_and_the_rest_stays() {
        let limits = [limit(Direction::Read, 2_881, None), limit(Direction::Write, 7, Some(10))];
        let text = with_limits("s.toml", SPEC, &limits).unwrap();
        let lines = "cgroup = \"/batch\"\n\
            traffic.read = { rate = \"2881/s\", burst = 30 }\n\
            traffic.write = { rate = \"7/s\", burst = 30, peak = \"10/s\" }\n\n[[vm.task]]";
        assert_eq!(text, SPEC.replace("cgroup = \"/batch\"\n\n[[vm.task]]", lines));
        // A direction that the spec has stays, and one that is there already is no second time.
        let given = NeighbourLimit { given: true, ..limit(Direction::Write, 9, None) };
        let again = with_limits("s.toml", &text, &[limit(Direction::Read, 5, None), given]).unwrap();
        assert!(again.contains("traffic.read = { rate = \"5/s\", burst = 30 }"), "{again}");
        assert!(again.contains("rate = \"7/s\"") && !again.contains("2881"), "{again}");
    }

    #[test]
    fn limits_join_a_table_of_any_form() {
        for traffic in
            ["traffic = { write = { rate = \"9/s\" } }\n", "[vm.traffic]\nwrite = { rate = \"9/s\" }\n"]
        {
            let spec = SPEC.replace("\n[[vm.task]]", &format!("{traffic}\n[[vm.task]]"));
            let text = with_limits("s.toml", &spec, &[limit(Direction::Read, 5, None)]).unwrap();
            let traffic = rtvirtio_spec::parse("s.toml", &text).unwrap().vms[0].traffic;
            assert_eq!((traffic.read.unwrap().rate, traffic.write.unwrap().rate), (5, 9), "{text}");
        }
    }

    #[test]
    fn what_cannot_take_a_line_is_refused() {
        let inline = "vm = [{ name = \"batch\", cgroup = \"/b\", task = [{ name = \"t\", op = \"read\", block = \"4KiB\" }] }]\n\
            device = { path = \"/dev/sdz\" }\n";
        let e = with_limits("s.toml", inline, &[limit(Direction::Read, 5, None)]).unwrap_err();
        assert!(e.kind() == Kind::File && e.to_string().contains("by hand"), "{e}");
        assert_eq!(with_limits("s.toml", "no", &[]).unwrap_err().kind(), Kind::File);
    }
}
