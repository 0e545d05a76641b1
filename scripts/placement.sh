#!/bin/sh
# Checks `rtvirtio fleet --openstack`, and the publisher of rtvirtiod, against the real Placement service of OpenStack, installed from PyPI
# below a directory of its own.
# Usage: scripts/placement.sh [DIRECTORY]      With a directory the service's Python environment stays there for the next run.
# Needs python3 with venv, curl, jq, openssl, and the network once; the publisher also root, real-time groups and QEMU, without which it is skipped.
# Exit status 0 when inventories are taken and kept up to date, and over-commit gives 409.
set -eu
cd "$(dirname "$0")/.."
for program in python3 curl jq openssl; do
    command -v "$program" >/dev/null || { echo "placement: $program is missing" >&2; exit 1; }
done
temporary=$(mktemp -d)
keep=${1:-$temporary}
service=
keystone=
daemon=
vm=
cleanup() {
    trap - EXIT INT TERM
    for process in $daemon $vm $service $keystone; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    [ ! -x target/debug/rtvirtio ] || [ ! -d "$temporary/state" ] || ours revert >/dev/null 2>&1 || true
    rm -rf "$temporary"
}
ours() { # ours ARGUMENTS: rtvirtio with directories of its own
    RTVIRTIO_RUN_DIR=$temporary/run RTVIRTIO_STATE_DIR=$temporary/state RTVIRTIO_CONTRACTS_DIR=$temporary/contracts.d \
        target/debug/rtvirtio "$@"
}
trap cleanup EXIT
trap 'exit 1' INT TERM
mkdir -p "$keep"
if [ ! -x "$keep/venv/bin/python" ]; then
    python3 -m venv "$keep/venv"
    "$keep/venv/bin/pip" install -q 'openstack-placement==16.0.0' 'keystone==30.0.0'
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
import importlib
import ssl
from wsgiref.simple_server import WSGIRequestHandler, make_server

file, number, module, certificate = sys.argv[1:]
del sys.argv[1:]  # the services read it too
application = importlib.import_module(module).application

class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass

server = make_server("127.0.0.1", int(number), application, handler_class=Quiet)
if certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
with open(file, "w") as port:
    port.write(str(server.server_port) + "\n")
server.serve_forever()
PYTHON
serve() { # serve PORT [CERTIFICATE]: 0 for any; with TLS where there is a certificate
    rm -f "$temporary/port"
    OS_PLACEMENT_CONFIG_DIR=$temporary "$keep/venv/bin/python" "$temporary/serve.py" "$temporary/port" "$1" placement.wsgi.api "${2-}" \
        >>"$temporary/log" 2>&1 &
    service=$!
    listens "$service" "$temporary/port"
}
listens() { # listens PROCESS FILE: waits until the file has its port
    while [ ! -s "$2" ]; do
        kill -0 "$1" 2>/dev/null || { cat "$temporary/log" >&2; exit 1; }
        sleep 0.2
    done
}
serve 0
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

cargo build -q -p rtvirtio -p rtvirtiod
told=$(target/debug/rtvirtio fleet examples/fleet/fleet.toml --openstack)
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

# The publisher of rtvirtiod, on a real contract of a QEMU process. The host promises 40 % of each CPU, so that other real-time load of this
# machine may have the rest: what the kernel grants less than that is reserved too.
lack=
[ "$(id -u)" = 0 ] || lack="root"
[ -e /sys/fs/cgroup/cpu/cpu.rt_runtime_us ] || lack="$lack real-time groups"
command -v qemu-system-x86_64 >/dev/null || lack="$lack qemu-system-x86_64"
if [ -n "$lack" ]; then
    echo "SKIP placement publisher: no $lack"
    exit 0
fi
name=rtvirtio-placement-$$
uuid=$(python3 -c 'import uuid; print(uuid.uuid4())')
provider=$(expect 200 POST /resource_providers "{\"name\": \"$name\"}" | jq -r .uuid)
at=/resource_providers/$provider
vcpu() { # vcpu TOTAL: an inventory of Nova's, which nobody else may touch; 1 when the provider was changed in between
    generation=$(expect 200 GET "$at/inventories" | jq .resource_provider_generation)
    answer=$(api PUT "$at/inventories" "$(expect 200 GET "$at/inventories" | jq -c --argjson n "$1" --argjson g "$generation" \
        '{resource_provider_generation: $g, inventories: (.inventories + {VCPU: {total: $n}})}')")
    [ "$(printf '%s\n' "$answer" | tail -n 1)" = 200 ]
}
vcpu 4
mkdir -p "$temporary/contracts.d" "$temporary/vm"
cat >"$temporary/site.toml" <<TOML
[[host]]
name = "$name"
twin = "qlc-nvme"
cpu = "40%"
networks = { field = "1Gbit/s" }
[[contracts]]
spec = "$PWD/examples/fleet/plc.toml"
TOML
cat >"$temporary/rtvirtiod.toml" <<TOML
[placement]
url = "http://127.0.0.1:$port"
provider = "$name"
token = "admin"
fleet = "site.toml"
every = "1s"
TOML
contract() { # contract BUDGET: the VM's contract, in force as soon as the service has seen it
    cat >"$temporary/spec.toml" <<TOML
[device]
path = "/dev/no-such-disk"
[[network]]
name = "field"
link = "1Gbit/s"
[[vm]]
name = "$name"
qmp = "$temporary/vm/qmp"
cpu = { budget = "$1", period = "20ms" }
[[vm.task]]
name = "t"
op = "read"
block = "4KiB"
[[vm.nic]]
mac = "52:54:00:00:00:01"
tap = "no-such-tap"
[[vm.flow]]
name = "field"
direction = "tx"
frame = "200B"
rate = "2000/s"
target = { latency = "5ms" }
TOML
    ours contract set "$name" "$temporary/spec.toml" >/dev/null
}
reserved() { # reserved CLASS
    api GET "$at/inventories/CUSTOM_RTVIRTIO_$1" | sed '$d' | jq -r .reserved
}
settles() { # settles CLASS NUMBER WHAT: waits until so much is reserved
    begin=$(date +%s.%N)
    tries=0
    until [ "$(reserved "$1")" = "$2" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || {
            echo "placement: $3: $(reserved "$1") of $1 is reserved, expected $2" >&2
            cat "$temporary/daemon.log" >&2
            exit 1
        }
        sleep 0.1
    done
    echo "placement: $3: $2 of $1 reserved, after $(echo "$(date +%s.%N) $begin" | awk '{printf "%.1f", $1 - $2}') s"
}
start_daemon() {
    RTVIRTIO_RUN_DIR=$temporary/run RTVIRTIO_STATE_DIR=$temporary/state target/debug/rtvirtiod --config "$temporary/rtvirtiod.toml" \
        --contracts "$temporary/contracts.d" >"$temporary/daemon.log" 2>&1 &
    daemon=$!
}
problem() { # problem WORDS: waits until the service says that
    tries=0
    until ours status --json | jq -r '.service.placement.problem // empty' 2>/dev/null | grep -q "$1"; do
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || { echo "placement: rtvirtio status does not say: $1" >&2; exit 1; }
        sleep 0.1
    done
}
start_daemon
settles CPU 0 "without contracts"
qemu-system-x86_64 -nodefaults -no-user-config -display none -machine pc -accel tcg -m 64 -S -name "$name,debug-threads=on" -uuid "$uuid" \
    -qmp "unix:$temporary/vm/qmp,server=on,wait=off" </dev/null >/dev/null 2>&1 &
vm=$!
while [ ! -S "$temporary/vm/qmp" ]; do sleep 0.1; done
contract 2ms
settles CPU 250 "a contract of 10 % of each CPU, of 40 %"
net=$(reserved NET_FIELD)
[ "$net" -gt 0 ] || { echo "placement: nothing of the network is reserved" >&2; exit 1; }
allocate() { # allocate CODE UUID RESOURCES
    body="{\"allocations\": {\"$provider\": {\"resources\": $3}}, \"consumer_generation\": null, \"consumer_type\": \"INSTANCE\", \"project_id\": \"p\", \"user_id\": \"u\"}"
    expect "$1" PUT "/allocations/$2" "$body" >/dev/null
}
# Placement counts the VM itself now, so nothing of it is reserved any more.
allocate 204 "$uuid" "{\"CUSTOM_RTVIRTIO_CPU\": 250, \"CUSTOM_RTVIRTIO_NET_FIELD\": $net}"
settles CPU 0 "allocated by Nova"
other=$(python3 -c 'import uuid; print(uuid.uuid4())')
allocate 409 "$other" '{"CUSTOM_RTVIRTIO_CPU": 751}'
echo "placement: over-commit is refused with 409"
# The service is away while the contract grows.
kill "$service"
wait "$service" 2>/dev/null || true
problem "does not answer"
contract 4ms
serve "$port"
settles CPU 250 "the service was away, and the contract is 20 % now"
ours status --json | jq -e '.service.placement | .problem == null and .published != null' >/dev/null 2>&1 || sleep 2
ours status | grep -A 3 '^Placement' || { echo "placement: rtvirtio status says nothing of it" >&2; exit 1; }
# Others change the provider all the time.
conflicts=0
for round in 1 2 3 4 5 6; do
    contract "$((1 + round % 2 * 3))ms"
    for n in $(seq 1 15); do
        vcpu "$((n + 4))" || conflicts=$((conflicts + 1))
    done
done
contract 4ms
settles CPU 250 "others changed the provider 90 times ($conflicts of their writes were refused)"
vcpu 9
[ "$(expect 200 GET "$at/inventories" | jq .inventories.VCPU.total)" = 9 ] || { echo "placement: Nova's inventory was touched" >&2; exit 1; }
grep -q 'published in Placement' "$temporary/daemon.log" || { echo "placement: the log says nothing" >&2; exit 1; }
for process in $daemon $service; do
    kill "$process"
    wait "$process" 2>/dev/null || true
done
daemon=
service=

# The same with TLS and Keystone, by an application credential.
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=placement -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE \
    -keyout "$temporary/key.pem" -out "$temporary/ca.pem" 2>/dev/null
cat "$temporary/ca.pem" "$temporary/key.pem" >"$temporary/tls.pem"
cat >"$temporary/keystone.conf" <<CONF
[database]
connection = sqlite:///$temporary/keystone.db
[fernet_tokens]
key_repository = $temporary/fernet
[fernet_receipts]
key_repository = $temporary/fernet
[credential]
key_repository = $temporary/credential
CONF
manage() { "$keep/venv/bin/keystone-manage" --config-file "$temporary/keystone.conf" "$@" >>"$temporary/log" 2>&1; }
mkdir -m 700 "$temporary/fernet" "$temporary/credential"
manage db_sync
manage fernet_setup --keystone-user root --keystone-group root
OS_KEYSTONE_CONFIG_FILES=$temporary/keystone.conf "$keep/venv/bin/python" "$temporary/serve.py" "$temporary/keystone.port" 0 keystone.wsgi.api "" \
    >>"$temporary/log" 2>&1 &
keystone=$!
listens "$keystone" "$temporary/keystone.port"
identity=http://127.0.0.1:$(cat "$temporary/keystone.port")/v3
manage bootstrap --bootstrap-password secret --bootstrap-public-url "$identity" --bootstrap-internal-url "$identity" \
    --bootstrap-admin-url "$identity" --bootstrap-region-id r
scope='{"name": "admin", "domain": {"id": "default"}}'
user='{"name": "admin", "domain": {"id": "default"}, "password": "secret"}'
body="{\"auth\": {\"identity\": {\"methods\": [\"password\"], \"password\": {\"user\": $user}}, \"scope\": {\"project\": $scope}}}"
curl -sS -D "$temporary/head" -H 'content-type: application/json' -d "$body" "$identity/auth/tokens" >"$temporary/token.json"
token=$(sed -n 's/^x-subject-token: *//Ip' "$temporary/head" | tr -d '\r')
user=$(jq -r .token.user.id "$temporary/token.json")
curl -sS -H "x-auth-token: $token" -H 'content-type: application/json' -d '{"application_credential": {"name": "rtvirtio", "secret": "s3cret"}}' \
    "$identity/users/$user/application_credentials" >"$temporary/credential.json"
credential=$(jq -er .application_credential.id "$temporary/credential.json")
cat >"$temporary/placement.conf" <<CONF
[placement_database]
connection = sqlite:///$temporary/placement.db
[api]
auth_strategy = keystone
[keystone_authtoken]
www_authenticate_uri = $identity
auth_url = $identity
auth_type = password
username = admin
password = secret
project_name = admin
user_domain_id = default
project_domain_id = default
CONF
serve "$port" "$temporary/tls.pem"
# A certificate of an authority that is not known.
sed -i 's/^url = "http:/url = "https:/' "$temporary/rtvirtiod.toml"
start_daemon
problem "certificate"
kill "$daemon"
wait "$daemon" 2>/dev/null || true
sed -i 's/^token = .*/ca = "ca.pem"/' "$temporary/rtvirtiod.toml"
cat >>"$temporary/rtvirtiod.toml" <<TOML
[placement.keystone]
url = "$identity"
id = "$credential"
secret_file = "secret"
TOML
echo wrong >"$temporary/secret"
start_daemon
problem "gives no token (401)"
api() { # as before, with a real token
    curl -sS --cacert "$temporary/ca.pem" -X "$1" -H "x-auth-token: $token" -H 'accept: application/json' -H 'content-type: application/json' \
        -H 'openstack-api-version: placement 1.39' -w '\n%{http_code}\n' ${3:+-d "$3"} "https://127.0.0.1:$port$2"
}
settles CPU 250 "a wrong secret changes nothing"
echo s3cret >"$temporary/secret"
ours contract remove "$name" >/dev/null
settles CPU 0 "TLS, a token from Keystone, and without contracts again"
echo "placement: the publisher of rtvirtiod keeps the inventory up to date"
