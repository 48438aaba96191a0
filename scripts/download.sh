#!/usr/bin/env bash
# Downloads a corpus into data/ or a model into models/, by the program hf of the package huggingface_hub (HellaSwag by
# curl). Complete files are kept, interrupted ones continue where they stopped.
set -euo pipefail

usage='usage: scripts/download.sh NAME [SHARDS]

shards of GPT-2 tokens, ready to train on
  fineweb10B    data/fineweb10B/*.bin: web text, 103 shards, the sample of the GPT-2 speed
                runs (huggingface.co/datasets/kjj0/fineweb10B-gpt2)
  fineweb-edu   data/fineweb-edu/*.bin: web text chosen for teaching, 1001 shards
                (huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards)

text, which scripts/prepare.sh NAME fetches and turns into shards, in data/NAME/source
  openwebtext                            about 8 million documents, 9 billion tokens
  fineweb-10BT, fineweb-100BT            samples of 10 and 100 billion tokens: 30 GB and 300 GB
  fineweb-edu-10BT, fineweb-edu-100BT    the same of the text chosen for teaching
  hellaswag                              10,042 questions with four endings each

weights and tokenizer, in models/NAME
  gpt2  gpt2-medium  gpt2-large  gpt2-xl

A shard holds 100 million GPT-2 tokens in 200 MB. SHARDS: how many of those for training (default 10); the one for
validation is always fetched. HF_ENDPOINT and RAW_ENDPOINT name other servers than https://huggingface.co and
https://raw.githubusercontent.com.'

fail() {
    echo "download: $1" >&2
    exit "${2:-1}"
}

# hub FOLDER REPOSITORY FILE...: files or patterns of a repository on Hugging Face
hub() {
    local folder=$1 repository=$2 patterns=()
    shift 2
    for pattern in "$@"; do patterns+=(--include "$pattern"); done
    command -v hf >/dev/null || fail "needs the program hf: pip install huggingface_hub" 2
    echo "download: $repository ($*)"
    hf download "$repository" ${type:+--repo-type "$type"} ${revision:+--revision "$revision"} \
        "${patterns[@]}" --local-dir "$folder" >/dev/null || fail "could not fetch $* of \
huggingface.co/${type:+${type}s/}$repository; run the same command to continue, or put them by hand into $folder"
}

# require FOLDER FILE...: hf succeeds if a pattern matches nothing.
require() {
    local folder=$1 file
    shift
    for file in "$@"; do [ -e "$folder/$file" ] || fail "the repository has no $file, expected it in $folder"; done
}

# shards REPOSITORY FOLDER NAME MOST
shards() {
    local type=dataset files=("$3_val_000000.bin") i file magic version tokens
    if ! [[ $count =~ ^[1-9][0-9]*$ ]] || [ "$count" -gt "$4" ]; then
        fail "SHARDS: found '$count', expected 1 to $4" 2
    fi
    for i in $(seq -f %06.0f 1 "$count"); do files+=("$3_train_$i.bin"); done
    hub "$2" "$1" "${files[@]}"
    require "$2" "${files[@]}"
    local size
    for file in "${files[@]}"; do     # a header says how many 2-byte tokens follow its 1024 bytes
        size=$(($(wc -c <"$2/$file")))
        read -r magic version tokens < <(od -A n -t d4 -N 12 "$2/$file") || true
        [ "$magic" = 20240520 ] && [ "$version" = 1 ] && [ $size = $((1024 + 2 * tokens)) ] ||
            fail "$2/$file: magic $magic, version $version, $tokens tokens, $size bytes; expected 20240520, 1, and 2 \
bytes a token after 1024; delete it and run the same command"
    done
}

# text REPOSITORY PATTERN: the .parquet files of a corpus
text() {
    local type=dataset
    hub "data/$name/source" "$1" "$2"
    find "data/$name/source" -name '*.parquet' | grep -q . || fail "$1 has no $2"
}

model() {
    local files=(config.json generation_config.json merges.txt model.safetensors tokenizer.json tokenizer_config.json
        vocab.json)
    hub "models/$name" "openai-community/$name" "${files[@]}"
    require "models/$name" "${files[@]}"
    echo "next:
    ./train_gpt sample --from models/$name --prompt 'Once upon a time'"
}

hellaswag() {
    local file=data/hellaswag/source/hellaswag_val.jsonl lines
    local url=${RAW_ENDPOINT:-https://raw.githubusercontent.com}/rowanz/hellaswag/master/data/hellaswag_val.jsonl
    [ ! -e $file ] || return 0
    mkdir -p "${file%/*}"
    curl --fail --location --silent --show-error --retry 5 --retry-all-errors --connect-timeout 30 --continue-at - \
        --output $file.part "$url" ||
        fail "could not fetch $url; run the same command to continue, or put it by hand at $file"
    lines=$(grep -c '}[[:space:]]*$' $file.part || true)
    [ "$lines" = 10042 ] || { rm $file.part; fail "$url: found $lines complete lines, expected 10042; deleted it"; }
    mv $file.part $file
}

case ${1:-} in -h | --help) echo "$usage"; exit ;; esac
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "$usage" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
name=$1 count=${2:-10} type='' revision=''
case $name in
    fineweb10B) shards kjj0/fineweb10B-gpt2 data/fineweb10B fineweb 103 ;;
    fineweb-edu) shards karpathy/fineweb-edu-100B-gpt2-token-shards data/fineweb-edu edu_fineweb 1001 ;;
    fineweb-10BT | fineweb-100BT | fineweb-edu-10BT | fineweb-edu-100BT)
        text "HuggingFaceFW/${name%-*}" "sample/${name##*-}/*.parquet" ;;
    openwebtext) revision=refs/convert/parquet text Skylion007/openwebtext 'plain_text/*.parquet' ;;
    hellaswag) hellaswag ;;
    gpt2 | gpt2-medium | gpt2-large | gpt2-xl) model ;;
    *)
        echo "download: NAME: found '$name'" >&2
        echo "$usage" >&2
        exit 2
        ;;
esac
