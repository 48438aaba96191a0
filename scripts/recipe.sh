#!/usr/bin/env bash
# Common part of the GPT-2 recipes: recipe.sh NAME OPTIONS. gpt2_124M.sh and the other recipes pass the run's name and,
# as options of ./train_gpt, model, micro-batch, learning rate and steps. Further options override these:
# scripts/gpt2_124M.sh --seed 2. After an interruption, the same command continues the run.
#
# Hyperparameters as in llm.c's runs and GPT-3's table: 524,288 tokens per step, AdamW with beta2 0.95, weight decay
# 0.1, gradients clipped at norm 1, 700 steps of warm-up, cosine schedule; validation every 250 steps on 10 million
# tokens. Each micro-batch fits into 80 GB (`./train_gpt plan` prints the memory).
#
# The data comes from scripts/download.sh fineweb-edu SHARDS: a shard lasts 190 steps. To train on other shards, set
# DATA to a folder with *train*.bin and *val*.bin files.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
shift
data=${DATA:-data/fineweb-edu}
for split in train val; do
    if ! compgen -G "$data/*$split*.bin" >/dev/null; then
        echo "recipe: expected $data/*$split*.bin, found none; run" \
            "${DATA_FROM:-scripts/download.sh fineweb-edu SHARDS}, or set DATA to a folder of shards" >&2
        exit 2
    fi
done
if [ ! -x train_gpt ]; then
    echo "recipe: expected ./train_gpt, found none; run make" >&2
    exit 2
fi

exec ./train_gpt train \
    --data "$data/*train*.bin" --val-data "$data/*val*.bin" --out "runs/$name" \
    --seq-len 1024 --total-batch 524288 \
    --warmup 700 --schedule cosine \
    --beta1 0.9 --beta2 0.95 --weight-decay 0.1 --grad-clip 1.0 \
    --eval-every 250 --eval-sequences 10240 \
    --sample-every 1000 --sample-tokens 128 \
    --checkpoint-every 1000 --keep 3 --resume auto \
    "$@"
