#!/usr/bin/env bash
# Runs test programs on a GPU under compute-sanitizer: sanitize.sh PROGRAM...
#
# Each tool runs the tests of the kernels and the model, which have small sizes. The tests of whole command lines launch
# the same kernels and would take hours. memcheck also checks NVIDIA's kernels, with padding between allocations;
# racecheck (shared memory) and synccheck check only this project's kernels. initcheck is not needed: tests initialise
# outputs with NaN. SANITIZER: the program; SANITIZERS: its tools; SANITIZED: starts of test names, as for --only.
set -uo pipefail

passed=0 failed=0
options() {
    case $1 in
    memcheck) echo --padding 4096 ;;
    *) echo --kernel-name kns=_kernel ;;
    esac
}

# sanitize TOOL PROGRAM: passes if all tests pass, the tool exits with 0 and its summary reports no error
sanitize() {
    local log code tests summary
    log=build/sanitize-$1-$(basename "$(dirname "$2")").log
    echo "== $1 $2"
    # shellcheck disable=SC2046
    "${SANITIZER:-compute-sanitizer}" --tool "$1" --error-exitcode 9 $(options "$1") "$2" \
        --only "${SANITIZED:-kernels,model against PyTorch,tensor cores}" > "$log" 2>&1
    code=$?
    tests=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1)
    summary=$(grep -E '^=+ .*SUMMARY: ' "$log" | tail -n 1 | sed 's/^=* //')
    echo "${summary:-no summary}; tests: ${tests:-did not finish}; exit code $code"
    if [ $code -eq 0 ] && grep -qE '^[1-9][0-9]* passed, 0 failed' <<< "$tests" &&
        grep -qE 'SUMMARY: 0 (errors|hazards displayed \(0 errors, 0 warnings\))' <<< "$summary"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        grep -E '^=+ |FAILED' "$log" | head -n 40
        tail -n 3 "$log"
        echo "FAILED: the complete output is in $log"
    fi
}

mkdir -p build
for program; do
    for tool in ${SANITIZERS:-memcheck racecheck synccheck}; do sanitize "$tool" "$program"; done
done
echo "== all"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
