# Plays docs/guide/libvirt.md step by step; what it prints is what the guide shows.
set -eu
export NO_COLOR=1 LC_ALL=C
. /root/host.sh
dev=$(cat /sys/block/nullb0/dev)
slice=/sys/fs/cgroup/machine.slice
run() {
    printf '# %s\n' "$*"
    "$@"
}
# ends CODE COMMAND...: with this exit code; its output is in the file `said` too.
ends() {
    code=$1 ended=0
    shift
    printf '# %s\n' "$*"
    "$@" >said 2>&1 || ended=$?
    cat said
    [ $ended = "$code" ] || { echo "it ended with $ended"; exit 1; }
}
shows() { grep -q -e "$1" said || { echo "not shown: $1"; exit 1; }; }
process() { cat "/run/libvirt/qemu/$1.pid"; }
# Path of the scope of a VM, and the name of that unit.
scope() { sed -n 's|^0::\(.*\.scope\)/.*|\1|p' "/proc/$(process "$1")/cgroup"; }
unit() { basename "$(scope "$1")"; }
# All that a plan or a contract may set.
snapshot() {
    cat /sys/block/nullb0/queue/scheduler
    find $slice -type f | grep -E '/(cpu.max|cpu.weight|io.max|io.bfq.weight|cgroup.subtree_control)$' | sort |
        while read -r file; do printf '%s: %s\n' "$file" "$(tr '\n' ' ' <"$file")"; done
    for vm in plc historian; do
        systemctl show "$(unit $vm)" -p CPUQuotaPerSecUSec -p CPUQuotaPeriodUSec -p IODeviceWeight -p IOAccounting
        for task in /proc/"$(process $vm)"/task/*; do
            # Workers come and go. Nice value, priority and policy.
            case $(cat "$task/comm") in worker) continue ;; esac
            printf '%s %s %s\n' "$(cat "$task/comm")" "$(sed 's/.*) //' "$task/stat" | cut -d ' ' -f 17,38,39)" "$(cat "$task/cgroup")"
        done
    done
}
same() {
    snapshot >after
    cmp "$1" after || { diff "$1" after; exit 1; }
}
in_force() {
    ends 0 rtvirtio status
    shows '^rtvirtio: in force'
    if grep -i -E 'changed|original|unknown|gone' said; then exit 1; fi
    grep -qx "$dev rbps=max wbps=max riops=377 wiops=max" "/sys/fs/cgroup$(scope historian)/io.max"
    grep -qx "$dev 700" "/sys/fs/cgroup$(scope plc)/io.bfq.weight"
}

for vm in plc historian; do
    virsh -q define /root/$vm.xml
    virsh -q start $vm || { cat /root/*.log /var/log/libvirt/qemu/*.log; exit 1; }
done
run virsh list --all
run find $slice -type d
[ "$(scope plc)" = '/machine.slice/machine-qemu\x2d1\x2dplc.scope' ]
run cat "/proc/$(process plc)/cgroup"
snapshot >before
cat before

ends 0 rtvirtio discover -o found.toml
shows '^plc .*domain plc .*/dev/nullb0'
cat found.toml
run rtvirtio check || true
run rtvirtio profile /dev/nullb0 --gentle --for 11s
run rtvirtio verify plant.toml --for 5s || true
run rtvirtio plan plant.toml -o plant.plan || true
ends 0 rtvirtio apply limit.plan --spec plant.toml --dry-run
same before
ends 0 rtvirtio apply limit.plan --spec plant.toml
in_force
run cat "/sys/fs/cgroup$(scope historian)/io.max"
run systemctl show "$(unit plc)" -p IODeviceWeight -p CPUQuotaPerSecUSec
run virsh schedinfo plc
run virsh blkiotune plc
run virsh blkiotune historian
run rtvirtio threads plant.toml plc
ends 0 rtvirtio revert
shows 'everything was put back'
same before

ends 0 rtvirtio apply limit.plan --spec plant.toml
systemctl daemon-reload
in_force
run virsh iothreadadd plc 2
run virsh setvcpus plc 2 --live
run rtvirtio threads plant.toml plc
rtvirtio keep plant.toml >kept 2>&1 &
keeper=$!
sleep 5
kill -INT $keeper
wait $keeper
cat kept
run rtvirtio threads plant.toml plc
systemctl restart libvirtd.service
in_force
run virsh destroy plc
run virsh start plc
ends 3 rtvirtio status
ends 0 rtvirtio revert
snapshot >before
ends 0 rtvirtio apply limit.plan --spec plant.toml
in_force
ends 0 rtvirtio revert
same before
echo 'all is as it should be'
