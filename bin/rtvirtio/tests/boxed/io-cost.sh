set -eu
export RTVIRTIO_STATE_DIR=/root/state NO_COLOR=1
cgroups=/sys/fs/cgroup
queue=/sys/block/nullb0/queue
dev=$(cat /sys/block/nullb0/dev)
uname -r
if [ ! -e $cgroups/io.cost.qos ]; then
    rtvirtio check >checked || true
    grep 'there is no io.cost' checked
    if rtvirtio apply io-cost.plan --spec io-cost.toml --dry-run 2>refused; then exit 1; fi
    cat refused
    grep -q CONFIG_BLK_CGROUP_IOCOST refused
    echo "the kernel has no io.cost"
    exit 0
fi

# Without the lines that mean what none means: a device's line stays once there was one.
snapshot() {
    for f in $queue/scheduler $queue/nr_requests $queue/wbt_lat_usec $queue/iosched/* \
        $(find $cgroups -name io.weight -o -name io.bfq.weight -o -name io.max | sort); do
        # No tunables with `none`, no throttling of writeback on some kernels.
        [ -e "$f" ] || continue
        echo "== $f"
        cat "$f" || true
    done
    cat $cgroups/cgroup.subtree_control
    grep -v ' enable=0 ctrl=auto ' $cgroups/io.cost.qos || true
    grep -v ' ctrl=auto ' $cgroups/io.cost.model || true
}

mkdir -p $cgroups/vms/a $cgroups/vms/b
echo bfq >$queue/scheduler
snapshot >before
cat before
rtvirtio check >checked || true
grep 'io.cost is off' checked

# BFQ on the same device is refused, and nothing is written.
grep -v host_elevator io-cost.plan >without.plan
if rtvirtio apply without.plan --spec io-cost.toml 2>refused; then exit 1; fi
cat refused
grep -q 'BFQ' refused
rtvirtio apply io-cost.plan --spec io-cost.toml --dry-run
snapshot >still
cmp before still

# A plan of our own predicts nothing, and is applied only when that is asked for.
code=0
rtvirtio plan io-cost.toml --io-cost -o made.plan >planned || code=$?
cat planned
[ $code = 2 ]
grep -q 'not predicted' planned
if rtvirtio apply made.plan 2>refused; then exit 1; fi
grep -q 'not predicted' refused
snapshot >still
cmp before still

rtvirtio apply io-cost.plan --spec io-cost.toml
cat $cgroups/io.cost.qos $cgroups/io.cost.model $cgroups/vms/a/io.weight
grep -qx "$dev enable=1 ctrl=user rpct=99.90 rlat=500000 wpct=0.00 wlat=500000 min=100.00 max=100.00" $cgroups/io.cost.qos
grep -qx "$dev ctrl=user model=linear rbps=614400 rseqiops=150 rrandiops=150 wbps=614400 wseqiops=150 wrandiops=150" \
    $cgroups/io.cost.model
grep -qx "$dev 800" $cgroups/vms/a/io.weight
grep -qx "$dev 200" $cgroups/vms/b/io.weight
rtvirtio status

# Two groups that always want more share the device by their weights, 4:1. The model's 150 requests
# a second are far below what an emulated box does, so io.cost alone holds them back.
run() {
    sh -c "echo \$\$ >$cgroups/vms/$1/cgroup.procs; exec fio --name=$1 --filename=/dev/nullb0 --rw=randread --bs=4k --direct=1 \
        --ioengine=psync --numjobs=4 --time_based --runtime=10 --group_reporting" >fio.$1
}
run a &
first=$!
run b &
wait $first $!
reads() { sed -n "s/^$dev .*rios=\([0-9]*\).*/\1/p" $cgroups/vms/$1/io.stat; }
a=$(reads a) b=$(reads b)
echo "reads by weight 800 and 200: $a and $b"
[ "$b" -gt 0 ]
[ "$a" -ge $((2 * b)) ]
rtvirtio status

rtvirtio revert
snapshot >after
diff before after
cat $cgroups/io.cost.qos $cgroups/io.cost.model
grep -q "^$dev enable=0 ctrl=auto " $cgroups/io.cost.qos
grep -q "^$dev ctrl=auto " $cgroups/io.cost.model
echo "put back, no differences"

# Our own plan, where it is asked for.
rtvirtio apply made.plan --compromise
cat $cgroups/io.cost.qos
rtvirtio revert
snapshot >after
diff before after

# Latency targets, where the kernel has them, refused next to io.cost.
code=0
rtvirtio plan io-cost.toml --io-latency -o latency.plan >planned || code=$?
cat planned
[ $code = 2 ]
grep -q 'not predicted' planned
for group in "" /vms; do echo +io >$cgroups$group/cgroup.subtree_control; done
if [ -e $cgroups/vms/a/io.latency ]; then
    rtvirtio apply latency.plan --compromise
    grep -qx "$dev target=20000" $cgroups/vms/a/io.latency
    [ -z "$(cat $cgroups/vms/b/io.latency)" ]
    rtvirtio status
    rtvirtio revert
    [ -z "$(cat $cgroups/vms/a/io.latency)" ]
    echo "io.latency is put back"
    echo "$dev enable=1 ctrl=auto" >$cgroups/io.cost.qos
    echo none >$queue/scheduler
    if rtvirtio apply latency.plan --compromise 2>refused; then exit 1; fi
    cat refused
    grep -q 'io.cost is enabled' refused
    echo "$dev enable=0" >$cgroups/io.cost.qos
    echo bfq >$queue/scheduler
else
    if rtvirtio apply latency.plan --compromise 2>refused; then exit 1; fi
    cat refused
    grep -q CONFIG_BLK_CGROUP_IOLATENCY refused
    echo "the kernel has no io.latency"
fi
for group in /vms ""; do echo -io >$cgroups$group/cgroup.subtree_control; done
snapshot >after
diff before after

# Another program's is left alone.
echo none >$queue/scheduler
echo "$dev enable=1 ctrl=auto" >$cgroups/io.cost.qos
cat $cgroups/io.cost.qos >theirs
if rtvirtio apply io-cost.plan --spec io-cost.toml 2>refused; then exit 1; fi
cat refused
grep -q 'enabled there already' refused
cmp theirs $cgroups/io.cost.qos
