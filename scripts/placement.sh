#!/bin/sh
# Checks `rtvirtio fleet --openstack` against the real Placement service of OpenStack, installed from PyPI below a directory of its own.
# Usage: scripts/placement.sh [DIRECTORY]      With a directory the service's Python environment stays there for the next run.
# Needs python3 with venv, curl, jq, and the network once. Exit status 0 when inventories are taken and over-commit gives 409.
set -eu
cd "$(dirname "$0")/.."
for program in python3 curl jq; do
    command -v "$program" >/dev/null || { echo "placement: $program is missing" >&2; exit 1; }
done
temporary=$(mktemp -d)
keep=${1:-$temporary}
service=
cleanup() {
    [ -z "$service" ] || kill "$service" 2>/dev/null || true
    rm -rf "$temporary"
}
trap cleanup EXIT INT TERM
mkdir -p "$keep"
if [ ! -x "$keep/venv/bin/python" ]; then
    python3 -m venv "$keep/venv"
    "$keep/venv/bin/pip" install -q 'openstack-placement==16.0.0'
fi
cat >"$temporary/placement.conf" <<CONF
[placement_database]
connection = sqlite:///$temporary/placement.db
sync_on_startup = true
[api]
auth_strategy = noauth2
CONF
cat >"$temporary/serve.py" <<'PYTHON'
import sys
from wsgiref.simple_server import WSGIRequestHandler, make_server
from placement.wsgi.api import application

class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass

server = make_server("127.0.0.1", 0, application, handler_class=Quiet)
with open(sys.argv[1], "w") as port:
    port.write(str(server.server_port) + "\n")
server.serve_forever()
PYTHON
OS_PLACEMENT_CONFIG_DIR=$temporary "$keep/venv/bin/python" "$temporary/serve.py" "$temporary/port" >"$temporary/log" 2>&1 &
service=$!
while [ ! -s "$temporary/port" ]; do
    kill -0 "$service" 2>/dev/null || { cat "$temporary/log" >&2; exit 1; }
    sleep 0.2
done
port=$(cat "$temporary/port")
api() { # api METHOD PATH [BODY]: the answer's body, then a line with its code
    curl -sS -X "$1" -H 'x-auth-token: admin' -H 'accept: application/json' -H 'content-type: application/json' \
        -H 'openstack-api-version: placement 1.39' -w '\n%{http_code}\n' ${3:+-d "$3"} "http://127.0.0.1:$port$2"
}
expect() { # expect CODE METHOD PATH [BODY]
    code=$1
    shift
    answer=$(api "$@")
    [ "$(printf '%s\n' "$answer" | tail -n 1)" = "$code" ] || {
        echo "placement: $1 $2 answers $answer, expected $code" >&2
        exit 1
    }
    printf '%s\n' "$answer" | sed '$d'
}

told=$(cargo run -q -p rtvirtio -- fleet examples/fleet/fleet.toml --openstack)
for class in $(printf '%s' "$told" | jq -r '.resource_classes[]'); do
    expect 201 PUT "/resource_classes/$class" >/dev/null
done
hosts=0
for host in $(printf '%s' "$told" | jq -r '.inventories | keys[]'); do
    provider=$(expect 200 POST /resource_providers "{\"name\": \"$host\"}" | jq -r .uuid)
    body=$(printf '%s' "$told" | jq -c --arg h "$host" '{resource_provider_generation: 0, inventories: .inventories[$h]}')
    expect 200 PUT "/resource_providers/$provider/inventories" "$body" >/dev/null
    hosts=$((hosts + 1))
done
# Contracts are allocated where Placement says that there is room, until it has no candidate.
takes=$(printf '%s' "$told" | jq -c '.flavors.plc | with_entries(.key |= sub("resources:"; ""))')
query=$(printf '%s' "$takes" | jq -r 'to_entries | map("\(.key):\(.value)") | join(",")')
placed=0
last=
while :; do
    candidate=$(expect 200 GET "/allocation_candidates?resources=$query" | jq -r '.provider_summaries | keys[0] // empty')
    [ -n "$candidate" ] || break
    last=$candidate
    consumer=$(python3 -c 'import uuid; print(uuid.uuid4())')
    body="{\"allocations\": {\"$candidate\": {\"resources\": $takes}}, \"consumer_generation\": null, \"consumer_type\": \"INSTANCE\", \"project_id\": \"p\", \"user_id\": \"u\"}"
    expect 204 PUT "/allocations/$consumer" "$body" >/dev/null
    placed=$((placed + 1))
done
consumer=$(python3 -c 'import uuid; print(uuid.uuid4())')
body="{\"allocations\": {\"$last\": {\"resources\": $takes}}, \"consumer_generation\": null, \"consumer_type\": \"INSTANCE\", \"project_id\": \"p\", \"user_id\": \"u\"}"
expect 409 PUT "/allocations/$consumer" "$body" >/dev/null
echo "placement: $hosts hosts, $placed contracts placed, one more is refused with 409"
