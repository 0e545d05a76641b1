#!/bin/sh
# A hookscript of Proxmox VE: `qm set ID --hookscript local:snippets/rtvirtio-hook.sh`. Wakes rtvirtiod after a VM has started or
# stopped. Always ends with 0: a hookscript that fails at pre-start keeps the VM from starting.
case ${2:-} in
post-start | post-stop) ;;
*) exit 0 ;;
esac
socket=${RTVIRTIO_RUN_DIR:-/run/rtvirtio}/rtvirtiod.sock
[ -S "$socket" ] || exit 0
timeout 1 curl --silent --max-time 1 --unix-socket "$socket" --request POST http://localhost/v1/compare >/dev/null 2>&1 </dev/null
exit 0
