# Plays docs/guide/libvirt.md step by step; what it prints is what the guide shows.
set -eu
export NO_COLOR=1 LC_ALL=C.UTF-8
. /root/host.sh
dev=$(cat /sys/block/nullb0/dev)
slice=/sys/fs/cgroup/machine.slice
# What is not as it should be is named, and the rest is played all the same.
wrong=
fail() {
    wrong=1
    echo "WRONG: $*"
}
at() { printf '\n(%s s)\n' "$(cut -d . -f 1 /proc/uptime)"; }
run() {
    at
    printf '# %s\n' "$*"
    "$@"
}
# ends CODE COMMAND...: with this exit code; its output is in the file `said` too.
ends() {
    code=$1 ended=0
    shift
    at
    printf '# %s\n' "$*"
    "$@" >said 2>&1 || ended=$?
    cat said
    [ $ended = "$code" ] || fail "it ended with $ended"
}
# within COMMAND...: it succeeds within a minute of tries; else 1.
within() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 120 ] || return 1
        sleep 0.5
    done
}
shows() { grep -q -e "$1" said || fail "not shown: $1"; }
is() { [ "$1" = "$2" ] || fail "$1 in place of $2"; }
process() { cat "/run/libvirt/qemu/$1.pid"; }
# libvirtd as an update of its package restarts it: its VMs run on.
restart_libvirtd() {
    systemctl restart libvirtd.service
    # It connects to its VMs by and by.
    within has_plc && return 0
    fail 'libvirtd has lost plc'
    tail -n 20 /root/libvirtd.log
    virsh -q start plc
}
has_plc() { virsh -q list --name | grep -qx plc; }
# Path of the scope of a VM, and the name of that unit.
scope() { sed -n 's|^0::\(.*\.scope\)/.*|\1|p' "/proc/$(process "$1")/cgroup"; }
unit() { basename "$(scope "$1")"; }
# All that a plan or a contract may set.
snapshot() {
    cat /sys/block/nullb0/queue/scheduler
    find $slice -type f -exec grep -H '' {} + 2>/dev/null |
        grep -E '/(cpu.max|cpu.weight|io.max|io.bfq.weight|cgroup.subtree_control):' | sort
    for vm in plc historian; do
        systemctl show "$(unit $vm)" -p CPUQuotaPerSecUSec -p CPUQuotaPeriodUSec -p IODeviceWeight -p IOAccounting
        # Nice value, priority and policy of each thread; workers come and go.
        cd "/proc/$(process $vm)/task"
        grep -v '(worker)' ./*/stat | sed 's/^[^(]*(\(.*\)) [A-Z] /\1 | /' | awk '{ print $1, $2, $(NF - 33), $(NF - 12), $(NF - 11) }'
        sort -u ./*/cgroup
        cd /root
    done
}
same() {
    snapshot >after
    diff "$1" after || fail 'it is not as before'
}
whole() {
    ends 0 rtvirtio status
    shows ': in force, '
    if grep -i -E 'changed|original|unknown|gone' said; then fail 'not in force'; fi
}
in_force() {
    whole
    is "$(grep "^$dev " "/sys/fs/cgroup$(scope historian)/io.max")" "$dev rbps=max wbps=max riops=$limit wiops=max"
    is "$(policy_of_main)" 6
}
# 6 is SCHED_DEADLINE.
is_kept() { [ "$(grep -h -F "$1" "/proc/$(process plc)/task/"*/stat | sed 's/.*) //' | cut -d ' ' -f 39)" = 6 ]; }
policy_of_main() { sed 's/.*) //' "/proc/$(process plc)/stat" | cut -d ' ' -f 39; }

for vm in plc historian; do
    at
    virsh -q define /root/$vm.xml
    virsh -q start $vm || { cat /root/*.log /var/log/libvirt/qemu/*.log; exit 1; }
done
run virsh list --all
run find $slice -type d
is "$(scope plc)" '/machine.slice/machine-qemu\x2d1\x2dplc.scope'
run cat "/proc/$(process plc)/cgroup"
restart_libvirtd
snapshot >before
cat before

ends 0 rtvirtio discover -o found.toml
shows '^plc .*domain plc .*/dev/nullb0'
cat found.toml
run rtvirtio check || true
run rtvirtio profile /dev/nullb0 --gentle --for 4s || true
run rtvirtio verify plant.toml --for 3s || true
planned=0
run rtvirtio plan plant.toml -o plant.plan >said || planned=$?
cat said
# What is measured here is the emulation: where there is no plan that fits, or none with a limit, one by hand takes its place.
limit=$(sed -n 's|.*historian read rate limit: max [^ ]* \([0-9]*\)/s.*|\1|p' said)
if [ -n "$limit" ] && [ $planned = 0 ]; then plan=plant.plan; else plan="limit.plan --spec plant.toml" limit=377; fi
ends 0 rtvirtio apply $plan --dry-run
same before
ends 0 rtvirtio apply $plan
in_force
run cat "/sys/fs/cgroup$(scope historian)/io.max"
run systemctl show "$(unit historian)" -p IOAccounting
run virsh schedinfo plc
run virsh blkiotune plc
run virsh blkiotune historian
run rtvirtio threads plant.toml plc
ends 0 rtvirtio revert
shows 'everything was put back'
same before
ends 0 rtvirtio apply plant.toml --cpu-only
ends 0 rtvirtio revert
same before

plan="limit.plan --spec plant.toml" limit=377
ends 0 rtvirtio apply $plan
systemctl daemon-reload
in_force
restart_libvirtd
in_force
run virsh iothreadadd plc 2 || fail 'no I/O thread'
run virsh setvcpus plc 2 --live || fail 'no vCPU'
rtvirtio keep plant.toml >kept 2>&1 &
keeper=$!
within is_kept 'CPU 1/' && within is_kept iothread2 || fail 'keep took a plugged thread not in'
run rtvirtio threads plant.toml plc
restart_libvirtd
# Right after a restart it may fail and end the domain all the same.
run virsh destroy plc || is "$(virsh domstate plc | head -n 1)" 'shut off'
run virsh start plc
# `keep` has ended with the VM.
wait $keeper || fail 'keep failed'
cat kept
ends 3 rtvirtio status
shows 'ended'
ends 0 rtvirtio revert
snapshot >before

# No deadlines are admitted, so the contract is a cap of the scope, which systemd is told.
granted=$(cat /proc/sys/kernel/sched_rt_runtime_us)
echo 0 >/proc/sys/kernel/sched_rt_runtime_us || echo 50000 >/proc/sys/kernel/sched_rt_runtime_us
ends 0 rtvirtio apply limit.plan --spec plant.toml
shows 'cpu.max (cap)'
capped() {
    whole
    is "$(cat "/sys/fs/cgroup$(scope plc)/cpu.max")" '16000 20000'
    is "$(systemctl show "$(unit plc)" -p CPUQuotaPerSecUSec --value)" 800ms
    is "$(grep "^$dev " "/sys/fs/cgroup$(scope plc)/io.bfq.weight")" "$dev 700"
    is "$(grep "^$dev " "/sys/fs/cgroup$(scope historian)/io.max")" "$dev rbps=max wbps=max riops=377 wiops=max"
}
capped
systemctl daemon-reload
capped
# libvirt has systemd set these for the scope.
run virsh schedinfo plc --set cpu_shares=2048 || fail schedinfo
run virsh blkiotune plc --weight 1000 || fail blkiotune
run cat "/sys/fs/cgroup$(scope plc)/cpu.weight" "/sys/fs/cgroup$(scope plc)/io.bfq.weight"
capped
ends 0 rtvirtio revert
shows 'everything was put back'
snapshot >after
# libvirt's own are left.
is "$(diff before after | grep '^[<>]' | grep -v -E '/(cpu.weight|io.bfq.weight):')" ''
echo "$granted" >/proc/sys/kernel/sched_rt_runtime_us

# The service, by the unit of the package.
systemctl start rtvirtiod.service || fail "$(systemctl status rtvirtiod.service)"
ends 0 rtvirtio contract set plc plant.toml
held() {
    # Of the other VM there is no contract.
    rtvirtio contract show >said 2>&1 || true
    grep -q 'plc.*in force' said && [ "$(policy_of_main)" = 6 ]
}
within held || fail 'no contract'
run rtvirtio contract show || true
run virsh destroy plc
run virsh start plc
within held || fail 'no contract after a restart'
run rtvirtio status || true
run rtvirtio contract show || true
ends 0 rtvirtio contract remove plc
systemctl stop rtvirtiod.service
is "$(policy_of_main)" 0
ends 0 rtvirtio status
shows 'no plan is in force'
for vm in plc historian; do virsh -q destroy $vm; done
# Of a VM that has ended nothing is left.
is_empty() { [ -z "$(find $slice -mindepth 1 -type d)" ]; }
within is_empty || fail 'a scope is left'
[ -z "$wrong" ]
echo 'all is as it should be'
