#!/usr/bin/env bash
# GPT-2 350M (medium) on 31 billion tokens, 315 shards; settings as in llm.c's run. The rest: recipe.sh
# ./train_gpt plan --gpu-memory 80GB --model gpt2-medium --micro-batch 64: 62.13 GB
exec "$(dirname "$0")/recipe.sh" gpt2_350M \
    --model gpt2-medium --micro-batch 64 --lr 3e-4 --min-lr 0 --steps 60000 "$@"
