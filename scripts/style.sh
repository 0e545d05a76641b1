#!/bin/sh
# The rules of the house that no compiler checks. Prints FILE:LINE: what, and a count for each rule. Exit status 1 where one is broken.
# Usage: scripts/style.sh             strict
#        scripts/style.sh --report    the same list, exit status 0
set -eu
cd "$(dirname "$0")/.."
# Columns are characters, not bytes.
export LC_ALL=C.UTF-8
case ${1:-} in
'') report= ;;
--report) report=1 ;;
*) echo "usage: scripts/style.sh [--report]" >&2; exit 2 ;;
esac
found=$(mktemp)
trap 'rm -f "$found"' EXIT INT TERM

# Tracked files; without git all but those that a build makes.
rust_files() {
    git ls-files -- '*.rs' 2>/dev/null || find . -name target -prune -o -name '*.rs' -print | sed 's|^\./||'
}

# Comments wrap at 100 columns, so that two files fit next to each other. An address and a row of a table cannot be wrapped.
long_comments() {
    rust_files | while IFS= read -r file; do
        grep -nE '^.{101,}$' "$file" | grep -E '^[0-9]+:[[:space:]]*//' | grep -vE 'https?://[^ ]{40,}|//[/!] \|' |
            sed "s|^\([0-9]*\):.*|$file:\1: a comment over 100 columns|" || true
    done
}

# A file is read in one sitting: at most 500 lines. Tests may be longer.
long_files() {
    rust_files | grep -vE '(^|/)tests(/|\.rs$)' | while IFS= read -r file; do
        lines=$(wc -l <"$file")
        [ "$lines" -le 500 ] || echo "$file:1: $lines lines, 500 at most"
    done
}

# `floor crate` of each dependency of a manifest that is a crate of this workspace; dev-dependencies may point anywhere.
own_dependencies() {
    awk '/^\[/ { on = /^\[(target\..*\.)?dependencies\]/ } on && /^rtvirtio-/ { sub(/[ .=].*/, ""); print }' "$1" |
        while IFS= read -r name; do
            path=$(sed -n "s|^$name = { *path = \"\([^\"]*\)\".*|\1|p" Cargo.toml)
            [ -n "$path" ] || { echo "$1: $name is not in the workspace's dependencies" >&2; continue; }
            echo "${path%%/*} $name"
        done
}

rank() {
    case $1 in
    core) echo 0 ;;
    host) echo 1 ;;
    domain) echo 2 ;;
    control) echo 3 ;;
    lab) echo 4 ;;
    bench) echo 5 ;;
    bin) echo 6 ;;
    *) echo "no floor $1" >&2; exit 1 ;;
    esac
}

# core < host < domain < control < lab < bench < bin.
upward_imports() {
    for manifest in core/*/Cargo.toml host/*/Cargo.toml domain/*/Cargo.toml control/*/Cargo.toml lab/*/Cargo.toml bench/*/Cargo.toml; do
        [ -e "$manifest" ] || continue
        floor=${manifest%%/*}
        own_dependencies "$manifest" | while read -r other name; do
            [ "$(rank "$other")" -le "$(rank "$floor")" ] || echo "$manifest:1: $floor imports $name of $other"
        done
    done
}

# Files of a crate import each other in one direction, except a module and those in it.
import_circles() {
    scripts/circles.py core/* host/* domain/* control/* lab/* bin/*
}

# Laboratory and experiments are no part of the product: their own programs alone link them, and that of the laboratory no experiment.
laboratory_in_the_product() {
    for manifest in bin/*/Cargo.toml; do
        case $manifest in
        bin/rtvirtio-bench/*) continue ;;
        bin/rtvirtio-lab/*) allowed=lab ;;
        *) allowed= ;;
        esac
        own_dependencies "$manifest" | while read -r other name; do
            case $other in
            lab | bench) [ "$other" = "$allowed" ] || echo "$manifest:1: it links $name of $other" ;;
            esac
        done
    done
}

# A doc says what it is of: it does not begin with a pronoun or question word. What clap shows as help is in the programs.
docs_without_subject() {
    rust_files | grep -E '^(bench|control|core|domain|host|lab)/[^/]*/src/' | while IFS= read -r file; do
        awk -v file="$file" '
            { is_doc = /^[[:space:]]*\/\/\/ / }
            is_doc && !was && /\/\/\/ (It|Its|One|Ones|Those|They|Them|The same|As|Another|Others|Which|Why|How|When|Where|What|Whose)[^A-Za-z]/ {
                print file ":" FNR ": a doc without a subject"
            }
            { was = /^[[:space:]]*\/\/\// }' "$file"
    done
}

# Measured runs stay below 6.5 MiB: data/README.md, What is cut.
much_data() {
    bytes=$(cat data/* control/learn/data/* | wc -c)
    [ "$bytes" -le 6815744 ] || echo "data/README.md:1: $bytes bytes of measured runs, 6815744 at most"
}

# `println!` and `eprintln!` panic on a closed pipe or a full disk, in the middle of what serves guests or changes settings.
printing_that_panics() {
    rust_files | grep -E '^(bin|control|core|domain|host)/[^/]*/src/' | grep -vE '(^|/)tests(/|\.rs$)' | while IFS= read -r file; do
        grep -nE '\b(e?println|e?print)!\(' "$file" | grep -vE '^[0-9]+:[[:space:]]*//' |
            sed "s|^\([0-9]*\):.*|$file:\1: use rtvirtio_arguments::print or print_error, or the log of the engine|" || true
    done
}

# `core` has neither files nor sockets: who calls it reads and writes.
io_in_core() {
    rust_files | grep -E '^core/[^/]*/src/' | grep -vE '(^|/)[a-z_]*tests(/|\.rs$)' | while IFS= read -r file; do
        awk -v file="$file" '
            test && /^(pub )?mod .*\{/ { exit }
            { test = /^#\[cfg\(.*test/ }
            !/^[[:space:]]*\/\// && /std::(fs|net|os|env|process)\>|OpenOptions|File::(open|create)|\<(libc|rustix|tokio)::/ {
                print file ":" FNR ": core opens no file and no socket: its caller does"
            }' "$file"
    done
}

# A path outside of /proc and /sys is opened by a policy of rtvirtio_kernel::trusted or of the state directory. Others say on the line,
# or on the one above, what they open: `// kernel file`, `// disk`, which has locks and checks of its own, or `// own file` in a directory
# that this process has made.
plain_opens() {
    rust_files | grep -E '^(bin|control|core|domain|host)/[^/]*/src/' |
        grep -vE '(^|/)[a-z_]*tests(/|\.rs$)|^bin/rtvirtio-(lab|bench)/|^host/kernel/src/(root|trusted|atomic_write)(/|\.rs$)' |
        while IFS= read -r file; do
            awk -v file="$file" '
                test && /^(pub )?mod .*\{/ { exit }
                { test = /^#\[cfg\(.*test/ }
                /File::(open|options)\(|OpenOptions::new\(|fs::read(_to_string)?\(/ && !/^[[:space:]]*\/\// &&
                    !/"\/(proc|sys)\// && !/\.at\(/ && ($0 last) !~ /\/\/ (kernel file|own file|disk)/ {
                    print file ":" FNR ": open it by a policy of rtvirtio_kernel::trusted, or say what it is"
                }
                { last = $0 }' "$file"
        done
}

status=0
counts=
for rule in much_data docs_without_subject long_comments long_files upward_imports import_circles laboratory_in_the_product printing_that_panics io_in_core plain_opens; do
    $rule >"$found"
    cat "$found"
    n=$(wc -l <"$found")
    [ "$n" -eq 0 ] || status=1
    counts="$counts$(echo "$rule" | tr _ ' '): $n
"
done
printf '%s' "$counts"
[ -z "$report" ] || status=0
exit "$status"
