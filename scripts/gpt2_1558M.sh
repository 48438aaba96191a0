#!/usr/bin/env bash
# GPT-2 1558M (XL) on 34 billion tokens (336 shards), as in llm.c's run. The learning rate and its minimum, a tenth of
# it, are GPT-3 XL's. recipe.sh has the common options.
# ./train_gpt plan --gpu-memory 80GB --model gpt2-xl --micro-batch 16 prints 71.41 GB.
exec "$(dirname "$0")/recipe.sh" gpt2_1558M \
    --model gpt2-xl --micro-batch 16 --lr 2e-4 --min-lr 2e-5 --steps 64000 "$@"
