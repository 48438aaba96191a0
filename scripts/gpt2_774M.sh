#!/usr/bin/env bash
# GPT-2 774M (large) on 31 billion tokens; llm.c's scripts/run_gpt2_774M.sh goes on to 150 billion,
# --steps 286102, which is for more than one GPU. Shared settings: recipe.sh
exec "$(dirname "$0")/recipe.sh" gpt2_774M \
    --model gpt2-large --micro-batch 32 --lr 2.5e-4 --min-lr 0 --steps 60000 "$@"
