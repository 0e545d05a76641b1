#!/bin/sh
# Builds fuzz targets for libFuzzer: sh fuzz/build.sh TARGET...
set -eu
cd "$(dirname "$0")"
bins=
for target in "$@"; do bins="$bins --bin $target"; done
triple=$(rustc -vV | sed -n 's/^host: //p')
# Coverage of libFuzzer's kind, address sanitizer, and all that a debug build checks.
flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
flags="$flags -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
flags="$flags --cfg fuzzing -Zsanitizer=address -Ccodegen-units=1 -Cdebug-assertions=on -Coverflow-checks=on"
# Flags of a nightly compiler; this makes a stable one take them.
RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" cargo build --release --target "$triple" $bins
