#!/usr/bin/env bash
# Finetunes GPT-2 124M on Shakespeare: 20 steps of 32 sequences, a small constant learning rate, validation on 40
# sequences every 5 steps. nanoGPT's finetune_shakespeare does this with GPT-2 XL (FROM=models/gpt2-xl). recipe.sh sets
# the other options.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --help ]; then
    echo 'usage: [FROM=models/gpt2] [DATA=data/shakespeare] scripts/finetune_shakespeare.sh [OPTIONS of train_gpt]

  scripts/download.sh gpt2          # initial weights, 550 MB
  scripts/prepare.sh shakespeare    # tokens
  scripts/finetune_shakespeare.sh'
    exit
fi
from=${FROM:-models/gpt2}
if [ ! -e "$from/config.json" ]; then
    echo "finetune_shakespeare: expected $from/config.json, found none; run scripts/download.sh ${from##*/}, or set" \
        "FROM to a Hugging Face GPT-2 folder" >&2
    exit 2
fi
export DATA=${DATA:-data/shakespeare} DATA_FROM="scripts/prepare.sh shakespeare"
exec scripts/recipe.sh finetune_shakespeare \
    --from "$from" --micro-batch 1 --total-batch 32768 --lr 3e-5 --schedule constant --warmup 0 --steps 20 \
    --eval-every 5 --eval-sequences 40 --sample-every 0 "$@"
