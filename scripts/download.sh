#!/usr/bin/env bash
# Downloads a corpus into data/, with curl. What is already there and whole is kept, what was
# cut off goes on where it stopped.
set -euo pipefail

usage='usage: scripts/download.sh CORPUS [SHARDS]

  fineweb10B    data/fineweb10B/*.bin: web text, 103 shards, the sample on which the
                GPT-2 speed runs count (huggingface.co/datasets/kjj0/fineweb10B-gpt2)
  fineweb-edu   data/fineweb-edu/*.bin: web text chosen for teaching, 1001 shards
                (huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards)

A shard holds 100 million GPT-2 tokens in 200 MB. SHARDS: how many of those for training
(default 10); the one for validation is always fetched.'

fail() {
    echo "download: $1" >&2
    exit "${2:-1}"
}

# fetch URL FILE: by way of FILE.part, so that a file under its own name is a whole one
fetch() {
    [ ! -e "$2" ] || return 0
    mkdir -p "$(dirname "$2")"
    echo "download: $1"
    curl --fail --location --retry 3 --continue-at - --progress-bar --output "$2.part" "$1" ||
        fail "curl could not fetch $1 (what came is in $2.part; run the same command to go on)"
    check_shard "$2.part" || {
        rm "$2.part"
        fail "$1: $problem; deleted it"
    }
    mv "$2.part" "$2"
}

# A shard's header says how many 2-byte tokens follow its own 1024 bytes. $problem becomes what was
# found and what was expected.
check_shard() {
    local magic version tokens size
    read -r magic version tokens < <(od -A n -t d4 -N 12 "$1")
    size=$(wc -c <"$1")
    problem="$((size)) bytes with magic $magic, version $version, $tokens tokens in the header; expected 20240520, 1 and 2 bytes a token after 1024"
    [ "$magic" = 20240520 ] && [ "$version" = 1 ] && [ "$((size))" = "$((1024 + 2 * tokens))" ]
}

# shards URL FOLDER NAME MOST
shards() {
    local url=https://huggingface.co/datasets/$1/resolve/main folder=$2 name=$3 most=$4 i file
    if ! [[ $count =~ ^[1-9][0-9]*$ ]] || [ "$count" -gt "$most" ]; then
        fail "SHARDS: found '$count', expected 1 to $most" 2
    fi
    for i in $(seq -f %06.0f 0 "$count"); do
        if [ "$i" = 000000 ]; then file=${name}_val_$i.bin; else file=${name}_train_$i.bin; fi
        fetch "$url/$file" "$folder/$file"
    done
}

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "$usage" >&2
    exit 2
fi
command -v curl >/dev/null || fail "needs curl, which is not on PATH" 2
cd "$(dirname "$0")/.."
count=${2:-10}
case $1 in
    fineweb10B) shards kjj0/fineweb10B-gpt2 data/fineweb10B fineweb 103 ;;
    fineweb-edu) shards karpathy/fineweb-edu-100B-gpt2-token-shards data/fineweb-edu edu_fineweb 1001 ;;
    *)
        echo "download: CORPUS: found '$1'" >&2
        echo "$usage" >&2
        exit 2
        ;;
esac
