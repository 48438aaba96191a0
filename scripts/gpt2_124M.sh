#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens, as llm.c's scripts/run_gpt2_124M.sh. Shared settings: recipe.sh
exec "$(dirname "$0")/recipe.sh" gpt2_124M \
    --model gpt2 --micro-batch 64 --lr 6e-4 --min-lr 0 --steps 19073 "$@"
