#!/bin/sh
# Runs fuzz targets one after the other: sh fuzz/run.sh TARGET... | all [SECONDS each, 300 unless given]
# As `cargo fuzz run` does it, without needing cargo-fuzz. New inputs go to fuzz/found/TARGET, failures to fuzz/failures,
# and a line for each run to fuzz/RUNS.tsv. Exit status 1 when a target failed.
# FUZZ_BINARIES=DIR runs the programs of an earlier build in DIR instead of building.
set -eu
cd "$(dirname "$0")"
all=$(sed -n 's|^path = "fuzz_targets/\(.*\)\.rs"$|\1|p' Cargo.toml)
seconds=300
targets=
for word in "$@"; do
    case "$word" in
    all) targets="$targets $all" ;;
    *[!0-9]*)
        echo "$all" | grep -qx "$word" || { echo "no target $word; targets are:" $all >&2; exit 2; }
        targets="$targets $word" ;;
    *) seconds=$word ;;
    esac
done
[ -n "$targets" ] || { echo "usage: sh fuzz/run.sh TARGET... | all [SECONDS]; targets are:" $all >&2; exit 2; }
# So that other work on the machine goes first; the programs and the compiler inherit it.
renice -n 19 -p $$ >/dev/null
binaries=${FUZZ_BINARIES:-}
[ -n "$binaries" ] || { sh build.sh $targets; binaries=target/$(rustc -vV | sed -n 's/^host: //p')/release; }
failed=0
for target in $targets; do
    mkdir -p "found/$target" failures logs
    sh corpus.sh unpack "$target"
    log=logs/$target.log
    # Most bytes of an input, and most memory of the process in MiB; what a target may keep is far below.
    length=2048 memory=1024
    case "$target" in
    spec) length=8192 ;;
    engine | messages) memory=2048 ;;
    # Reading the system's certificates would take most of its time.
    placement) export SSL_CERT_FILE=/dev/null ;;
    esac
    dict=; [ ! -f "dict/$target.dict" ] || dict=-dict=dict/$target.dict
    code=0
    begin=$(date +%s)
    "$binaries/$target" "found/$target" "unpacked/$target" $dict -max_total_time="$seconds" -timeout=25 -max_len="$length" \
        -rss_limit_mb="$memory" -malloc_limit_mb=256 -artifact_prefix="failures/$target-" -print_final_stats=1 \
        >"$log" 2>&1 || code=$?
    took=$(($(date +%s) - begin))
    stat() { sed -n "s/^stat::$1: *//p" "$log" | tail -1; }
    last() { grep -a '^#[0-9]' "$log" | sed -n "s/.* $1: \([0-9]*\).*/\1/p" | tail -1; }
    [ -s RUNS.tsv ] || printf 'date\ttarget\tseconds\texecutions\tcov\tft\tnew_inputs\tfailures\n' >RUNS.tsv
    runs=$(stat number_of_executed_units)
    [ "$code" -eq 0 ] && failures=0 || failures=1 failed=1
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$(date -u +%Y-%m-%dT%H:%MZ)" "$target" "$took" "${runs:-0}" "$(last cov)" "$(last ft)" \
        "$(stat new_units_added)" "$failures" | tee -a RUNS.tsv
    [ "$code" -eq 0 ] || { echo "$target failed, see fuzz/$log:"; grep -a -m3 'panicked\|ERROR\|SUMMARY\|Test unit' "$log" || tail -3 "$log"; }
done
exit "$failed"
