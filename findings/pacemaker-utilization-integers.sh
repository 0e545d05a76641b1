#!/bin/sh
# Pacemaker: `utilization` values with a fraction, and above 2^31, in crm_simulate.
#
# Guess: with placement-strategy=utilization two resources of cpu=1.9 do not both start on a node of
# cpu=2.5: fractions are counted, or the value is refused. A node of 5000000000 (bytes/s of a fast
# link) has room for two of 2000000000.
# Seen (pacemaker-cli-utils 2.1.5-1+deb12u1 of Debian 12): the configuration is accepted and nothing
# is said. Fractions are cut off: 1.9 counts as 1, so both start, 3.8 on a node of 2.5; 0.9 counts as
# 0, so any number starts. `1e3` counts as 1. Values end at 2147483647: the node of 5000000000 takes
# one of the two. The allocation log prints the values as they were written, not as they count.
# Whole numbers in a unit that keeps sums below 2^31 (thousandths of a CPU, MB/s) count as expected.
#
# Needs root, mmdebstrap and Debian's archive. Fails when the behaviour has changed.
set -eu
version=2.1.5-1+deb12u1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mmdebstrap --quiet --variant=extract --include="pacemaker-cli-utils=$version" bookworm "$dir/root"
resource() {
    echo "<primitive id='$1' class='ocf' provider='pacemaker' type='Dummy'><utilization id='$1-u'>" \
        "<nvpair id='$1-v' name='load' value='$2'/></utilization></primitive>"
}
property() { echo "<nvpair id='$1' name='$1' value='$2'/>"; }
# started CAPACITY NEED: how many of three resources with this need start on a node of this capacity.
started() {
    cat >"$dir/root/cib.xml" <<EOF
<cib validate-with='pacemaker-3.9' epoch='1' num_updates='0' admin_epoch='0' have-quorum='1' dc-uuid='1'>
  <configuration>
    <crm_config><cluster_property_set id='properties'>
      $(property stonith-enabled false) $(property placement-strategy utilization)
    </cluster_property_set></crm_config>
    <nodes><node id='1' uname='node'><utilization id='node-u'>
      <nvpair id='node-v' name='load' value='$1'/>
    </utilization></node></nodes>
    <resources>$(resource a "$2") $(resource b "$2") $(resource c "$2")</resources>
    <constraints/>
  </configuration>
  <status><node_state id='1' uname='node' in_ccm='true' crmd='online' join='member' expected='member'/></status>
</cib>
EOF
    chroot "$dir/root" /usr/sbin/crm_simulate --xml-file /cib.xml --simulate >"$dir/out" 2>"$dir/err"
    grep -c '^ *\* Start ' "$dir/out" || true
}
failed=
# expect CAPACITY NEED NUMBER
expect() {
    got=$(started "$1" "$2")
    printf 'node %-11s resources of %-11s %s of 3 start\n' "$1," "$2:" "$got"
    [ "$got" -eq "$3" ] || failed=1
    # Nothing is said about the values.
    if grep -iq 'utilization\|invalid\|value' "$dir/err"; then cat "$dir/err"; failed=1; fi
}
echo "crm_simulate $version"
expect 2500 1900 1
expect 2.5 1.9 2
expect 2.5 0.9 3
expect 2.5 1e3 2
expect 5000 2000 2
expect 5000000000 2000000000 1
[ -z "$failed" ] || { echo "the behaviour has changed" >&2; exit 1; }
