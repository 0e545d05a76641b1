#!/bin/sh
# libvirt: `virsh destroy` of a running VM right after a restart of libvirtd, as an update does.
#
# Guess: libvirtd lists the VM as running, so `destroy` waits until libvirtd has connected to QEMU's
# monitor again, ends the VM and succeeds.
# Seen (libvirt 9.0.0, QEMU 7.2): so it is where QEMU answers at once. Where QEMU has not answered
# yet (here it is stopped by a signal, in use a busy host), `destroy` ends the VM and fails:
# "domain is not running", exit code 1. `destroy` breaks off the wait for the monitor, libvirtd gives
# the reconnection up and ends QEMU for that, and `destroy`, whose turn comes then, finds no VM. A
# script or cluster agent that trusts the exit code takes the VM for one that could not be ended.
#
# Needs root, Debian's packages libvirt-daemon, libvirt-daemon-driver-qemu, libvirt-clients,
# qemu-system-x86. Its daemon has mounts, a network and directories of its own. Fails when the
# behaviour has changed.
set -eu
[ "${INSIDE:-}" ] || INSIDE=1 exec unshare --mount --net --propagation private sh "$0"
dir=$(mktemp -d)
daemon='' name=finding-$$ made=''
process() { cat "/run/libvirt/qemu/$name.pid" 2>/dev/null; }
end() {
    [ -z "$daemon" ] || { kill "$daemon" && wait "$daemon"; } 2>/dev/null || true
    ! process >/dev/null || kill -KILL "$(process)" 2>/dev/null || true
    cd /
    umount -l /run
    for of in etc lib log cache; do umount -l "$dir/$of" 2>/dev/null || true; done
    for of in $made; do umount -l "$of" && rmdir "$of"; done
    rm -rf "$dir"
}
trap end EXIT
mount -t tmpfs tmpfs /run
mkdir /run/libvirt
for of in etc:/etc/libvirt lib:/var/lib/libvirt log:/var/log/libvirt cache:/var/cache/libvirt; do
    mkdir "$dir/${of%%:*}"
    [ -d "${of#*:}" ] || { mkdir "${of#*:}" && made="$made ${of#*:}"; }
    mount --bind "$dir/${of%%:*}" "${of#*:}"
done
# libvirt wants its user by name; a package without the service does not make it.
for of in passwd group; do
    cp /etc/$of "$dir/$of"
    grep -q '^libvirt-qemu:' /etc/$of || echo 'libvirt-qemu:x:64055:64055::/:/bin/false' >>"$dir/$of"
    mount --bind "$dir/$of" /etc/$of
done
printf 'namespaces = []\nsecurity_driver = "none"\nuser = "root"\ngroup = "root"\n' >/etc/libvirt/qemu.conf
printf 'dynamic_ownership = 0\nstdio_handler = "file"\ncgroup_controllers = []\n' >>/etc/libvirt/qemu.conf
printf 'auth_unix_rw = "none"\nauth_unix_ro = "none"\nlog_outputs = "4:file:%s/daemon.log"\n' "$dir" >/etc/libvirt/libvirtd.conf
cat >"$dir/vm.xml" <<END
<domain type='qemu'><name>$name</name><memory unit='MiB'>32</memory>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/></devices></domain>
END
run() { LC_ALL=C virsh -q "$@" 2>&1; }
start() {
    libvirtd &
    daemon=$!
    tries=0
    until run list >/dev/null; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || { cat "$dir/daemon.log"; exit 1; }
        sleep 0.1
    done
}
state() { run domstate "$name" | head -n 1; }
start
echo "$(libvirtd --version), $(qemu-system-x86_64 --version | head -n 1)"
run define "$dir/vm.xml"
for qemu in answers stopped; do
    run start "$name"
    kill "$daemon" && wait "$daemon" || true
    [ $qemu = answers ] || kill -STOP "$(process)"
    start
    was=$(state) code=0
    run destroy "$name" >"$dir/said" || code=$?
    echo "QEMU $qemu: $was; destroy: $code $(tail -n 1 "$dir/said"); $(state)" >>"$dir/seen"
done
cat "$dir/seen"
cat >"$dir/expected" <<END
QEMU answers: running; destroy: 0 ; shut off
QEMU stopped: running; destroy: 1 error: Requested operation is not valid: domain is not running; shut off
END
cmp -s "$dir/seen" "$dir/expected" || { echo "the behaviour has changed" >&2; exit 1; }
