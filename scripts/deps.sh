#!/bin/sh
# Installs what `make demo` and `make test` need on Debian 12 or 13: a compiler, fio, QEMU and more. Installs nothing that is there already.
# Usage: scripts/deps.sh [test]        Other distributions: docs/guide/quick-start.md.
# With `test` also libvirt's daemon, Pacemaker and Corosync: tests start their own, in namespaces; Chromium, Cockpit and Prometheus for the
# service's page and metrics.
set -eu

# Rust 1.85 is the oldest that builds rtvirtio.
rust_is_new_enough() {
    command -v cargo >/dev/null 2>&1 || return 1
    minor=$(cargo --version 2>/dev/null | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
    [ -n "$minor" ] && [ "$minor" -ge 85 ]
}

missing=
need() { # need COMMAND PACKAGE
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
PATH="$PATH:/usr/sbin:/sbin"
need cc gcc
[ -e /usr/include/stdlib.h ] || missing="$missing libc6-dev"
need make make
need fio fio
need qemu-system-x86_64 qemu-system-x86
need qemu-img qemu-utils
need losetup util-linux
need depmod kmod
need mkfs.ext4 e2fsprogs
need dpkg-deb dpkg
need apt-get apt
if [ "${1:-}" = test ]; then
    need libvirtd "libvirt-daemon libvirt-daemon-driver-qemu"
    need virsh libvirt-clients
    need pacemakerd pacemaker
    need corosync corosync
    need cibadmin pacemaker-cli-utils
    [ -e /usr/lib/ocf/resource.d/heartbeat/anything ] || missing="$missing resource-agents"
    need ip iproute2
    need systemd-nspawn systemd-container
    need nsenter util-linux
    need curl curl
    need ansible-playbook ansible-core
    [ -e /usr/lib/*/faketime/libfaketimeMT.so.1 ] || missing="$missing libfaketime"
    need chromium-headless-shell chromium-headless-shell
    [ -e /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf ] || missing="$missing fonts-dejavu-core"
    need prometheus prometheus
    [ -e /usr/lib/cockpit/cockpit-ws ] || missing="$missing cockpit-ws"
    need cockpit-bridge cockpit-bridge
fi
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing="$missing ca-certificates"

# The guest image is made from packages too, so apt needs its lists even when nothing is missing.
lists=$(find /var/lib/apt/lists -name '*_Packages*' 2>/dev/null | head -n 1)

if ! rust_is_new_enough; then
    if command -v apt-cache >/dev/null 2>&1; then
        # Debian 13 has it as rustc; Debian 12 has a new one as rustc-web (it builds the browsers there).
        [ -n "$lists" ] || [ "$(id -u)" -ne 0 ] || { apt-get update -q; lists=1; }
        version=$(LC_ALL=C apt-cache policy rustc | sed -n 's/.*Candidate: 1\.\([0-9]*\)\..*/\1/p' | head -n 1)
        if [ "${version:-0}" -ge 85 ]; then
            missing="$missing rustc cargo rust-clippy rustfmt"
        elif LC_ALL=C apt-cache policy cargo-web | grep -q 'Candidate: [0-9]'; then
            missing="$missing rustc-web cargo-web rust-web-clippy rustfmt-web"
        fi
    fi
fi

if [ -n "$missing" ]; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "rtvirtio: these packages are missing:$missing" >&2
        echo "rtvirtio: run as root, or: sudo apt-get install -y --no-install-recommends$missing" >&2
        exit 1
    fi
    command -v apt-get >/dev/null 2>&1 || {
        echo "rtvirtio: no apt-get here; install the equivalents of:$missing (and Rust 1.85 or later)" >&2
        exit 1
    }
    echo "rtvirtio: installing$missing"
    apt-get update -q
    # No package starts or, of the cluster's, Prometheus and Cockpit, enables a service.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT INT TERM
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod 755 /usr/sbin/policy-rc.d
    fi
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
    if [ -d /run/systemd/system ]; then
        case "$missing" in *pacemaker* | *corosync*) systemctl disable -q pacemaker corosync || true ;; esac
        case "$missing" in *prometheus*) systemctl disable -q prometheus || true ;; esac
        case "$missing" in *cockpit-ws*) systemctl disable -q cockpit.socket || true ;; esac
    fi
fi
if [ -z "$missing$lists" ] && [ "$(id -u)" -eq 0 ]; then apt-get update -q; fi
rust_is_new_enough || {
    echo "rtvirtio: needs cargo 1.85 or later; this Debian has none: install it with rustup (see https://rustup.rs)" >&2
    exit 1
}
