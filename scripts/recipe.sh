#!/usr/bin/env bash
# The common part of the GPT-2 recipes. gpt2_124M.sh and the others call it with the name of the run and, as options of
# ./train_gpt, model, micro-batch, learning rate and steps. Options that you add come last and win:
# scripts/gpt2_124M.sh --seed 2. After an interruption, scripts/gpt2_124M.sh --resume continues.
#
# As in llm.c's runs and GPT-3's table: half a million tokens a step, AdamW with beta2 0.95, weight decay 0.1, gradients
# clipped at norm 1, 700 steps of warm-up, then a cosine; validation every 250 steps, over 10 million tokens.
# Micro-batches are what 80 GB hold (./train_gpt plan prints it).
#
# The data is that of scripts/download.sh fineweb-edu SHARDS, at 190 steps a shard; for other shards set DATA to a
# folder with *train*.bin and *val*.bin in it.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
shift
data=${DATA:-data/fineweb-edu}
for split in train val; do
    if ! compgen -G "$data/*$split*.bin" >/dev/null; then
        echo "recipe: no $data/*$split*.bin: run ${DATA_FROM:-scripts/download.sh fineweb-edu SHARDS}, or set DATA to" \
            "a folder of shards" >&2
        exit 2
    fi
done
if [ ! -x train_gpt ]; then
    echo "recipe: no ./train_gpt here: run make" >&2
    exit 2
fi

exec ./train_gpt train \
    --data "$data/*train*.bin" --val-data "$data/*val*.bin" --out "runs/$name" \
    --seq-len 1024 --total-batch 524288 \
    --warmup 700 --schedule cosine \
    --beta1 0.9 --beta2 0.95 --weight-decay 0.1 --grad-clip 1.0 \
    --eval-every 250 --eval-sequences 10240 \
    --sample-every 1000 --sample-tokens 128 \
    --checkpoint-every 1000 --keep 3 \
    "$@"
