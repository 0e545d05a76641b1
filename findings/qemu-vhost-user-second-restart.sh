#!/bin/sh
# QEMU: a vhost-user disk with `reconnect=1` whose back end is restarted twice, the first time before
# the guest has started its disk (the VM is paused).
#
# Guess: QEMU follows both restarts, as it does where the guest uses the disk at the first one.
# Seen: QEMU 7.2.22 (Debian 12) follows the first one, and the guest boots. After the second one it
# does not set the disk up again: a reset guest waits for its first read without an end, and QEMU
# says nothing. 10.0.13 (Debian 13) follows both. Upstream mended it in 8.2 and 9.1 ("vhost-user: fix
# lost reconnect", and "again").
#
# The guest is a boot sector that writes one K to a debug port and halts; qemu-storage-daemon 7.2 is
# the back end. Needs root, mmdebstrap, python3 and Debian's archive. Fails when the behaviour has
# changed.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat >"$dir/boots.py" <<'PY'
import json, os, subprocess, sys, time

dir, qemu, daemon, early = sys.argv[1], sys.argv[2].split(), sys.argv[3].split(), sys.argv[4] == "early"
disk, sock, out = dir + "/disk", dir + "/sock", dir + "/out"
# mov al, 'K'; out 0xe9, al; hlt; jmp to the hlt
code = bytes([0xB0, 0x4B, 0xE6, 0xE9, 0xF4, 0xEB, 0xFD])
open(disk, "wb").write((code.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))


def start():
    if os.path.exists(sock):
        os.unlink(sock)
    export = f"type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={sock}"
    args = ["--blockdev", f"driver=file,node-name=f,filename={disk}", "--export", export]
    running = subprocess.Popen(daemon + args, stdin=subprocess.DEVNULL)
    while not os.path.exists(sock):
        time.sleep(0.05)
    return running


def restart(running):
    running.kill()
    running.wait()
    running = start()
    time.sleep(3)
    return running


backend = start()
args = "-machine q35,accel=tcg,memory-backend=mem -nodefaults -display none -S -m 64".split()
args += ["-object", "memory-backend-memfd,id=mem,size=64M,share=on", "-qmp", "stdio"]
args += ["-chardev", f"socket,id=c,path={sock},reconnect=1", "-device", "vhost-user-blk-pci,chardev=c"]
args += ["-debugcon", f"file:{out}"]
vm = subprocess.Popen(qemu + args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(command):
    vm.stdin.write(json.dumps({"execute": command}) + "\n")
    vm.stdin.flush()
    while '"return"' not in (line := vm.stdout.readline()):
        assert line, "QEMU has ended"


try:
    ask("qmp_capabilities")
    time.sleep(1)
    if early:
        backend = restart(backend)
    ask("cont")
    time.sleep(10)
    first = open(out).read()
    backend = restart(backend)
    ask("system_reset")
    time.sleep(10)
    print(first, open(out).read())
finally:
    vm.kill()
    backend.kill()
PY
# boots SUITE VERSION: both orders, as `K` for each boot.
boots() {
    mmdebstrap --quiet --variant=extract --include="qemu-system-x86=$2,seabios" "$1" "$dir/$1"
    of() {
        lib=$dir/$1/usr/lib/x86_64-linux-gnu
        loader=$(find "$dir/$1" -name 'ld-linux-x86-64.so.2' -type f | head -n 1)
        echo "$loader --library-path $lib:$dir/$1/lib/x86_64-linux-gnu:$lib/pulseaudio $dir/$1/usr/bin/$2"
    }
    qemu="$(of "$1" qemu-system-x86_64) -L $dir/$1/usr/share/qemu -L $dir/$1/usr/share/seabios"
    backend=$(of bookworm qemu-storage-daemon)
    for order in late early; do
        modules=$dir/$1/usr/lib/x86_64-linux-gnu/qemu
        QEMU_MODULE_DIR=$modules python3 "$dir/boots.py" "$dir" "$qemu" "$backend" "$order" 2>/dev/null
        rm "$dir/out"
    done | tr '\n' ';'
}
old=$(boots bookworm 1:7.2+dfsg-7+deb12u18+b3)
new=$(boots trixie 1:10.0.13+ds-0+deb13u1)
echo "QEMU 7.2: $old QEMU 10.0: $new"
if [ "$old" != "K KK;K K;" ] || [ "$new" != "K KK;K KK;" ]; then
    echo "the behaviour has changed" >&2
    exit 1
fi
