#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens (100 shards), with the settings of llm.c's run. recipe.sh has the common options.
# ./train_gpt plan --gpu-memory 80GB --model gpt2 --micro-batch 64 prints 30.14 GB.
exec "$(dirname "$0")/recipe.sh" gpt2_124M \
    --model gpt2 --micro-batch 64 --lr 6e-4 --min-lr 0 --steps 19073 "$@"
