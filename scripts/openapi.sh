#!/bin/sh
# Asks a running rtvirtiod for everything that docs/reference/openapi.json describes, with values that fit and values that do not, by
# Schemathesis, installed from PyPI below a directory of its own. On TCP, where it is read-only, and on the Unix socket through a relay.
# Usage: scripts/openapi.sh [DIRECTORY]      With a directory the Python environment stays there for the next run.
#        EXAMPLES=N tries so many values for each operation, 200 without it.
# Needs root, python3 with venv, curl, and the network once. Exit status 0 when every answer is as described.
set -eu
cd "$(dirname "$0")/.."
for program in python3 curl; do
    command -v "$program" >/dev/null || { echo "openapi: $program is missing" >&2; exit 1; }
done
[ "$(id -u)" -eq 0 ] || { echo "openapi: rtvirtiod needs root" >&2; exit 1; }
temporary=$(mktemp -d)
keep=${1:-$temporary}
daemon=
relay=
cleanup() {
    trap - EXIT INT TERM
    for process in $relay $daemon; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    rm -rf "$temporary"
}
trap cleanup EXIT
trap 'exit 1' INT TERM
mkdir -p "$keep"
keep=$(cd "$keep" && pwd)
if [ ! -x "$keep/venv/bin/schemathesis" ]; then
    python3 -m venv "$keep/venv"
    "$keep/venv/bin/pip" install -q 'schemathesis==4.32.5'
fi
programs=${CARGO_TARGET_DIR:-target}/debug
cargo build -q -p rtvirtiod

# A contract that fits and a file that does not, so that every part of the state is there.
mkdir -p "$temporary/contracts.d"
cat >"$temporary/contracts.d/plc.toml" <<'TOML'
[device]
path = "/dev/sdz"
[[vm]]
name = "plc"
qmp = "/nowhere/plc.qmp"
[[vm.task]]
name = "t"
op = "read"
block = "4KiB"
rate = "10/s"
target = { percentile = "p99", latency = "10ms" }
TOML
echo x >"$temporary/contracts.d/broken.toml"
printf '[plan]\n' >"$temporary/rtvirtiod.toml"
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port=$(free_port)
RTVIRTIO_RUN_DIR=$temporary/run RTVIRTIO_STATE_DIR=$temporary/state "$programs/rtvirtiod" --config "$temporary/rtvirtiod.toml" \
    --contracts "$temporary/contracts.d" --listen "127.0.0.1:$port" >"$temporary/log" 2>&1 &
daemon=$!

# Schemathesis speaks TCP only.
cat >"$temporary/relay.py" <<'PYTHON'
import socket
import sys
import threading

port, path = sys.argv[1:]

def pass_on(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass

listener = socket.create_server(("127.0.0.1", int(port)))
while True:
    client, _ = listener.accept()
    service = socket.socket(socket.AF_UNIX)
    service.connect(path)
    for pair in ((client, service), (service, client)):
        threading.Thread(target=pass_on, args=pair, daemon=True).start()
PYTHON
all=$(free_port)
python3 "$temporary/relay.py" "$all" "$temporary/run/rtvirtiod.sock" &
relay=$!
waits=0
for each in "$port" "$all"; do
    until curl -s -o "$temporary/status" "http://127.0.0.1:$each/v1/status"; do
        kill -0 "$daemon" && [ "$waits" -lt 100 ] || { cat "$temporary/log" >&2; exit 1; }
        waits=$((waits + 1))
        sleep 0.2
    done
done

# The stream of events has no end; its head is asked for alone.
check() { # check PORT OPTIONS...
    to=http://127.0.0.1:$1
    shift
    # It keeps notes where it runs.
    (cd "$temporary" && "$keep/venv/bin/schemathesis" run "$to/openapi.json" --url "$to" --checks all --exclude-path /v1/events \
        --max-examples "${EXAMPLES:-200}" --request-timeout 20 --generation-database none "$@")
    kind=$(curl -s -o "$temporary/stream" -m 1 -w '%{content_type}' "$to/v1/events" || true)
    [ "$kind" = text/event-stream ] || { echo "openapi: the stream is of type $kind" >&2; exit 1; }
}
check "$port" --include-method GET
check "$all"
echo "openapi: every answer is as docs/reference/openapi.json describes it"
