#!/bin/sh
# blk-throttle: limits on requests per second that are no multiple of ten.
#
# Guess: a limit of 78 reads/s lets 78 reads/s through, one of 9 reads/s nine.
# Seen (Linux 6.18.44, limits of cgroup v1; loop device over a file, one read in flight): requests are
# counted in slices of 100 ms, and what is left of one in a slice is lost: 19/s lets 10.2 through,
# 78/s 70.3, 198/s 190.2. Below ten it errs the other way too: 9/s lets 15.6 through. 70/s and 200/s
# are exact. With 32 reads in flight the numbers are the same.
#
# Needs root, mmdebstrap, Debian's archive, and the block I/O controller of cgroup v1 or v2 in the
# root group. Fails when the behaviour has changed, as it may on another kernel.
set -eu
version=3.33-3
dir=$(mktemp -d)
loop=
group=
added=
clean() {
    [ -z "$group" ] || rmdir "$group"
    [ -z "$added" ] || echo -io >/sys/fs/cgroup/cgroup.subtree_control
    [ -z "$loop" ] || losetup -d "$loop"
    rm -rf "$dir"
}
trap clean EXIT
mmdebstrap --quiet --variant=extract --include="fio=$version" bookworm "$dir/root"
truncate -s 64M "$dir/disk"
loop=$(losetup -f --show --direct-io=on "$dir/disk")
number=$(cat "/sys/block/${loop#/dev/}/dev")
mknod "$dir/root/disk" b "${number%:*}" "${number#*:}"
if [ -d /sys/fs/cgroup/blkio ]; then
    top=/sys/fs/cgroup/blkio file=blkio.throttle.read_iops_device form='%s %s'
else
    top=/sys/fs/cgroup file=io.max form='%s riops=%s'
    grep -qw io "$top/cgroup.subtree_control" || { echo +io >"$top/cgroup.subtree_control" && added=1; }
fi
mkdir "$top/whole-requests.$$"
group=$top/whole-requests.$$
failed=
# expect LIMIT LEAST MOST: reads per second under the limit.
expect() {
    # shellcheck disable=SC2059
    printf "$form" "$number" "$1" >"$group/$file"
    sh -c 'echo $$ >"$1/cgroup.procs"; exec chroot "$2" /usr/bin/fio --name=job --filename=/disk \
        --ioengine=psync --rw=randread --bs=4k --direct=1 --time_based --runtime=8 \
        --output-format=json --output=/json' sh "$group" "$dir/root"
    got=$(tr -d ' \n\t' <"$dir/root/json" | sed 's/.*"read":{\(.*\)"write":.*/\1/; s/.*"iops":\([0-9.]*\).*/\1/')
    printf 'limit %4s/s: %s/s\n' "$1" "$got"
    awk -v n="$got" -v a="$2" -v b="$3" 'BEGIN { exit !(n >= a && n <= b) }' || failed=1
}
uname -sr
expect 9 13 18
expect 19 9 11
expect 70 69 72
expect 78 69 72
expect 198 188 193
expect 200 198 203
[ -z "$failed" ] || { echo "the behaviour has changed" >&2; exit 1; }
