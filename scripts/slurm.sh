#!/bin/sh
# Runs examples/fleet/slurm/sweep.sbatch on real Slurm: a controller and two nodes of this machine, each with a disk of the laboratory's
# twin. Debian's packages are installed into an overlay that is thrown away; the machine stays as it is. About five minutes.
# Usage: sudo scripts/slurm.sh       Needs what `scripts/deps.sh test` installs, and the network for the packages.
# Exit status 0 when both nodes measured their parts, the parts merge, and each node's device is confirmed by the library or measured whole.
set -eu
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || { echo "slurm: run it as root" >&2; exit 1; }
if [ -z "${RTVIRTIO_SLURM_DIR:-}" ]; then
    cargo build -q -p rtvirtio -p rtvirtio-lab
    RTVIRTIO_SLURM_DIR=$(mktemp -d /tmp/rtvirtio-slurm-XXXXXX)
    export RTVIRTIO_SLURM_DIR
    at_end() {
        for loop in "$RTVIRTIO_SLURM_DIR"/loop?; do
            [ ! -s "$loop" ] || losetup -d "$(cat "$loop")" || true
        done
        rm -rf --one-file-system "$RTVIRTIO_SLURM_DIR"
    }
    trap at_end EXIT INT TERM
    # Processes and mounts end with the namespaces. Network: packages come before the cluster is cut off.
    unshare --mount --uts --ipc --pid --fork --kill-child=KILL --mount-proc "$0"
    exit
fi

dir=$RTVIRTIO_SLURM_DIR
target=$(cargo metadata --format-version 1 --no-deps | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')/debug
log() { echo "slurm: $*" >&2; }
mount --make-rprivate /
mkdir "$dir/tmpfs" && mount -t tmpfs tmpfs "$dir/tmpfs"
mkdir "$dir/tmpfs/upper" "$dir/tmpfs/work" "$dir/tmpfs/shared" "$dir/root"
mount -t overlay -o "lowerdir=/,upperdir=$dir/tmpfs/upper,workdir=$dir/tmpfs/work" overlay "$dir/root"
root=$dir/root
for at in proc sys dev; do mount --rbind "/$at" "$root/$at"; done
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount --bind "$dir/tmpfs/shared" "$root/mnt"
mkdir -p "$root/run/lock" "$root/run/munge"

log "installing Slurm into an overlay"
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" && chmod 755 "$root/usr/sbin/policy-rc.d"
chroot "$root" sh -c 'apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    slurmctld slurmd slurm-client munge' >"$dir/apt.log" 2>&1 || { tail -n 20 "$dir/apt.log" >&2; exit 1; }

# The same disk on both, as two of one model: a twin each, served outside the overlay.
for n in 1 2; do
    mkdir "$dir/twin$n"
    echo | "$target/rtvirtio-lab" twin-serve --profile qlc-nvme --size 256MiB --seed "$n" --mount "$dir/twin$n" >"$dir/twin$n.log" 2>&1 &
    i=0
    until [ -f "$dir/twin$n/disk" ]; do
        i=$((i + 1))
        [ "$i" -lt 100 ] || { log "no twin: $(cat "$dir/twin$n.log")"; exit 1; }
        sleep 0.1
    done
    losetup --find --show --direct-io=on "$dir/twin$n/disk" >"$dir/loop$n"
done

cp "$target/rtvirtio" "$root/usr/local/bin/rtvirtio"
cp examples/fleet/slurm/sweep.sbatch "$root/mnt/"
mkdir -p "$root/etc/slurm"
cat >"$root/etc/slurm/slurm.conf" <<CONF
ClusterName=rack
SlurmctldHost=localhost(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
ReturnToService=2
StateSaveLocation=/run/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmdSpoolDir=/run/slurmd-%n
SlurmctldPort=6817
NodeName=n1 NodeHostname=localhost NodeAddr=10.78.0.1 Port=17001 CPUs=1
NodeName=n2 NodeHostname=localhost NodeAddr=10.78.0.1 Port=17002 CPUs=1
PartitionName=rack Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
cat >"$root/run/cluster.sh" <<'CLUSTER'
set -eu
# Its own name resolution wants an address that is not of the loopback's net.
ip link set lo up
ip addr add 10.78.0.1/32 dev lo
hostname localhost
mkdir -p /run/slurmctld /run/slurmd-n1 /run/slurmd-n2
[ -e /etc/munge/munge.key ] || head -c 1024 /dev/urandom >/etc/munge/munge.key
chown munge: /etc/munge/munge.key /run/munge && chmod 400 /etc/munge/munge.key
mkdir -p /var/log/munge /var/lib/munge && chown munge: /var/log/munge /var/lib/munge
setpriv --reuid munge --regid munge --clear-groups munged
slurmctld
# A node's own state, and its disk under the name that all have.
for n in 1 2; do
    unshare --mount sh -c "mkdir -p /srv/rack /var/lib/rtvirtio /run/rtvirtio && mount -t tmpfs -o mode=755 tmpfs /srv/rack && mount -t tmpfs -o mode=755 tmpfs /var/lib/rtvirtio &&
        mount -t tmpfs -o mode=755 tmpfs /run/rtvirtio && ln -s $(cat /run/loop$n) /srv/rack/disk && exec slurmd -N n$n"
done
i=0
until [ "$(sinfo -h -t idle -o %D 2>/dev/null | head -n 1)" = 2 ]; do
    i=$((i + 1))
    [ "$i" -lt 300 ] || { sinfo -N -l; tail -n 30 /var/log/slurm/*.log; exit 1; }
    sleep 0.1
done
echo "slurm: two nodes are up" >&2
cd /mnt
sbatch --wait --array=1-2 sweep.sbatch /srv/rack/disk /mnt/shares "$SWEEP" --for "$PROFILE" --kind lab-twin ||
    { cat rtvirtio-sweep-*.log; exit 1; }
for n in 1 2; do tail -n 2 rtvirtio-sweep-$n.log; done
rtvirtio profile merge shares/share-*.json --library devices
! grep -l -e '"n1"' -e '"n2"' -e /dev/loop shares/* devices/* || { echo "slurm: a name of a host or device is in a file" >&2; exit 1; }
# The refusals, on what was measured.
sed 's/"firmware":null/"firmware":"2.0"/' shares/share-2.json >other.json
! rtvirtio profile merge shares/share-1.json other.json --library other 2>refused || { echo "slurm: two kinds were merged" >&2; exit 1; }
grep 'is of another kind' refused
for n in n1 n2; do
    srun -w $n --exclusive rtvirtio profile /srv/rack/disk --library /mnt/devices --kind lab-twin --for "$PROFILE" >known-$n.txt 2>known-$n.log ||
        { cat known-$n.log; exit 1; }
    grep -E 'confirmed, at most|is measured whole' known-$n.log | sed "s/^/$n: /"
done
CLUSTER
for n in 1 2; do cp "$dir/loop$n" "$root/run/loop$n"; done
SWEEP=${SWEEP:-40s} PROFILE=${PROFILE:-12s} unshare --net chroot "$root" sh /run/cluster.sh
log "ok"
