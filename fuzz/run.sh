#!/bin/sh
# Runs one fuzz target for so many seconds: sh fuzz/run.sh chain|engine|messages|config [SECONDS]
# As `cargo fuzz run` does it, without needing cargo-fuzz. New inputs go to fuzz/found/TARGET, failures to fuzz/failures.
set -eu
cd "$(dirname "$0")"
target=${1:?which target: chain, engine, messages or config}
seconds=${2:-300}
case "$target" in chain | engine | messages | config) ;; *) echo "there is no target $target" >&2; exit 2 ;; esac
triple=$(rustc -vV | sed -n 's/^host: //p')
# Coverage of libFuzzer's kind, address sanitizer, and all that a debug build checks.
flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
flags="$flags -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
flags="$flags --cfg fuzzing -Zsanitizer=address -Ccodegen-units=1 -Cdebug-assertions=on -Coverflow-checks=on"
# Flags of a nightly compiler; this makes a stable one take them.
RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" cargo build --release --target "$triple" --bin "$target"
mkdir -p "found/$target" failures
exec "target/$triple/release/$target" "found/$target" "corpus/$target" -max_total_time="$seconds" -timeout=25 \
    -max_len=2048 -artifact_prefix="failures/$target-" -print_final_stats=1
