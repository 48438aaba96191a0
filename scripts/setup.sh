#!/usr/bin/env bash
# Installs what building gpt.cu needs and this machine lacks. Silent when nothing is missing.
#
#   scripts/setup.sh        the CPU build: g++, make, nlohmann/json, Boost.Context, oneDNN
#   scripts/setup.sh gpu    the GPU build: g++, make, nlohmann/json. The CUDA toolkit is looked
#                           for but never installed: its version has to suit the driver's.
#
# Without apt-get, or without the right to use it, prints what to install and exits with 2.
set -euo pipefail

build=${1:-cpu}
if [ $# -gt 1 ] || { [ "$build" != cpu ] && [ "$build" != gpu ]; }; then
    echo "usage: scripts/setup.sh [cpu|gpu]    (found: $*)" >&2
    exit 2
fi

# need            apt                   dnf           pacman         brew
table='
g++               g++                   gcc-c++       gcc            gcc
make              make                  make          make           make
nlohmann/json     nlohmann-json3-dev    json-devel    nlohmann-json  nlohmann-json
Boost.Context     libboost-context-dev  boost-devel   boost          boost
oneDNN            libdnnl-dev           onednn-devel  onednn         onednn
'

# packages COLUMN NEED...: what the needs are called in a column of the table
packages() {
    local column=$1
    shift
    awk -v column="$column" -v needs=" $* " 'NF && index(needs, " " $1 " ") { printf "%s%s", sep, $column; sep = " " }' <<<"$table"
}

# has HEADER [LIBRARY]: a program that includes the one and links the other can be built. Asking
# the compiler, not the package manager, lets every way of installing count; __has_include does
# not read the header, which for nlohmann/json alone would take half a second.
has() {
    printf '#if !__has_include(<%s>)\n#error\n#endif\nint main() {}\n' "$1" |
        g++ -x c++ - -o /dev/null ${2:+"-l$2"} 2>/dev/null
}

missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
has nlohmann/json.hpp || missing+=(nlohmann/json)
onednn=present
if [ "$build" = cpu ]; then
    has boost/context/detail/fcontext.hpp boost_context || missing+=(Boost.Context)
    has dnnl.hpp dnnl || onednn=missing
else
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    if [ ! -x "$nvcc" ]; then
        echo "setup: no nvcc on PATH, nor $nvcc: install the CUDA toolkit (developer.nvidia.com/cuda-downloads)" >&2
        exit 2
    fi
    if [ ! -e "${nvcc%/bin/nvcc}/include/cublasLt.h" ] && ! has cublasLt.h; then
        echo "setup: found $nvcc but no cublasLt.h: install the toolkit's cuBLAS (apt: libcublas-dev-VERSION)" >&2
        exit 2
    fi
fi
if [ ${#missing[@]} = 0 ] && [ $onednn = present ]; then
    exit 0
fi

can_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] && return 0
    command -v sudo >/dev/null || return 1
    sudo -n true 2>/dev/null || [ -t 0 ]    # without a password, or somebody is there to type it
}

apt_get() {
    if [ "$(id -u)" = 0 ]; then
        DEBIAN_FRONTEND=noninteractive apt-get -qq "$@"
    else
        sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@"
    fi
}

# The package lists are fetched only if an installation fails: mostly they are fresh enough.
install() {
    echo "setup: installing $*"
    apt_get install -y --no-install-recommends "$@" >"$log" 2>&1 ||
        { apt_get update >"$log" 2>&1 && apt_get install -y --no-install-recommends "$@" >"$log" 2>&1; }
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

if [ ${#missing[@]} != 0 ]; then
    if ! can_install; then
        all=("${missing[@]}")
        [ $onednn = present ] || all+=(oneDNN)
        cat >&2 <<END
setup: missing: ${all[*]}. Install with one of
    apt install $(packages 2 "${all[@]}")
    dnf install $(packages 3 "${all[@]}")
    pacman -S $(packages 4 "${all[@]}")
    brew install $(packages 5 "${all[@]}")
END
        exit 2
    fi
    read -ra wanted <<<"$(packages 2 "${missing[@]}")"
    if ! install "${wanted[@]}"; then
        cat "$log" >&2
        echo "setup: apt-get could not install: ${wanted[*]}" >&2
        exit 1
    fi
fi

# Without oneDNN everything works, only the matrix multiplications are slower: never a failure.
if [ $onednn = missing ]; then
    if ! can_install || ! install "$(packages 2 oneDNN)"; then
        echo "setup: going on without oneDNN, matmuls will be slower (apt: libdnnl-dev, on Ubuntu in universe; dnf: onednn-devel; pacman, brew: onednn)"
    fi
fi
