# Starts systemd as the first process of a container of this box: namespaces of its own for processes, mounts and cgroups,
# the root file system of the box. It has one service, check.sh.
set -eu
mkdir -p /lib/systemd /usr/lib/systemd /etc/systemd/system /var/lib
[ ! -e /usr/local/bin/systemd-executor ] || cp /usr/local/bin/systemd-executor /usr/lib/systemd/
cat >/etc/systemd/system/check.service <<END
[Unit]
DefaultDependencies=no

[Service]
ExecStart=/bin/sh -c 'sh /root/check.sh; echo \$? >/root/code'
Environment=PATH=$PATH HOME=/root
WorkingDirectory=/root
StandardOutput=append:/root/output
StandardError=append:/root/output
END
: >/root/output
tail -f /root/output &
mkdir /sys/fs/cgroup/host
echo +io +cpuset >/sys/fs/cgroup/cgroup.subtree_control
# Only what becomes systemd goes into that group: as the root of its hierarchy it takes no other process.
container=box /usr/local/bin/unshare --fork --kill-child --pid --mount --mount-proc sh -c '
    echo 0 >/sys/fs/cgroup/host/cgroup.procs
    exec /usr/local/bin/unshare --cgroup sh -c "
        umount -l /sys/fs/cgroup
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
        exec /usr/local/bin/systemd --system --unit=check.service --log-target=console --show-status=no"' &
while [ ! -e /root/code ] && kill -0 $!; do sleep 0.2; done
sleep 1
kill $!
exit "$(cat /root/code)"
