# Settings of a scope that systemd keeps: applied, in force after what takes hand-written files away, put back.
set -eux
export RTVIRTIO_STATE_DIR=/root/state NO_COLOR=1
slice=/sys/fs/cgroup/machine.slice scope=/sys/fs/cgroup/machine.slice/plc.scope
dev=$(cat /sys/block/nullb0/dev)
# No deadlines are admitted, so the contract of a VM is a cap.
# Linux 7 refuses less than the share of the fair server.
echo 0 >/proc/sys/kernel/sched_rt_runtime_us || echo 50000 >/proc/sys/kernel/sched_rt_runtime_us
# A neighbour with a weight of its own: systemd enables the cpu controller for the slice.
systemd-run --quiet --scope --unit=neighbour --slice=machine.slice -p CPUWeight=100 sleep 100000 &
systemd-run --quiet --scope --unit=plc --slice=machine.slice taskset 1 qemu-system-x86_64 -S -accel tcg -m 32 -nodefaults \
    -display none -name plc,debug-threads=on -qmp unix:/run/plc.qmp,server=on,wait=off \
    -drive file=/dev/nullb0,format=raw,if=virtio &
until [ -e /run/plc.qmp ] && [ -e $scope/cpu.max ]; do sleep 0.2; done
echo 77 >$scope/cpu.weight
properties() {
    systemctl show plc.scope -p CPUQuotaPerSecUSec -p CPUQuotaPeriodUSec -p IODeviceWeight -p IOAccounting
}
snapshot() {
    cat /sys/block/nullb0/queue/scheduler
    for f in /sys/fs/cgroup/cgroup.subtree_control $slice/cgroup.subtree_control $scope/cpu.* $scope/io.*; do
        case $f in *.stat | *.stat.* | *.pressure) continue ;; esac
        echo "== $f"
        cat "$f"
    done
    properties
}
in_force() {
    rtvirtio status >status
    if grep -i -E 'changed|original|unknown|gone' status; then exit 1; fi
    [ "$(cat $scope/cpu.max)" = '4000 20000' ]
    grep -qx "$dev 700" $scope/io.bfq.weight
    grep -qx "$dev rbps=max wbps=max riops=500 wiops=max" $scope/io.max
}
snapshot >before
cat before

# What systemd takes away that was written by hand: else this test proves nothing.
echo '30000 100000' >$scope/cpu.max
systemctl daemon-reload
[ "$(cat $scope/cpu.max)" = 'max 100000' ]
echo 77 >$scope/cpu.weight
snapshot | cmp before -

rtvirtio apply p.plan --spec s.toml --dry-run >dry 2>&1 || { cat dry; exit 1; }
cat dry
grep 'plc.scope: CPUQuota: .*CPUQuota=20%' dry
grep "plc.scope: IODeviceWeight: .*IODeviceWeight=/dev/block/$dev 6700" dry
snapshot | cmp before -
rtvirtio apply p.plan --spec s.toml 2>said
cat said
if grep 'daemon-reload' said; then exit 1; fi
in_force
cat status
systemctl daemon-reload
in_force
systemctl set-property --runtime plc.scope TasksMax=1000
in_force
systemctl set-property --runtime plc.scope MemoryMax=infinity
systemctl daemon-reload
in_force
rtvirtio revert
snapshot >after
cmp before after
systemctl daemon-reload
echo 77 >$scope/cpu.weight
snapshot | cmp before -
echo 'put back, also after a reload'

# Killed between any two changes: properties, elevator, files.
for at in 1 4 7 9; do
    RTVIRTIO_KILL_AT=$at rtvirtio apply p.plan --spec s.toml -q || true
    test -e state/journal.json
    [ $((at % 2)) = 1 ] || RTVIRTIO_KILL_AT=4 rtvirtio revert -q || true
    rtvirtio revert -q || rtvirtio status
    snapshot >after
    cmp before after || { diff before after; exit 1; }
done
echo 'put back after kills'

# A cap that systemd's files do not hold: named, and seen after a reload.
sed 's/"4ms"/"4100us"/' s.toml >odd.toml
rtvirtio apply odd.toml --cpu-only 2>said
cat said
[ "$(cat $scope/cpu.max)" = '4100 20000' ]
grep 'systemd keeps whole percents: cpu.max of plc.scope becomes `4200 20000`' said
systemctl daemon-reload
[ "$(cat $scope/cpu.max)" = '4200 20000' ]
rtvirtio status >status || true
cat status
grep -i '4200 20000' status
rtvirtio revert
snapshot >after
cmp before after

# The service leaves a cap to another program: systemd does not bring ours back either, nor the weight written by hand.
cat >rtvirtiod.toml <<END
compare = "200ms"
[drift]
budget = "yield"
END
mkdir contracts
cp s.toml contracts/plc.toml
rtvirtiod --config rtvirtiod.toml --contracts contracts >service.log 2>&1 &
service=$!
quota() { systemctl show plc.scope -p CPUQuotaPerSecUSec --value; }
# wait_until COMMAND...: it succeeds within a minute of tries.
wait_until() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || { cat service.log; rtvirtio status; exit 1; }
        sleep 0.2
    done
}
has_cap() { [ "$(cat $scope/cpu.max)" = "$1" ] && [ "$(quota)" = "$2" ]; }
is_whole() { rtvirtio status >status; }
wait_until has_cap '4000 20000' 200ms
# Once all of it is in force, not while it is being set.
wait_until is_whole
cat status
echo '50000 100000' >$scope/cpu.max
wait_until has_cap '50000 100000' infinity
sleep 1
has_cap '50000 100000' infinity
[ "$(cat $scope/cpu.weight)" = 77 ]
kill $service
wait $service
cat service.log
rtvirtio revert
has_cap '50000 100000' infinity
echo 'max 100000' >$scope/cpu.max
snapshot >after
cmp before after
echo 'all is as it should be'
