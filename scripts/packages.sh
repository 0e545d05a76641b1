#!/bin/sh
# Installs, replaces and removes the Debian packages in clean chroots of Debian 12 and 13, where apt finds what they depend on, and compares the
# files before and after.
# Usage: scripts/packages.sh [DIRECTORY]      With a directory the chroots' archives stay there for the next run.
#        SUITES="bookworm" tries only these.
# Needs root, mmdebstrap, a mirror of Debian, and the packages: `make deb`. Exit status 0 when nothing is missing and nothing is left.
set -eu
cd "$(dirname "$0")/.."
packages=${CARGO_TARGET_DIR:-target}/debian
for program in mmdebstrap unshare tar; do
    command -v "$program" >/dev/null || { echo "packages: $program is missing" >&2; exit 1; }
done
[ "$(id -u)" -eq 0 ] || { echo "packages: chroots need root" >&2; exit 1; }
ls "$packages"/rtvirtio_*.deb >/dev/null || { echo "packages: make deb" >&2; exit 1; }
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
trap 'exit 1' INT TERM
keep=${1:-$temporary}
mkdir -p "$keep"

# What runs in the chroot. apt changes its own lists and logs, groupadd keeps copies (/etc/group-).
cat >"$temporary/inside.sh" <<'INSIDE'
set -eu
export DEBIAN_FRONTEND=noninteractive
files() { find / -xdev ! -type d ! -path '/var/lib/apt/*' ! -path '/var/cache/*' ! -path '/var/log/*' ! -path '/var/lib/dpkg/*' ! -path '/tmp/*' ! -path '/etc/*-' | sort; }
say() { echo "  $*"; }
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
apt-get update -qq
apt() { apt-get "$@" >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }; }
install() { apt install -y -qq --no-install-recommends "$@"; }
# The declared dependencies alone: one that is not declared is missing below.
apt satisfy -y -qq --no-install-recommends "$(dpkg-deb --field /packages/rtvirtio_*.deb Depends)"
files >/tmp/before
install /packages/rtvirtio_*.deb
for program in rtvirtio rtvirtiod rtvirtio-iod; do
    "$program" --version
    if ldd "/usr/bin/$program" | grep 'not found'; then exit 1; fi
done
# The group that may ask the service.
getent group rtvirtio >/dev/null
say "installed"
# Only there where `make guest` has built it.
guest=
for package in /packages/rtvirtio-guest_*.deb; do
    [ -e "$package" ] || continue
    install "$package"
    rtvirtio-guest --version
    guest=rtvirtio-guest
done
echo '# of the administrator' >>/etc/libvirt/hooks/qemu.d/rtvirtio
install --reinstall /packages/rtvirtio_*.deb
grep -q '# of the administrator' /etc/libvirt/hooks/qemu.d/rtvirtio
say "replaced, with the administrator's change"
for package in rtvirtio-lab rtvirtio-pacemaker; do
    install --simulate /packages/"$package"_*.deb
    say "$package would be installed with $(grep -c ^Inst /tmp/apt.log) packages"
done
# shellcheck disable=SC2086 # a word or none
apt purge -y -qq rtvirtio $guest
files >/tmp/after
if ! diff /tmp/before /tmp/after; then echo "files differ"; exit 1; fi
say "removed, and every other file is as it was"
INSIDE

failed=0
for suite in ${SUITES:-bookworm trixie}; do
    echo "Debian $suite"
    archive=$keep/$suite.tar
    if [ ! -e "$archive" ]; then
        mmdebstrap --quiet --variant=apt "$suite" "$temporary/new.tar"
        mv "$temporary/new.tar" "$archive"
    fi
    root=$temporary/$suite
    mkdir "$root"
    tar -xf "$archive" -C "$root"
    mkdir "$root/packages"
    cp "$packages"/*.deb "$root/packages"
    cp "$temporary/inside.sh" "$root/inside.sh"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    # Mounts of its own, that go with it.
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount --propagation private sh -c 'mount --rbind /dev "$1/dev" && mount -t proc none "$1/proc" && exec chroot "$1" sh /inside.sh' sh "$root" || failed=1
    rm -rf "$root"
done
exit $failed
