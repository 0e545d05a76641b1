#!/bin/sh
# All checks: format, lints, documentation, tests. The last line counts passed, failed and skipped.
# Usage: scripts/test.sh        Set RTVIRTIO_NO_SKIP=1 to make every skip a failure (CI on a machine that can run all).
set -eu
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-auto}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT INT TERM

began=$(date +%s)
# Minutes and seconds since the begin, so that a slow or stopped run shows where its time went.
elapsed() { t=$(($(date +%s) - began)); printf '[%d:%02d]' $((t / 60)) $((t % 60)); }
step() { printf '\n== %s %s\n' "$*" "$(elapsed)"; }
stamped() {
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in *Running*/deps/* | *Doc-tests*) line="$line $(elapsed)" ;; esac
        printf '%s\n' "$line"
    done
}

# Lints and formatting differ between compiler versions: they bind only for the pinned one.
pinned=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
if rustc --version | grep -q "^rustc $pinned "; then strict=1; else strict=; fi

step "format"
if ! cargo fmt --all --check; then
    [ -z "$strict" ] || exit 1
    echo "(rustfmt is not of the pinned Rust $pinned: not fatal)"
fi
step "clippy"
if [ -n "$strict" ]; then
    cargo clippy --locked --workspace --all-targets -- -D warnings
else
    cargo clippy --locked --workspace --all-targets || echo "(clippy is not of the pinned Rust $pinned: not fatal)"
fi
step "documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet

step "tests"
# One test program at a time: they share the machine's loop devices, cgroups and two CPUs.
status=0
{ cargo test --locked --workspace --no-fail-fast -- --test-threads=2 2>&1 || echo "CARGO TEST FAILED"; } | stamped | tee "$log"
grep -q '^CARGO TEST FAILED$' "$log" && status=1

sum() { awk -v f="$1" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ "^" f) n += $(i - 1) } END { print n + 0 }' "$log"; }
# Ignored tests are the other ends of crash tests: processes that a test starts, kills, or runs in the box. They are not counted.
# A skipped test returns early, so the test runner counts it as passed; it says so by name.
skipped=$(grep -c '^SKIP ' "$log" || true)
passed=$(($(sum passed) - skipped))
failed=$(sum failed)
[ "$failed" -gt 0 ] && status=1
echo
grep -h '^SKIP ' "$log" || true
[ "$status" -eq 0 ] || grep -hE '^(test .* FAILED|error: test failed)' "$log" | sort -u || true
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
