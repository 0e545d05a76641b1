#!/bin/sh
# First process of the box: a small host with cgroup v2, BFQ, null_blk and KVM. Unpacks the run's files from the first
# disk, runs /run.sh, sends what it prints to the second serial port, its exit status to the third, and powers off. The third
# also tells that the script begins: before that, nothing of the run has happened yet.
export PATH=/usr/local/bin:/usr/bin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
while read -r module; do
	# Unquoted: arguments are separate words.
	insmod "/lib/modules/$module" $(cat "/lib/modules/$module.args" 2>/dev/null) ||
		echo "rtvirtio-box: cannot load $module"
done </lib/modules/order
ip link set lo up
# What systemd does on a Debian host.
echo "+cpu +memory +pids" >/sys/fs/cgroup/cgroup.subtree_control
# The image inside the box needs no package archive.
export RTVIRTIO_GUEST_IMAGE=/guest

stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo
if cd / && cpio -idmu </dev/vda; then
	cd /root || exit
	echo begins >/dev/ttyS2
	sh /run.sh </dev/null >/dev/ttyS1 2>&1
	echo "$?" >/dev/ttyS2
else
	echo "rtvirtio-box: the run's files cannot be unpacked"
fi
sync
poweroff -f
