#!/usr/bin/env bash
# GPT-2 1558M (XL) on 34 billion tokens, as many as llm.c's scripts/run_gpt2_1558M.sh; the learning
# rate and its floor of a tenth are GPT-3 XL's. Shared settings: recipe.sh
exec "$(dirname "$0")/recipe.sh" gpt2_1558M \
    --model gpt2-xl --micro-batch 16 --lr 2e-4 --min-lr 2e-5 --steps 64000 "$@"
