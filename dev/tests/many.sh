#!/usr/bin/env bash
# Tests of several GPUs, each emulated by a process: many.sh FOLDER TEST_GPT
# FOLDER has test_nccl, test_watch and train_gpt; TEST_GPT is the program that emulates a GPU's limits.
set -uo pipefail

folder=$1 status=0
# report NAME LOG CODE: the last line of a program's output; all lines except passed tests if it failed
report() {
    [ "$3" = 0 ] || { grep -v '^ok' "$2"; status=1; }
    echo "$1: $(tail -n 1 "$2")"
}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for ranks in 1 2 3 4; do
    log=$folder/nccl-$ranks.log
    OMP_NUM_THREADS=1 mpirun --oversubscribe --bind-to none -n $ranks "$folder"/test_nccl > "$log" 2>&1
    report "test_nccl, $ranks ranks" "$log" $?
done
"$folder"/test_watch > "$folder"/watch.log 2>&1
report test_watch "$folder"/watch.log $?
"${PYTHON:-python3}" dev/tests/test_many.py --ours "$folder"/train_gpt --card "$2" || status=1
exit $status
