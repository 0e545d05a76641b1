#!/bin/sh
# Runs each test program that failed once more, alone, and rewrites the log: what passes then counts as passed, by a line
# `FLAKY PROGRAM: test`, and is mended before other work. What fails twice stays as it is.
# Usage: scripts/retry_failed.sh LOG   in the directory in which cargo wrote LOG
set -eu
log=$1
# More than these are no chance: something is broken.
most=5
targets=$(sed -n 's/^error: test failed, to rerun pass `\(.*\)`$/\1/p' "$log" | sort -u)
[ -n "$targets" ] || exit 0
if [ "$(printf '%s\n' "$targets" | wc -l)" -gt "$most" ]; then
    echo "more than $most test programs failed: none is run again"
    exit 0
fi
again=$(mktemp)
trap 'rm -f "$again" "$log.new"' EXIT
printf '%s\n' "$targets" | while IFS= read -r target; do
    printf '\n== once more, alone: %s\n' "$target"
    # shellcheck disable=SC2086 # words of a command line
    if env --default-signal=INT,QUIT cargo test --locked $target -- --test-threads=2 >"$again" 2>&1 </dev/null; then passed=1; else passed=; fi
    cat "$again"
    [ -n "$passed" ] || continue
    # The program's lines in the log: from its `Running` to the line that names it. A `SKIP` of the second run counts.
    awk -v target="$target" -v again="$again" '
        function flush_section(i) { for (i = 1; i <= n; i++) print section[i]; n = 0 }
        /^ *(Running|Doc-tests) / { flush_section() }
        { section[++n] = $0 }
        $0 == "error: test failed, to rerun pass `" target "`" {
            for (i = 1; i < n; i++) {
                if (section[i] ~ /^test .* \.\.\. FAILED$/) {
                    name = section[i]
                    sub(/^test /, "", name)
                    sub(/ \.\.\. FAILED$/, "", name)
                    print "FLAKY " target ": " name
                    named = 1
                }
            }
            if (!named) print "FLAKY " target ": the whole program"
            n = named = 0
            while ((getline line < again) > 0) print line
            close(again)
        }
        # The list at the end of the run, which names the program again.
        $0 == "    `" target "`" { n-- }
        END { flush_section() }
    ' "$log" >"$log.new"
    mv "$log.new" "$log"
done
grep '^FLAKY ' "$log" || true
