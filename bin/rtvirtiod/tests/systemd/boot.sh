# Boots systemd as the first process of a container that looks like this machine; its changes are in
# memory only.
#   boot.sh WORK FILES: a directory for mounts, and one with the programs, units and check.sh
set -eu
mount --make-rprivate /
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
root=$1/root files=$2
rm -rf "$root/var/lib/rtvirtio" "$root/etc/rtvirtio" "$root/etc/machine-id"
# Only what systemd itself needs, and the service: nothing that is enabled on this machine.
rm -rf "$root"/etc/systemd/system "$root"/etc/systemd/user
mkdir -p "$root/etc/systemd/system" "$root/etc/rtvirtio/contracts.d"
install -m 644 "$files/rtvirtiod.service" "$files/check.service" "$root/etc/systemd/system/"
install -m 644 "$files/rtvirtio.conf" "$root/usr/lib/sysusers.d/rtvirtio.conf"
for program in rtvirtio rtvirtiod; do
    cp "$files/$program" "$root/usr/bin/$program"
done
mkdir -p "$root/check"
mount --bind "$files" "$root/check"
# No link to the host's bus or logs.
SYSTEMD_NSPAWN_LOCK=0 exec systemd-nspawn --quiet --register=no --keep-unit --private-network --link-journal=no \
    --directory="$root" --boot --console=pipe systemd.unit=check.service systemd.show_status=no
