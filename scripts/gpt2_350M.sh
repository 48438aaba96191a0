#!/usr/bin/env bash
# GPT-2 350M (medium) on 31 billion tokens (315 shards), with the settings of llm.c's run. recipe.sh has the common
# options. ./train_gpt plan --gpu-memory 80GB --model gpt2-medium --micro-batch 64 prints 66.99 GB.
exec "$(dirname "$0")/recipe.sh" gpt2_350M \
    --model gpt2-medium --micro-batch 64 --lr 3e-4 --min-lr 0 --steps 60000 "$@"
