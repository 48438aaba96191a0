#!/usr/bin/env bash
# Fuzzes each target for TIME seconds with clang's libFuzzer: run.sh TARGET...
# Writes the corpus to build/fuzz/corpus, logs to build/fuzz/TARGET.log and failing inputs to build/fuzz/found.
set -uo pipefail

export ASAN_OPTIONS=detect_leaks=0
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm   # keeps files in memory
FUZZ_SEEDS=build/fuzz/seeds build/fuzz/fuzz || exit 1
mkdir -p build/fuzz/found
failed=0
for target; do
    log=build/fuzz/$target.log verdict=ok
    folders=(build/fuzz/corpus/"$target" build/fuzz/seeds/"$target")
    mkdir -p "${folders[0]}"
    [ ! -d dev/fuzz/cases/"$target" ] || folders+=(dev/fuzz/cases/"$target")
    FUZZ_TARGET=$target build/fuzz/fuzz -max_total_time="${TIME:-60}" -timeout=5 -rss_limit_mb=4096 -max_len=100000 \
        -dict=dev/fuzz/words.dict -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/found/"$target"- \
        "${folders[@]}" > "$log" 2>&1 || { verdict=FAILED; failed=1; }
    printf '%-7s %-14s %10d inputs\n' $verdict "$target" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
    [ $verdict = ok ] || tail -n 30 "$log"
done
exit $failed
