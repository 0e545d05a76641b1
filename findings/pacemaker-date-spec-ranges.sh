#!/bin/sh
# Pacemaker: `date_spec` values that are lists, names, or ranges across midnight, in crm_simulate.
#
# Guess: hours="22-6" is in effect from 22 to 6 o'clock, or refused; "1,3" (months, days and hours of
# cron are written so), "*/2" and "Mon-Fri" are refused.
# Seen (pacemaker-cli-utils 2.1.5-1+deb12u1 of Debian 12): all are accepted, and nothing is said.
# A range that ends below its begin ("22-6", weekdays="5-1", months="12-2") is never in effect. A value
# without a number at its begin, or with anything but a dash after it ("1,3", "*/2", "Mon-Fri",
# "Sat"), is always in effect, as if the attribute were not there: a rule for two days of the month
# holds on all of them. `0-5` and `22-23` in two rules, or two expressions of one with
# boolean-op="or", are what a night takes.
#
# Needs root, mmdebstrap and Debian's archive. Fails when the behaviour has changed.
set -eu
version=2.1.5-1+deb12u1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mmdebstrap --quiet --variant=extract --include="pacemaker-cli-utils=$version" bookworm "$dir/root"
failed=
# expect ATTRIBUTES TIME RESULT: whether a rule with this date_spec keeps a resource off its node.
expect() {
    cat >"$dir/root/cib.xml" <<EOF
<cib validate-with='pacemaker-3.9' epoch='1' num_updates='0' admin_epoch='0' have-quorum='1' dc-uuid='1'>
  <configuration>
    <crm_config><cluster_property_set id='properties'>
      <nvpair id='fencing' name='stonith-enabled' value='false'/>
    </cluster_property_set></crm_config>
    <nodes><node id='1' uname='node'/></nodes>
    <resources><primitive id='vm' class='ocf' provider='pacemaker' type='Dummy'/></resources>
    <constraints><rsc_location id='away' rsc='vm'><rule id='rule' score='-INFINITY'>
      <date_expression id='date' operation='date_spec'><date_spec id='spec' $1/></date_expression>
    </rule></rsc_location></constraints>
  </configuration>
  <status><node_state id='1' uname='node' in_ccm='true' crmd='online' join='member' expected='member'/></status>
</cib>
EOF
    chroot "$dir/root" /usr/sbin/crm_simulate --xml-file /cib.xml --simulate --set-datetime "$2" >"$dir/out" 2>"$dir/err"
    got='in effect'
    if grep -q '^ *\* Start ' "$dir/out"; then got='not in effect'; fi
    printf '%-20s at %s  %s\n' "$1" "$2" "$got"
    [ "$got" = "$3" ] || failed=1
    # Nothing is said about the value.
    if grep -iq 'date\|range\|invalid\|rule' "$dir/err"; then cat "$dir/err"; failed=1; fi
}
echo "crm_simulate $version"
expect 'hours="9-17"' '2024-05-01 17:59:00Z' 'in effect'
expect 'hours="9-17"' '2024-05-01 18:00:00Z' 'not in effect'
expect 'weekdays="6-7"' '2024-05-04 12:00:00Z' 'in effect'
for hour in 23 03 12; do expect 'hours="22-6"' "2024-05-01 $hour:00:00Z" 'not in effect'; done
expect 'weekdays="5-1"' '2024-05-04 12:00:00Z' 'not in effect'
expect 'months="12-2"' '2024-01-07 12:00:00Z' 'not in effect'
expect 'monthdays="1,15"' '2024-05-07 12:00:00Z' 'in effect'
expect 'hours="1,3"' '2024-05-01 20:00:00Z' 'in effect'
expect 'hours="*/2"' '2024-05-01 11:00:00Z' 'in effect'
expect 'weekdays="Mon-Fri"' '2024-05-04 12:00:00Z' 'in effect'
expect 'weekdays="Sat"' '2024-05-01 12:00:00Z' 'in effect'
[ -z "$failed" ] || { echo "the behaviour has changed" >&2; exit 1; }
