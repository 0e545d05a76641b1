#!/bin/sh
# cyclictest: `--json` with a histogram (`-h`).
#
# Guess: the JSON file counts the cycles that the histogram has no room for, as the text output
# does (`# Histogram Overflows`).
# Seen (rt-tests 2.4-1 of Debian 12 and 2.6-1.1 of Debian 13): they are in no field. `cycles` counts all,
# the buckets add up to fewer, and nothing names the difference: a percentile taken from the buckets
# leaves out the slowest wake-ups, and may come out far below `avg`.
#
# Needs root, mmdebstrap and Debian's archive. Fails when the behaviour has changed.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=
# run SUITE VERSION: 400 cycles, with buckets below 8 us, so that most have no room on any machine.
run() {
    root="$dir/$1"
    mmdebstrap --quiet --variant=extract --include="rt-tests=$2" "$1" "$root"
    # With the libraries of that release, and the devices of this machine.
    "$(find "$root" -name 'ld-linux-x86-64.so.2' | head -n 1)" \
        --library-path "$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu" \
        "$root/usr/bin/cyclictest" --quiet --threads=1 --interval=500 --loops=400 \
        --histogram=8 --json="$root/out.json" >"$dir/text"
    overflows=$(sed -n 's/^# Histogram Overflows: *0*\([0-9]*\).*/\1/p' "$dir/text")
    cycles=$(sed -n 's/.*"cycles": \([0-9]*\).*/\1/p' "$root/out.json")
    sum=$(sed -n '/"histogram"/,/}/s/.*"[0-9]*": \([0-9]*\).*/\1/p' "$root/out.json" |
        awk '{ n += $1 } END { print n + 0 }')
    echo "rt-tests $2: $cycles cycles, $sum in buckets of the JSON, overflows of the text: $overflows"
    [ "$cycles" -eq 400 ] && [ "$overflows" -gt 0 ] && [ "$((sum + overflows))" -eq 400 ] || failed=1
    if grep -qi overflow "$root/out.json"; then failed=1; fi
}
run bookworm 2.4-1
run trixie 2.6-1.1
[ -z "$failed" ] || { echo "the behaviour has changed" >&2; exit 1; }
