#!/bin/sh
# tc: `-j class show` of HTB.
#
# Guess: JSON, as of `-j qdisc show`, with the rates in bits a second that the text has.
# Seen: iproute2 6.1.0-3 (Debian 12) prints its text and ends with 0, so that a JSON parser fails
# where `-j qdisc show` of the same device is JSON. 6.15.0-1 (Debian 13) prints JSON with rates in
# *bytes* a second, an eighth of the number in the text.
#
# Needs root, mmdebstrap and Debian's archive. Fails when the behaviour has changed.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=
# show SUITE VERSION: a class of 8 Mbit/s on the loopback device of a network namespace of its own.
show() {
    mmdebstrap --quiet --variant=extract --include="iproute2=$2" "$1" "$dir/$1"
    ROOT="$dir/$1" unshare --net sh -eu -c '
        loader=$(find "$ROOT" -name ld-linux-x86-64.so.2 | head -n 1)
        binary=$(find "$ROOT" -path "*/sbin/tc" | head -n 1)
        libraries=$ROOT/usr/lib/x86_64-linux-gnu:$ROOT/lib/x86_64-linux-gnu
        tc() { "$loader" --library-path "$libraries" "$binary" "$@"; }
        tc qdisc add dev lo root handle 1: htb default 1
        tc class add dev lo parent 1: classid 1:1 htb rate 8mbit burst 16kb
        tc class show dev lo >"$ROOT/text"
        tc -j class show dev lo >"$ROOT/class"
        tc -j qdisc show dev lo >"$ROOT/qdisc"'
    echo "iproute2 $2: $(cat "$dir/$1/class")"
    case $(cat "$dir/$1/text") in *"rate 8Mbit"*) ;; *) failed=1 ;; esac
    case $(cat "$dir/$1/qdisc") in '[{'*) ;; *) failed=1 ;; esac
}
show bookworm 6.1.0-3
cmp -s "$dir/bookworm/text" "$dir/bookworm/class" || failed=1
show trixie 6.15.0-1
case $(cat "$dir/trixie/class") in '[{'*'"rate":1000000,'*) ;; *) failed=1 ;; esac
[ -z "$failed" ] || { echo "the behaviour has changed" >&2; exit 1; }
