#!/usr/bin/env bash
# Compares two sets of options over several seeds: what does a change do in five minutes?
#
#     scripts/experiment.sh "--lr 4e-3" "--lr 2e-3"
#     SEEDS="1 2 3 4 5" MINUTES=20 scripts/experiment.sh "" "--schedule wsd"
#     OPTIONS="--data my.txt --layers 6 --steps 2000" scripts/experiment.sh "--beta2 0.95" "--beta2 0.99"
#
# MINUTES (5) are those of all runs together; each has the same time. OPTIONS, which both sets share, replace the small
# model of `make run`, and with --steps or --tokens in them the time. The runs alternate, so that other load on the
# machine affects both sets. Prints the last validation loss of each set, the mean and the range of the seeds, and draws
# all curves. OUT: the folder of the runs.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 2; }
read -ra seeds <<<"${SEEDS:-1 2 3}"
out=${OUT:-runs/experiment-$(date +%Y%m%d-%H%M%S)}
options=${OPTIONS:---data data/shakespeare.txt --layers 2 --heads 4 --channels 128 --context 64 --micro-batch 8 --lr 4e-3
    --min-lr 1e-4 --warmup 0.05 --beta2 0.99}
[[ " $options $1 $2 " =~ " --"(steps|tokens|minutes)[\ =] ]] ||
    options+=" --minutes $(awk "BEGIN { print ${MINUTES:-5} / (2 * ${#seeds[@]}) }")"
mkdir -p "$out"
for seed in "${seeds[@]}"; do
    for name in A B; do
        [ $name = A ] && changed=$1 || changed=$2
        echo "experiment: $name, seed $seed: $changed"
        ./train_gpt train --eval-every 1000000000 --eval-sequences 0 --sample-every 0 --checkpoint-every 0 $options \
            $changed --seed "$seed" --out "$out/$name-$seed" >"$out/$name-$seed.txt" ||
            { status=$?; echo "experiment: the run failed; $out/$name-$seed.txt has its output" >&2; exit $status; }
    done
done
python3 scripts/experiment.py "$out" "$1" "$2"
