#!/usr/bin/env bash
# nanoGPT's recipe for a laptop: a character model of Shakespeare with 0.8 million parameters, trained in about a
# minute on a CPU. nanoGPT's final validation loss is 1.88.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x train_gpt ]; then
    echo "shakespeare_char_cpu: expected ./train_gpt, found none; run make" >&2
    exit 2
fi

exec ./train_gpt train \
    --layers 4 --heads 4 --channels 128 --context 64 \
    --data data/shakespeare.txt --val-fraction 0.1 --out runs/shakespeare_char_cpu \
    --micro-batch 12 --seq-len 64 --total-batch 768 \
    --steps 2000 --lr 1e-3 --min-lr 1e-4 --warmup 100 --schedule cosine \
    --beta1 0.9 --beta2 0.99 --weight-decay 0.1 --grad-clip 1.0 \
    --eval-every 250 --eval-sequences 240 \
    --sample-every 500 --sample-tokens 200 --resume auto \
    "$@"
