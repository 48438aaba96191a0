#!/usr/bin/env bash
# Downloads a corpus (download.sh) and converts it to shards for ./train_gpt (prepare_text.py).
set -euo pipefail

usage='usage: scripts/prepare.sh CORPUS [--no-download] [OPTIONS of prepare_text.py]

  shakespeare        data/shakespeare/*.bin: GPT-2 tokens, the last 10 % for validation
  openwebtext, fineweb-10BT, fineweb-100BT, fineweb-edu-10BT, fineweb-edu-100BT
                     data/CORPUS/*.bin: GPT-2 tokens, the first shard for validation
  hellaswag          data/hellaswag/hellaswag_val.bin: see data/README.md

The environment variable TOKENIZER names the tokenizer (see scripts/prepare_text.py --help). The default is models/gpt2,
which scripts/download.sh gpt2 creates, or GPT-2 from the Hugging Face hub if that folder does not exist. --no-download
uses the files in data/CORPUS/source. After an interruption, the same command resumes. Existing shards are kept.'

case ${1:-} in
-h | --help) echo "$usage"; exit ;;
shakespeare | openwebtext | hellaswag | fineweb-10BT | fineweb-100BT | fineweb-edu-10BT | fineweb-edu-100BT) ;;
*)
    printf "prepare: CORPUS: expected a corpus listed below, found '%s'\n%s\n" "${1:-}" "$usage" >&2
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
    echo "prepare: data/$corpus already has shards"
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
