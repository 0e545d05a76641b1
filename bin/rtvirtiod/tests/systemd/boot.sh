# Boots systemd as the first process of a container that looks like this machine; its changes are in
# memory only.
#   boot.sh WORK FILES CGROUP...: a directory for mounts, one with the programs, units and check.sh, and
#   the cgroups in which it is
set -eu
root=$1/root files=$2 work=$1
shift 2
for cgroup in "$@"; do
    echo $$ >"$cgroup/cgroup.procs"
done
mount --make-rprivate /
mount -t tmpfs none "$work"
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay none -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root"
rm -rf "$root/var/lib/rtvirtio" "$root/etc/rtvirtio" "$root/etc/machine-id"
# Only what systemd itself needs, and the services: nothing that is enabled on this machine.
rm -rf "$root"/etc/systemd/system "$root"/etc/systemd/user
mkdir -p "$root/etc/systemd/system" "$root/etc/rtvirtio/contracts.d"
install -m 644 "$files"/*.service "$root/etc/systemd/system/"
install -m 644 "$files/rtvirtio.conf" "$root/usr/lib/sysusers.d/rtvirtio.conf"
for program in rtvirtio rtvirtiod rtvirtio-iod; do
    cp "$files/$program" "$root/usr/bin/$program"
done
mkdir -p "$root/check"
mount --bind "$files" "$root/check"
# Budgets of CPU contracts, where they are of a hierarchy of their own: containers see it read-only.
cpu=
[ ! -e /sys/fs/cgroup/cpu/cgroup.procs ] || cpu=--bind=/sys/fs/cgroup/cpu:/cgroup-cpu
# No link to the host's bus or logs.
SYSTEMD_NSPAWN_LOCK=0 exec systemd-nspawn --quiet --register=no --keep-unit --private-network --link-journal=no --capability=CAP_IPC_LOCK $cpu \
    --directory="$root" --boot --console=pipe systemd.unit=check.service systemd.show_status=no
