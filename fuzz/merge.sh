#!/bin/sh
# Replaces the committed corpus of targets by few inputs that reach the same edges, of the corpus and of what runs found:
# sh fuzz/merge.sh TARGET... ; FUZZ_BINARIES=DIR as in run.sh.
set -eu
cd "$(dirname "$0")"
renice -n 19 -p $$ >/dev/null
binaries=${FUZZ_BINARIES:-}
[ -n "$binaries" ] || { sh build.sh "$@"; binaries=target/$(rustc -vV | sed -n 's/^host: //p')/release; }
for target in "$@"; do
    rm -rf "min/$target"
    mkdir -p "min/$target" "found/$target" logs
    sh corpus.sh unpack "$target"
    # Short inputs: an input longer than 4 KiB is worth its place in the repository only as a seed.
    "$binaries/$target" -set_cover_merge=1 -use_counters=0 -max_len=4096 -timeout=25 -rss_limit_mb=2048 \
        "min/$target" "unpacked/$target" "found/$target" \
        >"logs/$target.merge.log" 2>&1 || { tail -3 "logs/$target.merge.log" >&2; exit 1; }
    sh corpus.sh pack "$target" "min/$target"
    echo "$target: $(wc -l <"corpus/$target.hex") inputs, $(wc -c <"corpus/$target.hex") bytes"
done
