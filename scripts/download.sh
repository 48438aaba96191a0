#!/usr/bin/env bash
# Downloads a corpus into data/ or a model into models/, with curl. What is already there and whole is kept, what was
# cut off goes on where it stopped.
set -euo pipefail

usage='usage: scripts/download.sh NAME [SHARDS]

shards of GPT-2 tokens, ready to train on
  fineweb10B    data/fineweb10B/*.bin: web text, 103 shards, the sample on which the
                GPT-2 speed runs count (huggingface.co/datasets/kjj0/fineweb10B-gpt2)
  fineweb-edu   data/fineweb-edu/*.bin: web text chosen for teaching, 1001 shards
                (huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards)

text, which scripts/prepare.sh NAME fetches and turns into shards, in data/NAME/source
  openwebtext                            about 8 million documents, 9 billion tokens
  fineweb-10BT, fineweb-100BT            samples of 10 and 100 billion tokens: 30 GB and 300 GB
  fineweb-edu-10BT, fineweb-edu-100BT    the same of the text chosen for teaching
  hellaswag                              10,042 questions with four endings each

weights and tokenizer, in models/NAME
  gpt2  gpt2-medium  gpt2-large  gpt2-xl

A shard holds 100 million GPT-2 tokens in 200 MB. SHARDS: how many of those for training
(default 10); the one for validation is always fetched. Each file is checked: shards against
their header, hellaswag by its lines, the others by the size and checksum that Hugging Face
lists. HF_ENDPOINT and RAW_ENDPOINT name other servers than https://huggingface.co and
https://raw.githubusercontent.com.'

TRIES=5     # in a row that bring nothing, before a file is given up
hub=${HF_ENDPOINT:-https://huggingface.co}
raw=${RAW_ENDPOINT:-https://raw.githubusercontent.com}
if [ -t 2 ]; then show=--progress-bar; else show=--silent; fi

fail() {
    echo "download: $1" >&2
    exit "${2:-1}"
}

bytes_of() { if [ -e "$1" ]; then echo $(($(wc -c <"$1"))); else echo 0; fi; }

# get URL FILE OPTION...: sets `problem` to what curl's exit status and the server's answer say, and `again` to whether
# another try may help.
get() {
    local url=$1 file=$2 status=0 answer
    shift 2
    answer=$(curl --fail --location $show --connect-timeout 30 --speed-time 60 --speed-limit 1 "$@" \
        --output "$file" --write-out '%{http_code}' "$url") || status=$?
    again=no
    case "$status $answer" in
    *" 416" | "33 "*) problem="the server sends nothing from there on" again=anew ;;    # curl may call that a success
    "0 "*) return 0 ;;
    "5 "* | "6 "* | "7 "*) problem="no connection" ;;
    "22 4"*) problem="the server answers $answer" ;;
    "22 "*) problem="the server answers $answer" again=yes ;;
    *) problem="curl's error $status" again=yes ;;
    esac
    return 1
}

# fetch URL FILE CHECK...: by way of FILE.part, so that a file under its own name is a whole one. `CHECK... FILE` tells
# whether it is, or sets `problem`.
fetch() {
    local url=$1 file=$2 part=$2.part idle=0 before
    shift 2
    [ ! -e "$file" ] || return 0
    mkdir -p "$(dirname "$file")"
    echo "download: $url"
    # The part may be whole already, where a run was ended before it gave the file its name.
    until [ -e "$part" ] && "$@" "$part"; do
        before=$(bytes_of "$part")
        if get "$url" "$part" --continue-at -; then
            "$@" "$part" && break
            rm "$part"
            fail "$url: $problem; deleted it"
        fi
        idle=$((idle + 1))
        if [ "$(bytes_of "$part")" -gt "$before" ]; then idle=0; fi
        if [ $again = anew ] && [ "$before" != 0 ]; then rm "$part"; fi
        if [ $again = no ] || [ $idle = $TRIES ]; then
            fail "could not fetch $url ($problem); run the same command to go on, or put it by hand at $file"
        fi
        sleep 1
    done
    mv "$part" "$file"
}

# ---- checks

# A shard's header says how many 2-byte tokens follow its own 1024 bytes.
check_shard() {
    local magic version tokens size
    read -r magic version tokens < <(od -A n -t d4 -N 12 "$1") || true
    size=$(bytes_of "$1")
    problem="$size bytes with magic $magic, version $version, $tokens tokens in the header; expected 20240520, 1"
    problem+=" and 2 bytes a token after 1024"
    [ "$magic" = 20240520 ] && [ "$version" = 1 ] && [ "$size" = "$((1024 + 2 * tokens))" ]
}

# Lines that end as a JSON object does: of a file that was cut off, the last does not.
check_lines() {
    local lines
    lines=$(grep -c '}[[:space:]]*$' "$2" || true)
    problem="found $lines whole lines, expected $1"
    [ "$lines" = "$1" ]
}

# SHA-256 of large files, git's SHA-1 of small ones
checksum() {
    case $1 in
    sha256) if command -v sha256sum >/dev/null; then sha256sum <"$2"; else shasum -a 256 <"$2"; fi ;;
    git) { printf 'blob %d\0' "$(bytes_of "$2")"; cat "$2"; } |
        if command -v sha1sum >/dev/null; then sha1sum; else shasum; fi ;;
    esac | cut -d ' ' -f 1
}

# check_listed BYTES KIND CHECKSUM FILE
check_listed() {
    local found
    found=$(bytes_of "$4")
    problem="found $found bytes, expected $1"
    [ "$found" = "$1" ] || return 1
    found=$(checksum "$2" "$4")
    problem="found checksum $found, expected $3"
    [ "$found" = "$3" ]
}

# ---- what there is

# shards REPOSITORY FOLDER NAME MOST
shards() {
    local url=$hub/datasets/$1/resolve/main folder=$2 name=$3 most=$4 i file
    if ! [[ $count =~ ^[1-9][0-9]*$ ]] || [ "$count" -gt "$most" ]; then
        fail "SHARDS: found '$count', expected 1 to $most" 2
    fi
    for i in $(seq -f %06.0f 0 "$count"); do
        if [ "$i" = 000000 ]; then file=${name}_val_$i.bin; else file=${name}_train_$i.bin; fi
        fetch "$url/$file" "$folder/$file" check_shard
    done
}

# listed REPOSITORY REVISION PATH FOLDER PATTERN...: what Hugging Face lists below PATH with a name like one of the
# patterns, each with its size and checksum. REPOSITORY begins with datasets/ or models/.
listed() {
    local repository=$1 revision=$2 path=$3 folder=$4 url=$hub/${1#models/} found=0 bytes kind sum file
    shift 4
    command -v python3 >/dev/null || fail "needs python3, which is not on PATH" 2
    listing=$(mktemp)
    trap 'rm -f "$listing"' EXIT
    get "$hub/api/$repository/tree/$revision${path:+/$path}?recursive=true" "$listing" ||
        fail "could not list $url/tree/$revision/$path ($problem); by hand, put its $* into $folder"
    while read -r bytes kind sum file; do
        found=$((found + 1))
        fetch "$url/resolve/$revision/$file" "$folder/${file##*/}" check_listed "$bytes" "$kind" "$sum"
    done < <(python3 -c '
import fnmatch, json, os, sys
for entry in json.load(open(sys.argv[1])):
    if entry["type"] == "file" and any(fnmatch.fnmatch(os.path.basename(entry["path"]), p) for p in sys.argv[2:]):
        large = entry.get("lfs")
        print(entry["size"], "sha256" if large else "git", large["oid"] if large else entry["oid"], entry["path"])
' "$listing" "$@" 2>/dev/null | sort -k 4)
    [ $found != 0 ] || fail "$url/tree/$revision/$path lists no $*"
}

model() {
    local folder=models/$1 file missing=
    local files=(config.json generation_config.json merges.txt model.safetensors tokenizer.json tokenizer_config.json
        vocab.json)
    for file in "${files[@]}"; do [ -e "$folder/$file" ] || missing=yes; done
    [ -z $missing ] || listed "models/openai-community/$1" main "" "$folder" "${files[@]}"
    for file in "${files[@]}"; do
        [ -e "$folder/$file" ] || fail "openai-community/$1 has no $file"
    done
    echo "go on with
    ./train_gpt sample --from $folder --prompt 'Once upon a time'"
}

fineweb() { listed "datasets/HuggingFaceFW/$1" main "sample/$2" "data/$1-$2/source" '*.parquet'; }

case ${1:-} in -h | --help) echo "$usage"; exit ;; esac
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
    fineweb-10BT | fineweb-100BT | fineweb-edu-10BT | fineweb-edu-100BT) fineweb "${1%-*}" "${1##*-}" ;;
    openwebtext)
        listed datasets/Skylion007/openwebtext refs%2Fconvert%2Fparquet plain_text data/openwebtext/source '*.parquet'
        ;;
    hellaswag)
        file=hellaswag_val.jsonl
        fetch "$raw/rowanz/hellaswag/master/data/$file" data/hellaswag/source/$file check_lines 10042
        ;;
    gpt2 | gpt2-medium | gpt2-large | gpt2-xl) model "$1" ;;
    *)
        echo "download: NAME: found '$1'" >&2
        echo "$usage" >&2
        exit 2
        ;;
esac
