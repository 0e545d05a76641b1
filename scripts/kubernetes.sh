#!/bin/sh
# Checks what Kubernetes is told, without a cluster: the manifests and a patched node against the API's published schemas (kubernetes-validate
# from PyPI), the virtual machine against KubeVirt's own types (the Go module kubevirt.io/api, unknown fields refused), its requests against
# what `rtvirtio fleet --kubernetes` prints. What a real API server, scheduler or KubeVirt does with them is not tried.
# Usage: scripts/kubernetes.sh [DIRECTORY]      With a directory the Python environment and the Go program stay there for the next run.
# Needs python3 with venv, jq, go, and the network once.
set -eu
cd "$(dirname "$0")/.."
for program in python3 jq go; do
    command -v "$program" >/dev/null || { echo "kubernetes: $program is missing" >&2; exit 1; }
done
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT INT TERM
keep=${1:-$temporary}
version=1.33
kubevirt=v1.6.0
mkdir -p "$keep"
if [ ! -x "$keep/venv/bin/python" ]; then
    python3 -m venv "$keep/venv"
    "$keep/venv/bin/pip" install -q 'kubernetes-validate==1.37.0' 'jsonpatch==1.33' 'pyyaml>=6'
fi
told=$(cargo run -q -p rtvirtio -- fleet examples/fleet/fleet.toml --kubernetes)
printf '%s' "$told" >"$temporary/told.json"

"$keep/venv/bin/python" - "$temporary/told.json" "$version" <<'PYTHON'
import json, re, sys
import jsonpatch, kubernetes_validate, yaml

told, version = json.load(open(sys.argv[1])), sys.argv[2]
manifests = list(yaml.safe_load_all(open("examples/fleet/kubernetes/publisher.yaml")))
for manifest in manifests:
    kubernetes_validate.validate(manifest, version, strict=True)
# A mistake is found.
broken = json.loads(json.dumps(manifests[-1]))
broken["spec"]["template"]["spec"]["containers"][0]["comand"] = ["sh"]
try:
    kubernetes_validate.validate(broken, version, strict=True)
except kubernetes_validate.ValidationError:
    pass
else:
    sys.exit("kubernetes: a misspelt key is not found")
# Qualified names and quantities (k8s.io/apimachinery, validation.IsQualifiedName).
name = re.compile(r"^rtvirtio\.io/([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]$")
for host, patch in told["patches"].items():
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": host}, "status": {"capacity": {"cpu": "4", "rtvirtio.io/cpu": "1"}}}
    node = jsonpatch.apply_patch(node, patch)
    kubernetes_validate.validate(node, version, strict=True)
    ours = {k: v for k, v in node["status"]["capacity"].items() if k.startswith("rtvirtio.io/")}
    assert node["status"]["capacity"]["cpu"] == "4" and len(ours) >= 2, node
    for key, value in ours.items():
        assert name.match(key) and 0 <= int(value) <= 1000, (key, value)
# The example's VM asks for what its contract takes.
machine = yaml.safe_load(open("examples/fleet/kubernetes/plc.yaml"))
resources = machine["spec"]["template"]["spec"]["domain"]["resources"]
asked = {k: v for k, v in resources["requests"].items() if k.startswith("rtvirtio.io/")}
assert asked == told["requests"]["plc"] == resources["limits"], (asked, told["requests"]["plc"])
print(f"kubernetes: {len(manifests)} manifests and {len(told['patches'])} patched nodes are valid for {version}")
PYTHON

program=$keep/kubevirt-check
if [ ! -x "$program" ]; then
    mkdir "$temporary/go"
    cat >"$temporary/go/main.go" <<'GO'
package main

import (
	"fmt"
	"os"

	kubevirt "kubevirt.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

func main() {
	text, err := os.ReadFile(os.Args[1])
	if err == nil {
		var vm kubevirt.VirtualMachine
		err = yaml.UnmarshalStrict(text, &vm)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
GO
    (
        cd "$temporary/go"
        go mod init check
        go get "kubevirt.io/api/core/v1@$kubevirt" sigs.k8s.io/yaml
        go build -o "$program" .
    ) >"$temporary/go.log" 2>&1 || { cat "$temporary/go.log" >&2; exit 1; }
fi
"$program" examples/fleet/kubernetes/plc.yaml
sed 's/runStrategy/runStrateggy/' examples/fleet/kubernetes/plc.yaml >"$temporary/broken.yaml"
if "$program" "$temporary/broken.yaml" 2>/dev/null; then
    echo "kubernetes: a misspelt key of KubeVirt is not found" >&2
    exit 1
fi
echo "kubernetes: the virtual machine has KubeVirt $kubevirt's form"
