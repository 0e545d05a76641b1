#!/bin/sh
# SCHED_DEADLINE (Linux), chrt (util-linux), QEMU: a killed VM frees its memory within the reservation
# of the thread that ends last.
#
# Guess: a process that was killed no longer needs its reservations, so `kill -9` takes as long as it
# takes without them (20 ms for 2 GiB); at worst a period longer.
# Seen: the last thread gives the memory back in exit_mm() while it is in its class still, and is
# throttled there. QEMU 7.2 with 2 GiB on Linux 6.18: 17 ms as ordinary threads, 62 ms with 3 ms of
# 20 ms for each thread, 504 to 562 ms with 0.333 ms of 20 ms. A monitor that waits a fixed time for
# the end of a large VM, as `virsh destroy` does, gives up on it.
#
# Needs root, qemu-system-x86_64, chrt, 3 GiB of free memory, no real-time limit on this cgroup. Fails
# when the behaviour has changed.
set -eu
dir=$(mktemp -d)
qemu=
trap '[ -z "$qemu" ] || kill -9 $qemu 2>/dev/null; rm -rf "$dir"' EXIT
qemu-system-x86_64 --version | head -n 1
chrt --version
uname -r
now() { date +%s%N; }
# took RUNTIME_NS: milliseconds from the signal to the end; 0 is without a reservation.
took() {
    qemu-system-x86_64 -accel tcg -m 2048 -mem-prealloc -nodefaults -display none -S &
    qemu=$!
    until [ "$(awk '/VmRSS/ { print $2 }' /proc/$qemu/status)" -gt 2000000 ]; do sleep 0.1; done
    sleep 0.5
    [ "$1" = 0 ] || for tid in $(ls /proc/$qemu/task); do
        chrt --deadline --sched-runtime "$1" --sched-deadline 20000000 --sched-period 20000000 --pid 0 "$tid"
    done
    begin=$(now)
    kill -9 $qemu
    wait $qemu 2>/dev/null || true
    ms=$((($(now) - begin) / 1000000))
    qemu=
}
took 0
plain=$ms
took 333000
echo "without reservations: $plain ms; with 0.333 ms in 20 ms for each thread: $ms ms"
[ "$ms" -gt $((5 * plain)) ] || { echo "the behaviour has changed" >&2; exit 1; }
