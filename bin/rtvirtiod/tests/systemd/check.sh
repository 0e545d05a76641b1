set -eux
of() { systemctl show --value -p "$1" rtvirtiod; }
# As on a host: not read-only.
[ ! -d /cgroup-cpu ] || mount --bind /cgroup-cpu /sys/fs/cgroup/cpu
systemctl start rtvirtiod
# `Type=notify`: started means that the service itself has said so.
[ "$(of ActiveState)" = active ]
[ "$(of Type)" = notify ]
[ "$(of WatchdogUSec)" = 1min ]
first=$(of MainPID)
# The socket is for root and the group: a member reads the state, a stranger does not.
getent group rtvirtio
[ "$(stat -c '%a %U %G' /run/rtvirtio/rtvirtiod.sock)" = '660 root rtvirtio' ]
useradd --groups rtvirtio member
useradd stranger
as() { user=$1; shift; setpriv --reuid="$user" --regid="$user" --init-groups "$@"; }
state() { as "$1" curl --silent --show-error --fail --unix-socket /run/rtvirtio/rtvirtiod.sock http://localhost/v1/status; }
state member | grep -q "\"pid\":$first"
if state stranger; then exit 1; fi
rtvirtio status

# A contract is put in force, which the hardened unit must allow, and put back.
qemu-system-x86_64 -S -nodefaults -display none -machine q35 -accel tcg -name plc,debug-threads=on \
    -qmp unix:/run/plc.qmp,server=on,wait=off &
vm=$!
policies() { for task in /proc/"$vm"/task/*; do chrt -p "${task##*/}"; done; }
ordinary() { ! policies | grep -q 'SCHED_\(FIFO\|DEADLINE\)'; }
ordinary
cat >/etc/rtvirtio/contracts.d/plc.toml <<END
[device]
path = "/dev/sdz"
[[vm]]
name = "plc"
qmp = "/run/plc.qmp"
cpu = { budget = "2ms", period = "20ms" }
[[vm.task]]
name = "t"
op = "read"
block = "4KiB"
END
within() { # within NAME COMMAND...: until it succeeds
    name=$1 tries=0
    shift
    set +x
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 150 ] || { echo "not $name"; rtvirtio status; journalctl --no-pager -u rtvirtiod; exit 1; }
        sleep 0.2
    done
    set -x
}
stands() { state root | grep -q "\"state\":\"$1\""; }
within 'in force' stands in_force
if ordinary; then policies; exit 1; fi
rm /etc/rtvirtio/contracts.d/plc.toml
within 'put back' ordinary
kill "$vm"

# Each entry of the journal has its fields.
journalctl --sync
fields() { journalctl --quiet --no-pager -u rtvirtiod -o json "$@"; }
fields RTVIRTIO_EVENT=started | grep -q '"MESSAGE_ID" *: *"[0-9a-f]\{32\}"'
fields RTVIRTIO_EVENT=changed RTVIRTIO_VM=plc | grep '"RTVIRTIO_SETTING"' | grep -q '"PRIORITY" *: *"5"'
# A death changes nothing, and systemd starts it again.
kill -9 "$first"
tries=0
until [ "$(of NRestarts)" = 1 ] && [ "$(of ActiveState)" = active ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ]
    sleep 0.2
done
[ "$(of MainPID)" != "$first" ]
rtvirtio status
systemctl stop rtvirtiod
[ "$(of ActiveState)" = inactive ]
[ "$(of Result)" = success ]
journalctl --quiet --no-pager -u rtvirtiod
sh -eux /check/disks.sh
echo 'all is as it should be'
