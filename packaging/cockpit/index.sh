#!/bin/sh
# Writes the page inside Cockpit: the service's own, with Cockpit's library before its scripts.
# Usage: packaging/cockpit/index.sh >index.html
set -eu
page=$(cd "$(dirname "$0")/../.." && pwd)/control/daemon/page/index.html
first='<script src="transport.js"></script>'
grep -qxF "$first" "$page" || { echo "$page does not have the line $first" >&2; exit 1; }
sed "s|^$first\$|<script src=\"../base1/cockpit.js\"></script>\\n&|" "$page"
