#!/bin/sh
# A hookscript of Proxmox VE: `qm set ID --hookscript local:snippets/rtvirtio-hook.sh`. Wakes rtvirtiod after a VM has started or
# stopped, and refuses a VM that arrives by live migration where the contract that this node has for it (`proxmox = ID` in a file)
# does not fit: it runs on where it is. Else it ends with 0: a hookscript that fails at pre-start keeps the VM from starting.
socket=${RTVIRTIO_RUN_DIR:-/run/rtvirtio}/rtvirtiod.sock
[ -S "$socket" ] || exit 0
case ${2:-} in
pre-start)
    # Set at a start that receives a VM.
    [ -n "${PVE_MIGRATED_FROM:-}" ] || exit 0
    case $1 in '' | *[!0-9]*) exit 0 ;; esac
    answer=$(timeout 6 curl --silent --max-time 5 --unix-socket "$socket" --request POST --write-out '\n%{http_code}' \
        "http://localhost/v1/arrivals?proxmox=$1" 2>/dev/null </dev/null)
    case $answer in
    *409)
        printf 'rtvirtio: %s\n' "$answer" | sed -n '1s/{"error":"\(.*\)"}$/\1/p' >&2
        exit 1
        ;;
    esac
    ;;
post-start | post-stop)
    timeout 1 curl --silent --max-time 1 --unix-socket "$socket" --request POST http://localhost/v1/compare >/dev/null 2>&1 </dev/null
    ;;
esac
exit 0
