#!/usr/bin/env bash
# GPT-2 774M (large) on 31 billion tokens (315 shards), with the settings of llm.c's run, which trained on 150 billion
# tokens with 8 GPUs (--steps 286102). recipe.sh has the common options.
# ./train_gpt plan --gpu-memory 80GB --model gpt2-large --micro-batch 32 prints 67.40 GB.
exec "$(dirname "$0")/recipe.sh" gpt2_774M \
    --model gpt2-large --micro-batch 32 --lr 2.5e-4 --min-lr 0 --steps 60000 "$@"
