#!/bin/sh
# All checks, in tiers. Each tier ends with a line that counts passed, failed and skipped; so does the whole, on the last line.
# Usage: scripts/test.sh check|cluster|host|slow|all|list
#   check    format, lints, style, unit tests: no root, a compiler only
#   cluster  test programs that start a cluster of several nodes, and others that must run alone
#   host     documentation, minimum Rust version, licences, fuzz targets compile; tests against this machine's kernel, QEMU and fio
#   slow     test programs that boot guests or the box
#   all      these four
#   list     runs nothing: `KIND NAME` of each integration test program
# A test program that failed runs once more, alone, at the end of its tier; `FLAKY name` says that it passed then.
# Set RTVIRTIO_NO_SKIP=1 to make a skip a failure where the check could run (CI on a machine that can run all).
set -eu
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-auto}"
tiers=${1:-all}
case $tiers in
check | host | cluster | slow | list) ;;
all) tiers="check cluster host slow" ;;
*) echo "usage: scripts/test.sh check|cluster|host|slow|all|list" >&2; exit 2 ;;
esac
work=$(mktemp -d)
kill_tree() {
    # It starts nothing more meanwhile.
    kill -STOP "$1" 2>/dev/null || return 0
    for child in $(ps -o pid= --ppid "$1"); do kill_tree "$child"; done
    kill "$1" 2>/dev/null || true
    kill -CONT "$1" 2>/dev/null || true
}
cleanup() {
    # With all that they run: a background process of a shell does not see Ctrl-C.
    for child in $(ps -o pid= --ppid "$$"); do kill_tree "$child"; done
    for output in "$work".background.*/output; do
        [ -s "$output" ] || continue
        printf '\n== ended before its end %s:\n' "$(elapsed)"
        tail -n 60 "$output"
    done
    rm -rf "$work" "$work.failed" "$work".background.*
}
trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# A test program that boots guests or the box has one of these names.
slow_name() {
    case $1 in *boxed* | *guest* | qemu | bench_cpu) return 0 ;; esac
    return 1
}

# A test program that starts a cluster, whose nodes count as lost when they get no CPU, or that leaves things for the next `revert` to
# remove, whoever calls it. It runs alone.
cluster_name() {
    case $1 in cluster | fencing | leftovers) return 0 ;; esac
    return 1
}

# A test program of which each test makes all that it uses: files, loop devices, an I/O domain, a machine of its own. It needs no
# real-time budget, no libvirt and no leftovers of others, so it runs while those of the host do.
parallel_name() {
    case $1 in
    amend | claims | cli | corpus | crash_kernel | crash_sim | data | dependencies | disks | flaky | hostile) return 0 ;;
    journal_bits | journal_damage | pages | reload | repeat | share | unreadable) return 0 ;;
    esac
    return 1
}

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

# Runs a command to its end, and ends at once when this script is ended: a shell obeys a signal only between commands that it waits for,
# but `wait` it leaves.
ended() {
    "$@" &
    wait "$!"
}

# A check that is no test of cargo's: check NAME COMMAND... In the log it has the form of a test's result.
check() {
    name=$1
    shift
    step "$name"
    if ended "$@"; then
        echo "test result: ok. 1 passed; 0 failed" >>"$log"
    else
        echo "test $name ... FAILED" | tee -a "$log"
        echo "test result: FAILED. 0 passed; 1 failed" >>"$log"
    fi
}
# Tests of one crate run another's programs; those of crates without tests of their own are built by the first line.
build_tests() { cargo build --locked --workspace --bins --quiet && cargo test --locked --workspace --no-run --quiet; }
skip() { # skip NAME WHY: it cannot run on this machine
    echo "SKIP $1: $2" | tee -a "$log" >&2
    # It counts as skipped, not as passed too: the sum takes skips off what passed, since a skipped test counts as passed.
    echo "test result: ok. 1 passed; 0 failed" >>"$log"
}
# Checks in the background of tests that mostly wait: start_background NAME NICE CHECK..., each call with what runs one after the
# other, and end_background NAME... in the tier that counts them. What compiles holds no build directory that a test waits for: tests
# run what is built. What runs shares nothing with the tests in the foreground: it is in a machine of its own, the box, or makes all
# that it uses.
start_background() {
    directory=$work.background.$1
    priority=$2
    shift 2
    mkdir -p "$directory"
    (
        # Until it has its priority.
        sleep 1
        log=$directory/log
        : >"$log"
        for each in "$@"; do "$each"; done
        : >"$directory/done"
    ) >"$directory/output" 2>&1 &
    echo "$!" >"$directory/pid"
    renice -n "$priority" -p "$!" >/dev/null 2>&1 || true
}
end_background() {
    for name in "$@"; do
        directory=$work.background.$name
        wait "$(cat "$directory/pid")" || echo "test checks in the background ... FAILED" | tee -a "$log"
        cat "$directory/output"
        cat "$directory/log" >>"$log"
        rm -r "$directory"
    done
}
# What a shell runs in its background ignores Ctrl-C, and tests end programs by that signal.
cargo_test() {
    { env --default-signal=INT,QUIT cargo test --locked --no-fail-fast "$@" -- --test-threads=2 2>&1 || echo "CARGO TEST FAILED"; } | stamped | tee "$output"
}
tests() { # tests WHAT CARGO_TEST_ARGUMENTS...: one test program at a time, since they share CPU budgets, libvirt and network names
    step "$1"
    shift
    output=$log.run
    ended cargo_test "$@"
    # A program that failed has a line of its own, by which it is run again; without one nothing was run.
    if grep -q '^error: test failed, to rerun pass ' "$output"; then
        sed -i '/^CARGO TEST FAILED$/d' "$output"
    fi
    cat "$output" >>"$log"
    rm "$output"
}

# Lints and formatting differ between compiler versions: they bind only for the pinned one.
pinned=$(sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)
if rustc --version | grep -q "^rustc $pinned "; then strict=1; else strict=; fi
format() {
    cargo fmt --all --check || [ -z "$strict" ] || return 1
    [ -n "$strict" ] || echo "(rustfmt is not of the pinned Rust $pinned: not fatal)"
}
clippy() {
    if [ -n "$strict" ]; then
        cargo clippy --locked --workspace --all-targets -- -D warnings
    else
        cargo clippy --locked --workspace --all-targets || echo "(clippy is not of the pinned Rust $pinned: not fatal)"
    fi
}
# The list of what breaks a rule comes first.
style() { sh scripts/style.sh; }
documentation() { RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet; }
documentation_builds() { check "documentation" documentation; }
examples() { tests "documentation's examples" --workspace --doc; }

# Builds with the oldest compiler that Cargo.toml declares. rustup has it, or can get it; Debian 13's own is of that version.
minimum_rust() {
    oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    name="builds with Rust $oldest"
    if rustc --version | grep -q "^rustc $oldest\."; then
        check "$name" cargo check --locked --workspace --all-targets
        return
    fi
    if ! command -v rustup >/dev/null 2>&1; then
        skip "$name" "no rustup to get that compiler"
        return
    fi
    if ! rustc "+$oldest.0" --version >/dev/null 2>&1; then
        if [ -z "${RTVIRTIO_NO_SKIP:-}" ]; then
            skip "$name" "not installed: rustup toolchain install $oldest.0 --profile minimal"
            return
        fi
        timeout 120 rustup toolchain install "$oldest.0" --profile minimal >/dev/null 2>&1 || {
            skip "$name" "rustup cannot get that compiler here"
            return
        }
    fi
    # A directory of its own, so that the two compilers do not throw away each other's work.
    check "$name" cargo "+$oldest.0" check --locked --workspace --all-targets --target-dir target/oldest-rust
}

# Compiles the fuzz targets without libFuzzer, which only a linked program needs.
fuzz_targets() {
    CUSTOM_LIBFUZZER_PATH=/nonexistent/libfuzzer.a RUSTFLAGS="--cfg fuzzing" \
        cargo check --locked --manifest-path fuzz/Cargo.toml --bins --target-dir target/fuzz-check || {
        echo "when only fuzz/Cargo.lock is old: cargo update --workspace --manifest-path fuzz/Cargo.toml" >&2
        return 1
    }
}

fuzz_compiles() { check "fuzz targets compile" fuzz_targets; }

# Licences, sources and versions are tests of lab/testkit too, which need cargo alone.
deny() {
    if ! cargo deny --version >/dev/null 2>&1; then
        step "cargo-deny"
        echo "(not installed: lab/testkit/tests/dependencies.rs checks licences and sources; cargo install cargo-deny --locked)"
        return
    fi
    check "cargo-deny" cargo deny --locked check --hide-inclusion-graph bans licenses sources
    if timeout 60 cargo deny fetch db >/dev/null 2>&1; then
        check "cargo-deny advisories" cargo deny --locked check --disable-fetch advisories
    else
        skip "cargo-deny advisories" "the advisory database cannot be fetched here"
    fi
}

# `KIND NAME` of each integration test program. Kinds: those in the box, those in the box that need both CPUs (guests in it boot for a minute,
# and libvirtd waits for each), those that boot guests on this host, those that start a cluster, those that run while others
# do, or the others.
list_programs() {
    for file in */*/tests/*.rs; do
        name=$(basename "$file" .rs)
        kind=host
        if slow_name "$name"; then kind=guests; fi
        if cluster_name "$name"; then kind=cluster; fi
        if parallel_name "$name"; then kind=parallel; fi
        case $name in boxed_cpu | boxed_libvirt) kind=alone ;; boxed*) kind=box ;; esac
        echo "$kind $name"
    done | sort -u
}
programs() { list_programs | sed -n "s/^$1 /--test /p"; } # programs KIND: `--test NAME` of each
# shellcheck disable=SC2046 # a list of words
tests_in_box() { tests "tests in the box" --workspace $(programs box); }
# shellcheck disable=SC2046 # a list of words
tests_in_parallel() { tests "tests that run while those on this host do" --workspace $(programs parallel); }

# The tests in the box take long, and once more when an emulated guest is lost: where the tests of the host run too they begin as soon
# as nothing compiles there, and are counted with those that boot guests.
start_box() { [ -d "$work.background.box" ] || start_background box 10 wait_for_builds tests_in_box; }
wait_for_builds() {
    while [ -d "$work.background.builds" ] && [ ! -e "$work.background.builds/done" ]; do sleep 1; done
}

tier() {
    case $1 in
    check)
        check "format" format
        check "clippy" clippy
        check "style" style
        tests "unit tests" --workspace --lib --bins
        ;;
    cluster)
        check "build of all tests" build_tests
        # shellcheck disable=SC2046 # a list of words
        tests "tests of a cluster, and those that run alone" --workspace $(programs cluster)
        ;;
    host)
        check "build of all tests" build_tests
        start_background parallel 0 tests_in_parallel
        start_background builds 19 minimum_rust fuzz_compiles documentation_builds deny examples
        case $tiers in *slow*) start_box ;; esac
        # shellcheck disable=SC2046 # a list of words
        tests "tests on this host" --workspace $(programs host)
        end_background parallel builds
        ;;
    slow)
        check "build of all tests" build_tests
        start_box
        # shellcheck disable=SC2046 # a list of words
        tests "tests that boot guests" --workspace $(programs guests)
        end_background box
        # shellcheck disable=SC2046 # a list of words
        tests "tests in the box with nothing beside" --workspace $(programs alone)
        ;;
    esac
}

sum() { # sum FIELD FILE...
    field=$1
    shift
    cat "$@" | awk -v f="$field" '/^test result:/ { for (i = 2; i <= NF; i++) if ($i ~ "^" f) n += $(i - 1) } END { print n + 0 }'
}
# Ignored tests are the other ends of crash tests: processes that a test starts, kills, or runs in the box. They are not counted.
# A skipped test returns early, so the test runner counts it as passed; it is named on a line of its own.
count() { # count FILE...: the line that counts
    skipped=$(cat "$@" | grep -c '^SKIP ' || true)
    echo "$(($(sum passed "$@") - skipped)) passed, $(sum failed "$@") failed, $skipped skipped"
}
failures() { # failures FILE...: what failed, by name; false when nothing did
    cat "$@" | grep -hE '^(test .* FAILED|error: test failed|error: could not compile|CARGO TEST FAILED)' >"$work.failed" || return 1
    sort -u "$work.failed"
}

if [ "$tiers" = list ]; then
    list_programs
    exit
fi
status=0
for tier in $tiers; do
    log=$work/$tier
    : >"$log"
    tier "$tier"
    # Nothing else of the tier runs by now.
    sh scripts/retry_failed.sh "$log"
    echo
    grep -hE '^(SKIP|FLAKY) ' "$log" || true
    if failures "$log"; then status=1; fi
    printf '%s: %s %s\n' "$tier" "$(count "$log")" "$(elapsed)"
    # The other tiers take long, and what fails here is mended first.
    [ "$tier" != check ] || [ "$status" -eq 0 ] || break
done
if [ "$tiers" = "check cluster host slow" ]; then
    echo
    grep -hE '^(SKIP|FLAKY) ' "$work"/* || true
    failures "$work"/* || true
fi
count "$work"/*
exit "$status"
