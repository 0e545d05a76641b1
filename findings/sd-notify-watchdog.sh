#!/bin/sh
# sd-notify (Rust): the watchdog of a service whose manager names no process, or a time of 0.
#
# Guess: `watchdog_enabled` answers as `sd_watchdog_enabled(3)` of libsystemd: WATCHDOG_PID counts
# only where it is set, and WATCHDOG_USEC=0 is no watchdog.
# Seen: libsystemd takes WATCHDOG_USEC alone as a watchdog, and refuses 0 (EINVAL). sd-notify 0.4.5
# says without WATCHDOG_PID that there is none, so under a manager or wrapper that sets only the time
# its service is never kept alive, and is killed where the manager watches. 0.5.0 follows libsystemd
# there, and takes 0 as a watchdog of 0 s: a service that notifies twice in that time never rests.
#
# Needs cargo and its registry, python3, libsystemd.so.0. Fails when the behaviour has changed.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
crate() { # crate VERSION EXPRESSION
    mkdir -p "$dir/$1/src"
    printf '[package]\nname = "check"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\nsd-notify = "=%s"\n' "$1" >"$dir/$1/Cargo.toml"
    printf 'fn main() {\n    let mut time = 0u64;\n    let _ = &mut time;\n    %s\n}\n' "$2" >"$dir/$1/src/main.rs"
    CARGO_TARGET_DIR="$dir/target-$1" cargo build --quiet --manifest-path "$dir/$1/Cargo.toml"
}
crate 0.4.5 'let is = sd_notify::watchdog_enabled(false, &mut time); println!("{is} {time}");'
crate 0.5.0 'match sd_notify::watchdog_enabled() { Some(of) => println!("true {}", of.as_micros()), None => println!("false 0") }'
cat >"$dir/libsystemd.py" <<'EOF'
import ctypes
time = ctypes.c_uint64(0)
print(ctypes.CDLL("libsystemd.so.0").sd_watchdog_enabled(0, ctypes.byref(time)), time.value)
EOF
seen=$(
    for of in 'WATCHDOG_USEC=5000000' 'WATCHDOG_USEC=0'; do
        echo "libsystemd, $of: $(env -u WATCHDOG_PID "$of" python3 "$dir/libsystemd.py")"
        for version in 0.4.5 0.5.0; do
            echo "sd-notify $version, $of: $(env -u WATCHDOG_PID "$of" "$dir/target-$version/debug/check")"
        done
    done
)
echo "$seen"
expected='libsystemd, WATCHDOG_USEC=5000000: 1 5000000
sd-notify 0.4.5, WATCHDOG_USEC=5000000: false 0
sd-notify 0.5.0, WATCHDOG_USEC=5000000: true 5000000
libsystemd, WATCHDOG_USEC=0: -22 0
sd-notify 0.4.5, WATCHDOG_USEC=0: false 0
sd-notify 0.5.0, WATCHDOG_USEC=0: true 0'
[ "$seen" = "$expected" ] || { echo "the behaviour has changed" >&2; exit 1; }
