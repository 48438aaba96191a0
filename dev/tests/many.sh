#!/usr/bin/env bash
# Tests of several GPUs, each emulated by a process: many.sh FOLDER TEST_GPT
# FOLDER has test_nccl and train_gpt; TEST_GPT is the program that emulates a GPU's limits.
set -uo pipefail

folder=$1 status=0
for ranks in 1 2 3 4; do
    log=$folder/nccl-$ranks.log
    "$folder"/test_nccl $ranks > "$log" 2>&1 || { grep -v '^ok' "$log"; status=1; }
    echo "test_nccl, $ranks ranks: $(grep passed "$log")"
done
"${PYTHON:-python3}" dev/tests/test_many.py --ours "$folder"/train_gpt --card "$2" || status=1
exit $status
