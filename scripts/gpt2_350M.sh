#!/usr/bin/env bash
# GPT-2 350M (medium) on 31 billion tokens, as llm.c's scripts/run_gpt2_350M.sh. Shared settings: recipe.sh
exec "$(dirname "$0")/recipe.sh" gpt2_350M \
    --model gpt2-medium --micro-batch 64 --lr 3e-4 --min-lr 0 --steps 60000 "$@"
