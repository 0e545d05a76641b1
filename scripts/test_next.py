#!/usr/bin/env python3
"""Runs the test programs of this workspace in root file systems of other Debian releases, and writes docs/reference/tested.md.

Usage: scripts/test_next.py [--suites sid,trixie] [--only WORD,...] [--minutes N] [--built] [--table]
  --suites   releases, in their order (default: sid,trixie)
  --only     test programs whose FLOOR/CRATE/NAME has one of these words in it, also those that have passed
  --minutes  longest time of one test program (default: 30)
  --built    what the last call built
  --table    only the table of the results that are there

Test programs are built here and run there in a mount namespace of their own. Each result is a file below
target/test-next/SUITE/results: a second call runs what has none yet, what failed, and what only skipped; without
that directory the page's own results count where the versions are the same. Needs root, mmdebstrap and a mirror of Debian.
Exit status 1 when a test failed.
"""
import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(TOP, "target"), "test-next")
TABLE = os.path.join(TOP, "docs/reference/tested.md")
BEGIN, END = "<!-- written by `make test-next` -->", "<!-- end of what `make test-next` writes -->"
# What the tests start, as scripts/deps.sh has it for this machine; without the browser, Cockpit, Prometheus and Ansible, whose tests
# skip by name.
PACKAGES = """
apt ca-certificates cpio curl dbus dpkg e2fsprogs ethtool fio gcc iproute2 iputils-ping kmod libc6-dev libfaketime make ovmf procps
psmisc python3 qemu-system-x86 qemu-utils systemd systemd-container systemd-sysv udev util-linux xz-utils zstd
libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients corosync pacemaker pacemaker-cli-utils resource-agents
""".split()
SHOWN = [
    ("QEMU", "qemu-system-x86"),
    ("libvirt", "libvirt-daemon"),
    ("fio", "fio"),
    ("systemd", "systemd"),
    ("Pacemaker", "pacemaker"),
    ("Corosync", "corosync"),
    ("glibc", "libc6"),
]
HOST_ROWS = [("kernel package for guests and the box", "kernel"), ("kernel of the host", "host"), ("root made on", "made")]
# Those that judge this machine's tools and the sources, where a release of Debian changes nothing.
HERE_ONLY = {"lab/testkit/dependencies", "lab/testkit/flaky", "lab/testkit/pages"}
# What a release is likely to break comes first: lines and answers of QEMU, libvirt's XML, names of Pacemaker, fio's JSON.
FIRST = """
host/vmm/real_qemu host/cpu/real_qemu host/cpu/real_vmms bin/rtvirtio-lab/qemu core/urgency/qemu bin/rtvirtio/discover bin/rtvirtio/threads
host/measure/host host/measure/sync bin/rtvirtio-pacemaker/agent bin/rtvirtio-pacemaker/domain control/pacemaker/
bin/rtvirtio/guest_libvirt bin/rtvirtio-iod/guest bin/rtvirtio-pacemaker/cluster bin/rtvirtio-pacemaker/fencing bin/rtvirtiod/contracts
host/apply/crash
""".split()
# Their order; kinds that are not named come last.
KINDS = ["host", "cluster", "parallel", "guests", "box", "alone"]


def say(text):
    print(text, flush=True)


def fail(text):
    sys.exit(f"test-next: {text}")


def kinds():
    """Kind of each test program, as scripts/test.sh groups them."""
    text = subprocess.run(["sh", "scripts/test.sh", "list"], cwd=TOP, check=True, capture_output=True, text=True).stdout
    return {name: kind for kind, name in (line.split() for line in text.splitlines())}


def programs(built_before):
    """(FLOOR/CRATE/NAME, executable, directory) of each integration test program, in their order."""
    listed = os.path.join(WORK, "programs.json")
    if built_before:
        with open(listed, encoding="utf-8") as file:
            return json.load(file)
    cargo = os.environ.get("CARGO", "cargo")
    for arguments in (["build", "--workspace", "--bins"], ["test", "--workspace", "--no-run"]):
        built = subprocess.run(
            [cargo, *arguments, "--locked", "--message-format=json-render-diagnostics"], cwd=TOP, stdout=subprocess.PIPE, text=True
        )
        if built.returncode:
            fail("the tests do not build")
    kind, found = kinds(), []
    for line in built.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message.get("executable") or message["target"]["kind"] != ["test"]:
            continue
        directory = os.path.dirname(message["manifest_path"])
        name = message["target"]["name"]
        path = f"{os.path.relpath(directory, TOP)}/{name}"
        if path in HERE_ONLY:
            continue
        first = next((i for i, word in enumerate(FIRST) if path.startswith(word)), len(FIRST))
        # What judges us comes last of its kind: it takes long.
        order = (first, (KINDS + [kind[name]]).index(kind[name]), path.startswith("bin/rtvirtio-bench"), path)
        found.append((order, path, message["executable"], directory))
    ordered = [entry[1:] for entry in sorted(found)]
    os.makedirs(WORK, exist_ok=True)
    with open(listed, "w", encoding="utf-8") as file:
        json.dump(ordered, file, indent=1)
    return ordered


def make_root(suite):
    root = os.path.join(WORK, suite, "root")
    if os.path.isdir(root):
        return root
    say(f"{suite}: root file system by mmdebstrap")
    new = root + ".new"
    shutil.rmtree(new, ignore_errors=True)
    os.makedirs(os.path.dirname(root), exist_ok=True)
    # A copy of a mirror may be older than its Release file is valid; the signature is checked all the same.
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--aptopt=Acquire::Check-Valid-Until \"false\"",
         "--aptopt=APT::Install-Recommends \"false\"", "--include=" + ",".join(PACKAGES), suite, new]
    )
    if made.returncode:
        shutil.rmtree(new, ignore_errors=True)
        fail(f"mmdebstrap makes no root file system of {suite}")
    os.rename(new, root)
    return root


# Mounts of its own, which go with the last process in it. The image cache is the root's: its kernel is that release's.
INSIDE = r"""
set -e
root=$1 top=$2 directory=$3 program=$4
mount --bind "$root" "$root"
for each in proc sys dev; do mount --rbind "/$each" "$root/$each"; done
mount -t tmpfs -o mode=755 none "$root/run"
mkdir -p "$root/run/lock" "$root$top"
mount --rbind "$top" "$root$top"
cp -L --remove-destination /etc/resolv.conf "$root/etc/resolv.conf"
cp --remove-destination /etc/hosts "$root/etc/hosts"
shift 4
# Not chroot alone: who enters the mount namespace of a test's process would come out of it.
cd "$root"
mkdir -p .outside
pivot_root . .outside
exec chroot . sh -c 'umount -l /.outside && cd "$0" && exec "$@"' "$directory" "$program" "$@"
"""


def command(root, directory, program, *arguments):
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", INSIDE, "sh", root, TOP, directory, program, *arguments]


def environment(directory):
    kept = {name: os.environ[name] for name in ("TERM", "LANG", "http_proxy", "https_proxy") if name in os.environ}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**kept, "PATH": path, "HOME": "/root", "CARGO_MANIFEST_DIR": directory, "RUST_BACKTRACE": "0"}


def versions(root):
    def run(program, *arguments):
        ran = subprocess.run(command(root, "/", program, *arguments), env=environment(TOP), capture_output=True, text=True)
        # Results would be thrown away as those of other versions.
        if ran.returncode:
            fail(f"{program} does not run in {root}: {ran.stderr.strip()}")
        return ran.stdout

    found = {}
    for line in run("dpkg-query", "-W", "-f", "${Package} ${Version}\n", *(package for _, package in SHOWN)).splitlines():
        package, version = line.split()
        found[package] = version
    found["made"] = time.strftime("%Y-%m-%d", time.gmtime(os.stat(os.path.join(root, "etc/debian_version")).st_ctime))
    found["host"] = os.uname().release.split("-")[0]
    run("apt-get", "update", "-qq")
    depends = run("apt-cache", "depends", "--important", "linux-image-cloud-amd64")
    kernel = re.search(r"Depends: linux-image-(\S+?)-cloud-amd64", depends)
    found["kernel"] = kernel.group(1) if kernel else "none"
    return found


def descendants():
    """Processes below this one: what a dead one leaves becomes a child of this process."""
    children = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def end_all():
    """Ends what a test program left, and waits for its end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for _ in range(20):
            for child in descendants():
                try:
                    os.kill(child, number)
                except ProcessLookupError:
                    pass
            reap()
            if not descendants():
                return
            time.sleep(0.1)


def reap():
    """Statuses of ended children; a test may wait until a process that it left is gone."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def run_program(root, name, executable, directory, log, minutes):
    with open(log + ".new", "w", encoding="utf-8") as output:
        actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
        arguments = command(root, directory, executable, "--test-threads=2")
        pid = os.posix_spawnp(arguments[0], arguments, environment(directory), file_actions=actions, setpgroup=0, setsigdef=(signal.SIGINT, signal.SIGQUIT))
        began = time.monotonic()
        code = None
        while code is None:
            code = reap().get(pid)
            if code is None and time.monotonic() - began > minutes * 60:
                code = "not finished"
            time.sleep(0.05)
        end_all()
        output.seek(0, os.SEEK_END)
        print(f"\nEND {code} after {time.monotonic() - began:.0f} s on {time.strftime('%Y-%m-%d')}", file=output)
    os.rename(log + ".new", log)


def result(log):
    """Result that a log holds: counts, and names with their reasons."""
    with open(log, encoding="utf-8", errors="replace") as file:
        text = file.read()
    end = re.findall(r"^END (.*) after (\d+) s on (\S+)$", text, re.M)
    counts = re.findall(r"^test result: \S+ (\d+) passed; (\d+) failed", text, re.M)
    skips = sorted(set(re.findall(r"SKIP ([^:\n]+): ([^\n]+)", text)))
    # A test that runs another program, as in the box, has that one's result in its own output.
    listed = set(re.findall(r"^    (\S+)$", text.split("\nfailures:\n")[-1], re.M)) if "\nfailures:\n" in text else None
    failed = sorted(set(re.findall(r"^test (\S+) .*\bFAILED$", text, re.M)) if listed is None or not counts else listed)
    if not counts:
        why = f"not finished after {int(end[0][1]) // 60} min" if end and end[0][0] == "not finished" else "ended without a result"
        return {"passed": 0, "failed": failed or [why], "skips": skips, "why": why}
    passed, failures = map(int, counts[-1])
    return {"passed": max(passed - len(skips), 0), "failed": failed if failures else [], "skips": skips, "why": None}


def short(found):
    parts = [f"{found['passed']} passed"]
    if found["failed"]:
        parts.append(found["why"] or f"**{len(found['failed'])} failed**")
    if found["skips"]:
        parts.append(f"{len(found['skips'])} skipped")
    return ", ".join(parts)


def log_of(suite, path):
    return os.path.join(WORK, suite, "results", path.replace("/", ".") + ".log")


def run_suite(suite, entries, options):
    root = make_root(suite)
    results, listed = (os.path.join(WORK, suite, name) for name in ("results", "versions.json"))
    # Results are of the versions beside them: the root file system may have been made again.
    found = json.dumps(versions(root), indent=1)
    if os.path.exists(listed):
        with open(listed, encoding="utf-8") as file:
            if file.read() != found:
                say(f"{suite}: other versions than before, all runs again")
                shutil.rmtree(results, ignore_errors=True)
    os.makedirs(results, exist_ok=True)
    with open(listed, "w", encoding="utf-8") as file:
        file.write(found)
    failed, known = 0, of_suite(suite)[1]
    for number, (path, executable, directory) in enumerate(entries, 1):
        log = log_of(suite, path)
        before = known.get(path.replace("/", "."))
        if not options.only and before and not before["failed"] and (before["passed"] or not before["skips"]):
            continue
        print(f"{suite} {number}/{len(entries)} {path} ... ", end="", flush=True)
        began = time.monotonic()
        run_program(root, path, executable, directory, log, options.minutes)
        found = result(log)
        failed += len(found["failed"])
        seconds = int(time.monotonic() - began)
        say(f"{short(found)} [{seconds // 60}:{seconds % 60:02}]")
        for name in found["failed"]:
            say(f"    FAILED {name}")
        for name, why in found["skips"]:
            say(f"    SKIP {name}: {why}")
    return failed


def cells(line):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def of_page():
    """{suite: (versions, {program: result})} as the page has them, so that results outlast a build directory."""
    with open(TABLE, encoding="utf-8") as file:
        lines = [cells(line) for line in file.read().split(BEGIN, 1)[1].split(END, 1)[0].splitlines() if line.startswith("| ")]
    names = [name.removeprefix("Debian ") for name in lines[0][1:]] if lines else []
    suites = {name: ({}, {}) for name in names}
    titles = dict(SHOWN + HOST_ROWS)
    for first, *rest in lines:
        for name, cell in zip(names, rest):
            if first in titles:
                suites[name][0][titles[first]] = cell
            elif first.startswith("`") and cell != "not run":
                passed, why = re.match(r"(\d+) passed", cell), re.search(r"not finished after \d+ min|ended without a result", cell)
                suites[name][1][first.strip("`").replace("/", ".")] = {
                    "passed": int(passed.group(1)), "failed": [], "skips": [], "why": why.group(0) if why else None
                }
    for suite, program, *rest in lines:
        log = suites.get(suite, ({}, {}))[1].get(program.strip("`").replace("/", "."))
        if log and program.startswith("`"):
            log["failed" if len(rest) == 1 else "skips"].append(rest[0] if len(rest) == 1 else tuple(rest))
    return suites


def same_versions(one, other):
    return all(one.get(key) == other.get(key) for _, key in SHOWN + HOST_ROWS if key != "made")


def of_suite(suite):
    """Versions and results of a release: those of the logs, and those of the page where its versions are these."""
    place, (versions_before, known) = os.path.join(WORK, suite), of_page().get(suite, ({}, {}))
    listed = os.path.join(place, "versions.json")
    if not os.path.exists(listed):
        return versions_before, known
    with open(listed, encoding="utf-8") as file:
        found = json.load(file)
    results = os.path.join(place, "results")
    logs = {name[:-4]: result(os.path.join(results, name)) for name in sorted(os.listdir(results)) if name.endswith(".log")}
    return found, {**(known if same_versions(found, versions_before) else {}), **logs}


def table():
    """The generated part of the page; what stands around it is written by hand."""
    made = os.listdir(WORK) if os.path.isdir(WORK) else []
    names = {name for name in made if os.path.exists(os.path.join(WORK, name, "versions.json"))} | set(of_page())
    suites = {name: of_suite(name) for name in sorted(names)}
    if not suites:
        fail("no results yet")
    lines = [BEGIN, ""]
    lines += ["| | " + " | ".join(f"Debian {suite}" for suite in suites) + " |", "|---" * (len(suites) + 1) + "|"]
    for title, package in SHOWN + HOST_ROWS:
        lines.append(f"| {title} | " + " | ".join(found.get(package, "none") for found, _ in suites.values()) + " |")
    total = {
        suite: (sum(r["passed"] for r in logs.values()), sum(len(r["failed"]) for r in logs.values()), sum(len(r["skips"]) for r in logs.values()))
        for suite, (_, logs) in suites.items()
    }
    lines.append("| tests | " + " | ".join(f"{p} passed, {f} failed, {s} skipped" for p, f, s in total.values()) + " |")
    lines += ["", "| test program | " + " | ".join(suites) + " |", "|---" * (len(suites) + 1) + "|"]
    known = sorted(
        f"{floor}.{crate}.{name[:-3]}"
        for floor in os.listdir(TOP) if os.path.isdir(os.path.join(TOP, floor)) and floor not in ("target", "fuzz")
        for crate in sorted(os.listdir(os.path.join(TOP, floor))) if os.path.isdir(os.path.join(TOP, floor, crate, "tests"))
        for name in os.listdir(os.path.join(TOP, floor, crate, "tests")) if name.endswith(".rs")
    )
    for key in known:
        path = "/".join(key.split(".", 2))
        if path not in HERE_ONLY:
            row = [short(logs[key]) if key in logs else "not run" for _, logs in suites.values()]
            lines.append(f"| `{path}` | " + " | ".join(row) + " |")
    for what, key in (("Failed", "failed"), ("Skipped", "skips")):
        lines += ["", f"## {what}", "", "| release | test program | test | " + ("reason |" if key == "skips" else "|")]
        lines.append("|---|---|---|" + ("---|" if key == "skips" else ""))
        if key == "failed":
            lines[-2] = lines[-2].rstrip("|").rstrip() + " |"
        for suite, (_, logs) in suites.items():
            for name, found in logs.items():
                path = "/".join(name.split(".", 2))
                for each in found[key]:
                    row = [each] if isinstance(each, str) else list(each)
                    lines.append(f"| {suite} | `{path}` | " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    lines += ["", END]
    with open(TABLE, encoding="utf-8") as file:
        page = file.read()
    before, rest = page.split(BEGIN, 1)
    with open(TABLE, "w", encoding="utf-8") as file:
        file.write(before + "\n".join(lines) + rest.split(END, 1)[1])
    say(f"written: {os.path.relpath(TABLE, TOP)}")


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--suites", default="sid,trixie")
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--built", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    options.only = [word for word in options.only.split(",") if word]
    if options.table:
        table()
        return 0
    if os.geteuid():
        fail("chroots need root")
    for program in ("mmdebstrap", "unshare"):
        if not shutil.which(program):
            fail(f"{program} is missing")
    # PR_SET_CHILD_SUBREAPER: what a dead test leaves comes to this process, which ends it.
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):
        fail("this process cannot adopt what tests leave")
    # What a shell runs in its background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    failed = 0
    try:
        entries = programs(options.built)
        if options.only:
            entries = [entry for entry in entries if any(word in entry[0] for word in options.only)]
        for suite in options.suites.split(","):
            failed += run_suite(suite, entries, options)
    except KeyboardInterrupt:
        say("\nended: what has no result yet runs at the next call")
        return 130
    finally:
        end_all()
    table()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
