#!/bin/sh
# Hookscript of Proxmox VE that holds the contract of a VM: applied once the VM has started, put back before it stops.
# Not tried on Proxmox VE. The spec of VM 100 is /etc/rtvirtio/100.toml, with `proxmox = 100`.
#
#   install -m 755 proxmox-hook.sh /var/lib/vz/snippets/rtvirtio.sh
#   qm set 100 --hookscript local:snippets/rtvirtio.sh
#
# A failure is reported and stops no VM: a contract missed is no reason to be down.
vm=$1
phase=$2
export OCF_RESKEY_spec="/etc/rtvirtio/$vm.toml" OCF_RESOURCE_INSTANCE="proxmox-$vm"
agent="${RTVIRTIO_PACEMAKER:-rtvirtio-pacemaker} agent"
case $phase in
post-start) $agent start || echo "rtvirtio: the contract of VM $vm is not held" >&2 ;;
pre-stop) $agent stop || echo "rtvirtio: the contract of VM $vm is not put back" >&2 ;;
esac
exit 0
