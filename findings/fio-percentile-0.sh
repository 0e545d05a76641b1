#!/bin/sh
# fio: `percentile_list` with 0 in it.
#
# Guess: the 0th percentile is the smallest latency, next to the others that were asked for.
# Seen (fio 3.33-3 of Debian 12): a 0 ends the list. It and all that stand behind it are left out,
# so `0:50:99` gives no percentile at all; the exit status is 0 and nothing is said. Any fraction
# above 0 works as the first, and `min` has the minimum.
#
# Needs root, mmdebstrap and Debian's archive. Fails when the behaviour has changed.
set -eu
version=3.33-3
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mmdebstrap --quiet --variant=extract --include="fio=$version" bookworm "$dir/root"
# percentiles LIST: those of fio's JSON for 100 reads, without white space.
percentiles() {
    chroot "$dir/root" /usr/bin/fio --name=job --ioengine=null --size=1M --bs=4k --number_ios=100 \
        --percentile_list="$1" --output-format=json >"$dir/json"
    tr -d ' \n\t' <"$dir/json" | sed 's/.*"read":{\(.*\)"write":.*/\1/; s/.*"clat_ns":{\([^}]*}\).*/\1/; s/.*"percentile":{\([^}]*\)}.*/\1/'
}
number() { printf '%s\n' "$1" | grep -o '":' | wc -l; }
failed=
# expect LIST NUMBER: how many of the list are reported.
expect() {
    got=$(percentiles "$1")
    printf 'percentile_list=%-14s {%s}\n' "$1" "$got"
    [ "$(number "$got")" -eq "$2" ] || failed=1
}
echo "fio $version"
expect 50:99 2
expect 0.0001:50:99 3
expect 50:0:99 1
expect 0:50:99 0
[ -z "$failed" ] || { echo "the behaviour has changed" >&2; exit 1; }
