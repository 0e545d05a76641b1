# The units of the I/O domain: started, reloaded, restarted after a death, stopped, with a QEMU connected.
of() { systemctl show --value -p "$1" "$2"; }
until_is() { # until_is WHAT COMMAND...
    what=$1 tries=0
    shift
    set +x
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || { echo "not $what"; journalctl --no-pager -u 'rtvirtio-iod*'; exit 1; }
        sleep 0.2
    done
    set -x
}
disk() { # disk NAME: of a file that is made here
    truncate -s 16M "/var/tmp/$1"
    printf '[[device.disk]]\nname = "%s"\nsocket = "/run/rtvirtio/disks/%s"\npath = "/var/tmp/%s"\nformat = "raw"\n' "$1" "$1" "$1"
}
{ printf '[[device]]\nname = "d"\nwindow = 4\n'; disk plc; } >/etc/rtvirtio/iod.toml
systemctl start rtvirtio-iod
[ "$(of ActiveState rtvirtio-iod)" = active ]
[ "$(of WatchdogUSec rtvirtio-iod)" = 30s ]
first=$(of MainPID rtvirtio-iod)
qemu-system-x86_64 -nodefaults -display none -machine q35,memory-backend=mem -accel tcg -m 64 \
    -object memory-backend-memfd,id=mem,size=64M,share=on -chardev socket,id=c0,path=/run/rtvirtio/disks/plc,reconnect=1 \
    -device vhost-user-blk-pci,chardev=c0,num-queues=1 &
vm=$!
connected() { rtvirtio iod status --json | grep -q '"attached": *true'; }
until_is 'connected' connected
# Memory is locked, as the unit allows.
if journalctl --no-pager -u rtvirtio-iod | grep 'memory is not locked'; then exit 1; fi

# A reload attaches a disk; one that is wrong fails, with its reason, and changes nothing.
disk hist >>/etc/rtvirtio/iod.toml
systemctl reload rtvirtio-iod
test -S /run/rtvirtio/disks/hist
cp /etc/rtvirtio/iod.toml /run/good
echo 'weights = 3' >>/etc/rtvirtio/iod.toml
if systemctl reload rtvirtio-iod; then exit 1; fi
journalctl --sync
journalctl --no-pager -u rtvirtio-iod | grep -q weights
cp /run/good /etc/rtvirtio/iod.toml
# What comes while it runs is in its file.
{ printf '[[device]]\nname = "d"\n'; disk late; } | rtvirtio iod attach -
grep -q late /etc/rtvirtio/iod.toml
[ "$(of MainPID rtvirtio-iod)" = "$first" ]

# A death: systemd starts it again on the same file, and QEMU connects by itself.
kill -9 "$first"
again() { [ "$(of NRestarts rtvirtio-iod)" = 1 ] && [ "$(of ActiveState rtvirtio-iod)" = active ]; }
until_is 'started again' again
until_is 'connected again' connected
test -S /run/rtvirtio/disks/hist
rtvirtio iod status --json | grep -q '"late"'

# A second one beside it.
mkdir -p /etc/rtvirtio/iod.d
{ printf 'control = "/run/rtvirtio/cell2.sock"\n[[device]]\nname = "e"\n'; disk cell2; } >/etc/rtvirtio/iod.d/cell2.toml
systemctl start rtvirtio-iod@cell2
systemctl reload rtvirtio-iod@cell2
rtvirtio iod status --control /run/rtvirtio/cell2.sock | grep -q cell2
systemctl stop rtvirtio-iod@cell2
[ "$(of Result rtvirtio-iod@cell2)" = success ]

# An end that is asked for stays.
kill "$vm"
wait "$vm" || true
gone() { ! connected; }
until_is 'disconnected' gone
rtvirtio iod stop
inactive() { [ "$(of ActiveState rtvirtio-iod)" = inactive ]; }
until_is 'inactive' inactive
[ "$(of Result rtvirtio-iod)" = success ]
[ "$(of NRestarts rtvirtio-iod)" = 1 ]
