#!/bin/sh
# First process of a lab guest: mounts, modules, then the guest agent for ever.
export PATH=/usr/bin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do
	insmod "/lib/modules/$module" || echo "rtvirtio-guest: cannot load $module"
done </lib/modules/order

# The agent's channel is the virtio-serial port of this name.
port=
tries=0
while [ -z "$port" ]; do
	for dir in /sys/class/virtio-ports/*; do
		if [ "$(cat "$dir/name" 2>/dev/null)" = org.qemu.guest_agent.0 ]; then
			port=/dev/${dir##*/}
		fi
	done
	tries=$((tries + 1))
	if [ "$tries" -gt 300 ]; then
		echo "rtvirtio-guest: no virtio-serial port org.qemu.guest_agent.0"
		poweroff -f
	fi
	[ -n "$port" ] || usleep 20000
done

echo "rtvirtio-guest: ready after $(cut -d' ' -f1 /proc/uptime) s"
while :; do
	qemu-ga -m virtio-serial -p "$port" -t /run
	echo "rtvirtio-guest: the agent ended with $?"
	sleep 1
done
