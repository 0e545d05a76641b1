#!/bin/sh
# Debian packages of what is built: rtvirtio (with rtvirtiod and rtvirtio-iod), rtvirtio-pacemaker,
# rtvirtio-lab (with rtvirtio-bench), and rtvirtio-guest
# where `make guest` has built it. Needs dpkg-deb, strip and objdump, no debhelper.
# Usage: packaging/deb/build.sh [--programs DIR] [--out DIR]     (target/release, target/debian)
# COMPRESSION=none|gzip|xz|zstd is that of dpkg-deb.
set -eu
top=$(cd "$(dirname "$0")/../.." && pwd)
programs=$top/target/release
out=$top/target/debian
while [ $# -gt 0 ]; do
    case $1 in
    --programs) programs=${2:?a directory}; shift 2 ;;
    --out) out=${2:?a directory}; shift 2 ;;
    *) sed -n '2,5s/^# //p' "$0" >&2; exit 64 ;;
    esac
done
for tool in dpkg-deb strip objdump; do
    command -v "$tool" >/dev/null 2>&1 || { echo "no $tool here: apt install dpkg binutils" >&2; exit 1; }
done
for program in rtvirtio rtvirtiod rtvirtio-iod rtvirtio-pacemaker rtvirtio-lab rtvirtio-bench; do
    [ -x "$programs/$program" ] || { echo "no $programs/$program: make deb" >&2; exit 1; }
done
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$top/Cargo.toml" | head -1)
architecture=$(dpkg --print-architecture)
# The same commit gives the same bytes.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
umask 022
mkdir -p "$out"

put() { install -D -m "$1" "$2" "$root/$3"; } # put MODE FILE PATH

# A program with its manual and its completions: program NAME [FILE]
program() {
    file=${2:-$programs/$1}
    put 755 "$file" "usr/bin/$1"
    strip --strip-all "$root/usr/bin/$1"
    pages=$work/manual/$1
    "$root/usr/bin/$1" --write-manual "$pages"
    for page in "$pages"/man/*; do
        put 644 "$page" "usr/share/man/man${page##*.}/$(basename "$page")"
        gzip -9n "$root/usr/share/man/man${page##*.}/$(basename "$page")"
    done
    put 644 "$pages/completions/$1.bash" "usr/share/bash-completion/completions/$1"
    put 644 "$pages/completions/_$1" "usr/share/zsh/vendor-completions/_$1"
    put 644 "$pages/completions/$1.fish" "usr/share/fish/vendor_completions.d/$1.fish"
}

# Newest version of the C library that its programs ask for; nothing for static ones.
libraries() {
    needed=$(for file in "$root"/usr/bin/*; do objdump -p "$file" | sed -n 's/^ *NEEDED *//p'; done | sort -u)
    [ -n "$needed" ] || return 0
    newest=$(for file in "$root"/usr/bin/*; do objdump -T "$file"; done | sed -n 's/.*GLIBC_\([0-9.]*\).*/\1/p' | sort -uV | tail -1)
    printf 'libc6 (>= %s)' "$newest"
    for library in $needed; do
        case $library in
        libc.so.* | libm.so.* | ld-linux*) ;;
        libgcc_s.so.1) printf ', libgcc-s1' ;;
        *) echo "which package has $library?" >&2; exit 1 ;;
        esac
    done
}

begin() { # begin NAME
    name=$1
    root=$work/$name
    mkdir -p "$root/DEBIAN" "$root/usr/share/doc/$name"
    chmod 755 "$root"
}
finish() { # finish DEPENDS RECOMMENDS SUMMARY; the description's text is on standard input
    install -m 644 "$top/packaging/deb/copyright" "$root/usr/share/doc/$name/copyright"
    gzip -9nc "$top/CHANGELOG.md" >"$root/usr/share/doc/$name/changelog.gz"
    depends=$(libraries)
    [ -z "$1" ] || depends=${depends:+$depends, }$1
    {
        printf 'Package: %s\nVersion: %s\nArchitecture: %s\nSection: admin\nPriority: optional\n' "$name" "$version" "$architecture"
        printf 'Maintainer: rtvirtio developers <rtvirtio@users.noreply.github.com>\nHomepage: https://github.com/rtvirtio/rtvirtio\n'
        printf 'Installed-Size: %s\n' "$(du -sk "$root" | cut -f1)"
        [ -z "$depends" ] || printf 'Depends: %s\n' "$depends"
        [ -z "$2" ] || printf 'Recommends: %s\n' "$2"
        printf 'Description: %s\n' "$3"
        sed 's/^$/./; s/^/ /'
    } >"$root/DEBIAN/control"
    for script in postinst prerm postrm; do
        [ ! -f "$top/packaging/deb/$name.$script" ] || install -m 755 "$top/packaging/deb/$name.$script" "$root/DEBIAN/$script"
    done
    if [ -d "$root/etc" ]; then (cd "$root" && find etc -type f | sed 's,^,/,' | LC_ALL=C sort) >"$root/DEBIAN/conffiles"; fi
    (cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    dpkg-deb --root-owner-group -Z"${COMPRESSION:-xz}" --build "$root" "$out/${name}_${version}_$architecture.deb" >/dev/null
    echo "$out/${name}_${version}_$architecture.deb"
}

begin rtvirtio
for each in rtvirtio rtvirtiod rtvirtio-iod; do program "$each"; done
for unit in rtvirtiod rtvirtio-iod rtvirtio-iod@; do
    put 644 "$top/packaging/systemd/$unit.service" "usr/lib/systemd/system/$unit.service"
done
put 644 "$top/packaging/sysusers/rtvirtio.conf" usr/lib/sysusers.d/rtvirtio.conf
put 755 "$top/packaging/libvirt/rtvirtio" etc/libvirt/hooks/qemu.d/rtvirtio
put 644 "$top/packaging/grafana/rtvirtio.json" usr/share/rtvirtio/grafana-dashboard.json
sh "$top/packaging/cockpit/index.sh" >"$work/index.html"
put 644 "$work/index.html" usr/share/cockpit/rtvirtio/index.html
put 644 "$top/packaging/cockpit/manifest.json" usr/share/cockpit/rtvirtio/manifest.json
for file in app.css app.js transport.js; do
	put 644 "$top/control/daemon/page/$file" "usr/share/cockpit/rtvirtio/$file"
done
put 755 "$top/packaging/proxmox/rtvirtio-hook.sh" usr/share/rtvirtio/rtvirtio-hook.sh
install -d "$root/etc/rtvirtio/contracts.d"
# Help, messages and pages name both by their places in the sources, such as docs/guide/service.md.
(cd "$top" && find docs/README.md docs/guide docs/reference docs/explanation examples -type f | LC_ALL=C sort) >"$work/files"
while IFS= read -r file; do
    if [ -x "$top/$file" ]; then mode=755; else mode=644; fi
    put "$mode" "$top/$file" "usr/share/doc/rtvirtio/$file"
done <"$work/files"
finish "passwd" "fio, curl, systemd" "Predictable tail latency for virtual machines" <<'TEXT'
Virtual machines share disks, networks, cores and memory. rtvirtio takes the
tail latency that each task must have, measures the host, predicts, plans,
sets what Linux and QEMU offer, verifies it and puts it back.

It has a command line, a service that keeps contracts true (rtvirtiod, not
enabled by the installation), and a vhost-user server for disks and networks
with reservations (rtvirtio-iod, with a unit that is not enabled either).
TEXT

begin rtvirtio-pacemaker
program rtvirtio-pacemaker
put 644 "$top/packaging/systemd/rtvirtio-pacemaker.service" usr/lib/systemd/system/rtvirtio-pacemaker.service
for agent in contract VirtualDomain; do
    put 755 "$top/bin/rtvirtio-pacemaker/$agent" "usr/lib/ocf/resource.d/rtvirtio/$agent"
done
finish "rtvirtio (= $version)" pacemaker "Contracts of virtual machines in Pacemaker clusters" <<'TEXT'
Publishes what each node can still promise, and applies a contract where its
VM starts: the resource agents ocf:rtvirtio:contract and
ocf:rtvirtio:VirtualDomain. The service reads /etc/rtvirtio/cluster.toml and is
not enabled by the installation: systemctl enable --now rtvirtio-pacemaker
TEXT

begin rtvirtio-lab
program rtvirtio-lab
program rtvirtio-bench
finish "rtvirtio (= $version), fio, qemu-system-x86, iproute2" "qemu-utils, cpio" "Laboratory of rtvirtio: emulated devices, guests, benchmarks" <<'TEXT'
Boots guests on emulated drives, and repeats on your host every figure that
rtvirtio's pages show.
TEXT

guest=${RTVIRTIO_GUEST:-$top/target/guest/release/rtvirtio-guest}
if [ -x "$guest" ]; then
    begin rtvirtio-guest
    program rtvirtio-guest "$guest"
    put 644 "$top/packaging/systemd/rtvirtio-guest.service" usr/lib/systemd/system/rtvirtio-guest.service
    finish "" "" "Tells the host from inside a guest what is urgent" <<'TEXT'
The guest's part of rtvirtio's paravirtual scheduling. It is installed in the
guest, which needs nothing else: systemctl enable --now rtvirtio-guest
TEXT
fi
