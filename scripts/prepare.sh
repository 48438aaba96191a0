#!/usr/bin/env bash
# Fetches a corpus and turns it into shards for ./train_gpt: download.sh, then prepare_text.py.
set -euo pipefail

usage='usage: scripts/prepare.sh CORPUS [--no-download] [OPTIONS of prepare_text.py]

  shakespeare        data/shakespeare/*.bin: GPT-2 tokens, the last tenth for validation
  shakespeare-bytes  data/shakespeare-bytes/*.bin: the same as bytes (./train_gpt also takes
                     data/shakespeare.txt as it is)
  openwebtext, fineweb-10BT, fineweb-100BT, fineweb-edu-10BT, fineweb-edu-100BT
                     data/CORPUS/*.bin: GPT-2 tokens, the first shard for validation
  hellaswag          data/hellaswag/hellaswag_val.bin: data/README.md describes it

The tokenizer is that of models/gpt2 where scripts/download.sh gpt2 has put it, else the package
tiktoken; TOKENIZER names another (see scripts/prepare_text.py --help). --no-download: data/CORPUS/source
was filled by hand. After an interruption the same command goes on. What is there already stays.'

case ${1:-} in
-h | --help) echo "$usage"; exit ;;
shakespeare | shakespeare-bytes | openwebtext | hellaswag) ;;
fineweb-10BT | fineweb-100BT | fineweb-edu-10BT | fineweb-edu-100BT) ;;
*)
    echo "prepare: CORPUS: found '${1:-}'" >&2
    echo "$usage" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
corpus=$1 download=yes
shift
if [ "${1:-}" = --no-download ]; then
    download=no
    shift
fi
if [ -e models/gpt2/tokenizer.json ]; then tokenizer=models/gpt2; else tokenizer=gpt2; fi
tokenizer=${TOKENIZER:-$tokenizer}

# Shards that are there, and none under way.
if compgen -G "data/$corpus/*_val*.bin" >/dev/null && ! compgen -G "data/$corpus/*.progress.json" >/dev/null; then
    echo "prepare: data/$corpus has its shards already"
    exit
fi
case $corpus in
shakespeare*) ;;
*) [ $download = no ] || scripts/download.sh "$corpus" ;;
esac
text() { exec python3 scripts/prepare_text.py --out-prefix "data/$corpus/$corpus" "$@"; }
case $corpus in
shakespeare) text --tokenizer "$tokenizer" --val-fraction 0.1 data/shakespeare.txt "$@" ;;
shakespeare-bytes) text --tokenizer bytes --val-fraction 0.1 data/shakespeare.txt "$@" ;;
hellaswag) exec python3 scripts/prepare_hellaswag.py --tokenizer "$tokenizer" "$@" \
    data/hellaswag/source/hellaswag_val.jsonl data/hellaswag/hellaswag_val.bin ;;
*) text --tokenizer "$tokenizer" --val-shards 1 "data/$corpus/source" "$@" ;;
esac
