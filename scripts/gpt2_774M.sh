#!/usr/bin/env bash
# GPT-2 774M (large) on 31 billion tokens, 315 shards; settings as in llm.c's run, which went on to
# 150 billion on 8 GPUs (--steps 286102). The rest: recipe.sh
# ./train_gpt plan --gpu-memory 80GB --model gpt2-large --micro-batch 32: 65.79 GB
exec "$(dirname "$0")/recipe.sh" gpt2_774M \
    --model gpt2-large --micro-batch 32 --lr 2.5e-4 --min-lr 0 --steps 60000 "$@"
