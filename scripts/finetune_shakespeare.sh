#!/usr/bin/env bash
# GPT-2 124M goes on with Shakespeare for 20 steps of 32 sequences, as nanoGPT's finetune_shakespeare has it for
# GPT-2 XL (FROM=models/gpt2-xl): a small constant learning rate, validation over 40 sequences every 5 steps.
# FROM: the folder to start from; DATA: the folder of shards. The rest: recipe.sh
set -euo pipefail
cd "$(dirname "$0")/.."

usage='usage: [FROM=models/gpt2] [DATA=data/shakespeare] scripts/finetune_shakespeare.sh [OPTIONS of ./train_gpt train]

  scripts/download.sh gpt2          # the weights to start from, 550 MB
  scripts/prepare.sh shakespeare    # the tokens
  scripts/finetune_shakespeare.sh'
case ${1:-} in -h | --help) echo "$usage"; exit ;; esac

fail() {
    echo "finetune_shakespeare: $1" >&2
    exit 2
}

from=${FROM:-models/gpt2}
export DATA=${DATA:-data/shakespeare}
for file in config.json model.safetensors; do
    if [ ! -e "$from/$file" ]; then
        fail "no $from/$file: run scripts/download.sh ${from##*/}, or set FROM to a Hugging Face GPT-2 folder"
    fi
done
for split in train val; do
    if ! compgen -G "$DATA/*$split*.bin" >/dev/null; then
        fail "no $DATA/*$split*.bin: run scripts/prepare.sh shakespeare, or set DATA to a folder of shards"
    fi
done

exec scripts/recipe.sh finetune_shakespeare \
    --from "$from" --micro-batch 1 --total-batch 32768 --lr 3e-5 --schedule constant --warmup 0 --steps 20 \
    --eval-every 5 --eval-sequences 40 --sample-every 0 "$@"
