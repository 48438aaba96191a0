#!/usr/bin/env bash
# Tests of several GPUs, each emulated by a process: many.sh TEST_NCCL TRAIN_GPT TEST_GPT
# TEST_GPT is the program that emulates a GPU's limits.
set -uo pipefail

status=0
for ranks in 1 2 3 4; do
    log=$1-$ranks.log
    "$1" $ranks > "$log" 2>&1 || { grep -v '^ok' "$log"; status=1; }
    echo "test_nccl, $ranks ranks: $(grep passed "$log")"
done
"${PYTHON:-python3}" dev/tests/test_many.py --ours "$2" --card "$3" || status=1
exit $status
