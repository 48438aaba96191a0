#!/usr/bin/env bash
# Finetunes GPT-2 124M on Shakespeare for 20 steps of 32 sequences, as nanoGPT's finetune_shakespeare does GPT-2 XL
# (FROM=models/gpt2-xl): a small constant learning rate, validation over 40 sequences every 5 steps. The rest: recipe.sh
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --help ]; then
    echo 'usage: [FROM=models/gpt2] [DATA=data/shakespeare] scripts/finetune_shakespeare.sh [OPTIONS of train_gpt]

  scripts/download.sh gpt2          # the weights to start from, 550 MB
  scripts/prepare.sh shakespeare    # the tokens
  scripts/finetune_shakespeare.sh'
    exit
fi
from=${FROM:-models/gpt2}
if [ ! -e "$from/config.json" ]; then
    echo "finetune_shakespeare: no $from/config.json: run scripts/download.sh ${from##*/}, or set FROM to a Hugging" \
        "Face GPT-2 folder" >&2
    exit 2
fi
export DATA=${DATA:-data/shakespeare} DATA_FROM="scripts/prepare.sh shakespeare"
exec scripts/recipe.sh finetune_shakespeare \
    --from "$from" --micro-batch 1 --total-batch 32768 --lr 3e-5 --schedule constant --warmup 0 --steps 20 \
    --eval-every 5 --eval-sequences 40 --sample-every 0 "$@"
