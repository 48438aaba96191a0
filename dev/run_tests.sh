#!/usr/bin/env bash
# Runs test programs and sums up their results.
#
#   run_tests.sh run PROGRAM LOG      runs PROGRAM and writes its output to LOG; prints each test's time and failures
#   run_tests.sh sum BEGIN LOG...     prints failed results, totals, and the time since BEGIN (seconds since 1970)
#
# ONLY=NAMES runs the tests whose names start with one of NAMES, separated by commas; without it, PARTS=NAMES does.
# PROGRAM --list prints its tests, --only NAMES selects some; its last line is "N passed, N failed".
# TEST_RUNNER: words before PROGRAM.
set -uo pipefail

# name LOG: prints the program's name, such as bf16-32, or bf16-32@h100 on an emulated GPU
name() {
    local file=${1%.log} folder
    folder=$(basename "$(dirname "$1")")
    case $file in *@*) folder+=@${file##*@} ;; esac
    echo "$folder"
}

# of_list WORDS: prints those of WORDS with which a line of the input starts
of_list() {
    awk -v words="$1" 'BEGIN { n = split(words, word, ",") }
        { for (i = 1; i <= n; i++) if (index($0, word[i]) == 1) found[i] = 1 }
        END { for (i = 1; i <= n; i++) if (i in found) { printf "%s%s", comma, word[i]; comma = "," } }'
}

run() {
    local program=$1 log=$2 label words=${ONLY:-${PARTS:-}}
    label=$(name "$log")
    if [ -n "${ONLY:-}" ]; then
        ${TEST_RUNNER:-} "$program" --list > "$log.names" || exit 1
        words=$(of_list "$ONLY" < "$log.names")
        if [ -z "$words" ]; then
            printf '0 passed, 0 failed\nexit code 0\n' > "$log"
            return
        fi
    fi
    echo "$label: running"
    # Two threads that sleep while they wait: the models are tiny, so several programs use the cores better than one.
    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
        ${TEST_RUNNER:-} "$program" ${words:+--only "$words"} 2>&1 | tee "$log" | awk -v label="$label" '
        /^ok /               { passed++; next }
        /^FAILED /           { failed++; print label ": " $0; fflush(); next }
        /^ +[0-9.]+ s$/      { printf "%s: %-44s %4d passed%s %8s s\n", label, test, passed,
                                   failed ? ", " failed " FAILED" : "", $1; fflush(); passed = failed = 0; next }
        /^[0-9]+ passed, /   { print label ": " $0 " in all"; fflush(); next }
        /^[^ ]/              { test = $0 }'
    echo "exit code ${PIPESTATUS[0]}" >> "$log"
}

sum() {
    local begin=$1 status=0 passed=0 failed=0 log line found
    shift
    if [ -n "${ONLY:-}" ] && found=$(cat "${@/%/.names}" | of_list "$ONLY") && [ "$found" != "$ONLY" ]; then
        echo "the tests are"
        cat "${@/%/.names}" | awk '!seen[$0]++ { print "  " $0 }'
        echo "ONLY=$ONLY: expected beginnings of these names;" \
            "none begins with $(tr , '\n' <<< "$ONLY" | grep -vxF "$(tr , '\n' <<< "$found")" | paste -sd,)"
        exit 2
    fi
    echo "== all"
    for log; do
        line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
        [ "$(tail -n 1 "$log")" = "exit code 0" ] || status=1
        if [ -z "$line" ]; then
            echo "$(name "$log"): did not finish; its last lines in $log:"
            tail -n 5 "$log"
            echo "make inspect KERNEL=NAME finds a kernel's invalid accesses and races in a training step"
            line="0 passed, 1 failed"
        fi
        read -r ok _ bad _ <<< "$line"
        passed=$((passed + ok)) failed=$((failed + bad))
        # A failed result is one line; the last line before it that is not a result is the test's name.
        awk -v label="$(name "$log")" '/^FAILED /{ print "FAILED  " label ": " test ": " substr($0, 9); next }
            /^(ok |[0-9 ])/ { next } { test = $0 }' "$log"
    done
    echo "$passed passed, $failed failed in $(($(date +%s) - begin)) s"
    exit $status
}

case ${1:-} in
run | sum) "$@" ;;
*) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
