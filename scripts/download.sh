#!/usr/bin/env bash
# Downloads a corpus into data/, with curl. What is already there and whole is kept, what was
# cut off goes on where it stopped.
set -euo pipefail

usage='usage: scripts/download.sh CORPUS [SHARDS]

  tinyshakespeare   data/tinyshakespeare.txt: 1.1 MB of text (github.com/karpathy/char-rnn)
  fineweb10B        data/fineweb10B/*.bin: web text, 103 shards, the sample on which the
                    GPT-2 speed runs count (huggingface.co/datasets/kjj0/fineweb10B-gpt2)
  fineweb-edu       data/fineweb-edu/*.bin: web text chosen for teaching, 1001 shards
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
    "check_$kind" "$2.part" || {
        rm "$2.part"
        fail "$1: $problem; deleted it"
    }
    mv "$2.part" "$2"
}

# Both checks say in $problem what was found and what was expected.
check_tinyshakespeare() {
    local expected=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed found
    found=$(sha256sum "$1" 2>/dev/null || shasum -a 256 "$1")
    problem="sha256 is ${found%% *}, expected $expected"
    [ "${found%% *}" = "$expected" ]
}

# A shard's header says how many 2-byte tokens follow its own 1024 bytes.
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

if [ $# -lt 1 ] || [ $# -gt 2 ] || { [ "$1" = tinyshakespeare ] && [ $# = 2 ]; }; then
    echo "$usage" >&2
    exit 2
fi
command -v curl >/dev/null || fail "needs curl, which is not on PATH" 2
cd "$(dirname "$0")/.."
count=${2:-10}
kind=shard
case $1 in
    tinyshakespeare)
        kind=tinyshakespeare
        fetch https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt data/tinyshakespeare.txt
        ;;
    fineweb10B) shards kjj0/fineweb10B-gpt2 data/fineweb10B fineweb 103 ;;
    fineweb-edu) shards karpathy/fineweb-edu-100B-gpt2-token-shards data/fineweb-edu edu_fineweb 1001 ;;
    *)
        echo "download: CORPUS: found '$1'" >&2
        echo "$usage" >&2
        exit 2
        ;;
esac
