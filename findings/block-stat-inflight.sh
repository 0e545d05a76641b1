#!/bin/sh
# Block layer (Linux 6.18): requests in flight in /sys/block/DISK/stat and in /sys/block/DISK/inflight.
#
# Guess: the ninth field of `stat` is the sum of `inflight`: Documentation/block/stat.rst and
# Documentation/ABI/stable/sysfs-block both count the requests that the driver has, without those that
# still wait in the elevator.
# Seen: `stat` counts what BFQ holds back as well. Of the readings between which nothing was completed,
# a third (501 of 1502) to most (2296 of 2656) have a request in flight in `stat` and none in
# `inflight`. Time with requests in flight, such as %util of iostat, thus has an idle disk as busy.
#
# Needs root, mmdebstrap, Debian's archive and BFQ. Fails when the behaviour has changed, as it has on
# kernels before 6.16 (`bdev_count_inflight` in block/genhd.c).
set -eu
version=3.33-3
dir=$(mktemp -d)
loop=
trap '[ -z "$loop" ] || losetup -d "$loop"; rm -rf "$dir"' EXIT
mmdebstrap --quiet --variant=extract --include="fio=$version" bookworm "$dir/root"
truncate -s 256M "$dir/disk"
loop=$(losetup -f --show --direct-io=on "$dir/disk")
number=$(cat "/sys/block/${loop#/dev/}/dev")
mknod "$dir/root/disk" b "${number%:*}" "${number#*:}"
echo bfq >"/sys/block/${loop#/dev/}/queue/scheduler"
# A reader of higher priority that thinks for 1 ms after each read, for which BFQ idles now and then,
# and one that never does.
chroot "$dir/root" /usr/bin/fio --filename=/disk --direct=1 --bs=4k --ioengine=psync --time_based \
    --runtime=12 --output=/out --prioclass=2 --name=thinks --rw=read --thinktime=1000 --prio=0 \
    --name=busy --rw=randread --prio=7 &
fio=$!
cd "/sys/block/${loop#/dev/}"
same=0 more=0 idle=0
while kill -0 $fio 2>/dev/null; do
    sleep 0.003
    read -r r1 _ _ _ w1 _ _ _ all _ <stat
    read -r reads writes <inflight
    read -r r2 _ _ _ w2 _ _ _ again _ <stat
    # Only readings without a completion between them compare the same requests.
    [ "$r1 $w1 $all" = "$r2 $w2 $again" ] || continue
    driver=$((reads + writes))
    if [ "$all" -gt "$driver" ]; then more=$((more + 1)); else same=$((same + 1)); fi
    if [ "$all" -gt 0 ] && [ "$driver" = 0 ]; then idle=$((idle + 1)); fi
done
cd /
wait $fio
uname -sr
echo "of $((same + more)) readings without a change: stat has more in flight in $more, of these $idle with none in the driver"
[ "$idle" -gt $(((same + more) / 10)) ] || { echo "the behaviour has changed" >&2; exit 1; }
