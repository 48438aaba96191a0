#!/usr/bin/env bash
# Fetches a corpus and turns it into shards for ./train_gpt: download.sh, then prepare_text.py.
set -euo pipefail

usage='usage: scripts/prepare.sh CORPUS [--no-download] [OPTIONS of prepare_text.py]

  shakespeare        data/shakespeare/*.bin: GPT-2 tokens, the last tenth for validation
  openwebtext, fineweb-10BT, fineweb-100BT, fineweb-edu-10BT, fineweb-edu-100BT
                     data/CORPUS/*.bin: GPT-2 tokens, the first shard for validation
  hellaswag          data/hellaswag/hellaswag_val.bin: data/README.md describes it

The tokenizer is that of models/gpt2 if scripts/download.sh gpt2 has put it there, otherwise gpt2 from the Hugging Face
hub; TOKENIZER names another (see scripts/prepare_text.py --help). --no-download: data/CORPUS/source was filled by hand.
After an interruption the same command continues. Existing shards stay.'

case ${1:-} in
-h | --help) echo "$usage"; exit ;;
shakespeare | openwebtext | hellaswag | fineweb-10BT | fineweb-100BT | fineweb-edu-10BT | fineweb-edu-100BT) ;;
*)
    printf "prepare: CORPUS: found '%s'\n%s\n" "${1:-}" "$usage" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
corpus=$1 download=yes tokenizer=gpt2
shift
if [ "${1:-}" = --no-download ]; then
    download=no
    shift
fi
[ ! -e models/gpt2/tokenizer.json ] || tokenizer=models/gpt2
tokenizer=${TOKENIZER:-$tokenizer}

if compgen -G "data/$corpus/*_val*.bin" >/dev/null && ! compgen -G "data/$corpus/*.progress.json" >/dev/null; then
    echo "prepare: data/$corpus has its shards already"
    exit
fi
[ "$corpus" = shakespeare ] || [ $download = no ] || scripts/download.sh "$corpus"
text() { exec python3 scripts/prepare_text.py --tokenizer "$tokenizer" --out-prefix "data/$corpus/$corpus" "$@"; }
case $corpus in
shakespeare) text --val-fraction 0.1 data/shakespeare.txt "$@" ;;
hellaswag) exec python3 scripts/prepare_hellaswag.py --tokenizer "$tokenizer" "$@" \
    data/hellaswag/source/hellaswag_val.jsonl data/hellaswag/hellaswag_val.bin ;;
*) text --val-shards 1 "data/$corpus/source" "$@" ;;
esac
