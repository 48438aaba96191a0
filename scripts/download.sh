#!/usr/bin/env bash
# Downloads a corpus to data/ or a model to models/ with the program hf of the package huggingface_hub (HellaSwag with
# curl). Complete files are kept; interrupted downloads resume.
set -euo pipefail

usage='usage: scripts/download.sh NAME [SHARDS]

Shards of GPT-2 tokens, ready for training:
  fineweb10B    data/fineweb10B/*.bin: web text, 103 shards, the sample of the modded-nanogpt
                speedruns (huggingface.co/datasets/kjj0/fineweb10B-gpt2)
  fineweb-edu   data/fineweb-edu/*.bin: educational web text, 1001 shards
                (huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards)

Text, in data/NAME/source. scripts/prepare.sh NAME downloads it and converts it to shards:
  openwebtext                            about 8 million documents, 9 billion tokens
  fineweb-10BT, fineweb-100BT            web text: samples of 10 and 100 billion tokens, 30 and 300 GB
  fineweb-edu-10BT, fineweb-edu-100BT    educational web text: samples of 10 and 100 billion tokens
  hellaswag                              10,042 questions with four endings each

Weights and tokenizer, in models/NAME:
  gpt2  gpt2-medium  gpt2-large  gpt2-xl

A shard holds 100 million GPT-2 tokens in 200 MB. SHARDS is the number of training shards (default: 10); the validation
shard is always downloaded. HF_ENDPOINT names a server to use instead of https://huggingface.co.'

fail() {
    echo "download: $1" >&2
    exit "${2:-1}"
}

# hub FOLDER REPOSITORY PATTERN...: downloads the matching files of a Hugging Face repository. Every pattern must match.
hub() {
    local folder=$1 repository=$2 include=() pattern
    shift 2
    for pattern in "$@"; do include+=(--include "$pattern"); done
    command -v hf >/dev/null || fail "expected the program hf: pip install -r scripts/requirements.txt" 2
    echo "download: $repository ($*)"
    hf download "$repository" --repo-type "$type" --revision "$revision" "${include[@]}" --local-dir "$folder" \
        >/dev/null || fail "could not download $* from huggingface.co/$prefix$repository; repeat the command to \
resume, or download them to $folder by hand"
    for pattern in "$@"; do     # hf also succeeds if a pattern matches no file
        compgen -G "$folder/$pattern" >/dev/null || fail "$repository has no $pattern"
    done
}

# shards REPOSITORY FOLDER NAME MAX_SHARDS
shards() {
    [[ $count =~ ^[1-9][0-9]*$ ]] && [ "$count" -le "$4" ] || fail "SHARDS: expected 1 to $4, found '$count'" 2
    hub "$2" "$1" "$3_val_000000.bin" $(seq -f "$3_train_%06.0f.bin" 1 "$count")
}

hellaswag() {
    local file=data/hellaswag/source/hellaswag_val.jsonl
    local url=https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
    [ ! -e $file ] || return 0
    mkdir -p "${file%/*}"
    curl --fail --location --silent --show-error --retry 5 --connect-timeout 30 --output $file.part "$url" ||
        fail "could not download $url; download it to $file by hand"
    mv $file.part $file
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then echo "$usage"; exit; fi
[ $# -ge 1 ] && [ $# -le 2 ] || fail "expected 1 or 2 arguments, found $#"$'\n'"$usage" 2
cd "$(dirname "$0")/.."
name=$1 count=${2:-10} type=dataset prefix=datasets/ revision=main
case $name in
    fineweb10B) shards kjj0/fineweb10B-gpt2 data/fineweb10B fineweb 103 ;;
    fineweb-edu) shards karpathy/fineweb-edu-100B-gpt2-token-shards data/fineweb-edu edu_fineweb 1001 ;;
    fineweb-10BT | fineweb-100BT | fineweb-edu-10BT | fineweb-edu-100BT)
        hub "data/$name/source" "HuggingFaceFW/${name%-*}" "sample/${name##*-}/*.parquet" ;;
    openwebtext)
        revision=refs/convert/parquet
        hub data/openwebtext/source Skylion007/openwebtext 'plain_text/*/*.parquet' ;;
    hellaswag) hellaswag ;;
    gpt2 | gpt2-medium | gpt2-large | gpt2-xl)
        type=model prefix=
        hub "models/$name" "openai-community/$name" config.json generation_config.json merges.txt model.safetensors \
            tokenizer.json tokenizer_config.json vocab.json
        printf 'next:\n    ./train_gpt sample --from models/%s --prompt "Once upon a time"\n' "$name" ;;
    *) fail "NAME: expected a name listed below, found '$name'"$'\n'"$usage" 2 ;;
esac
