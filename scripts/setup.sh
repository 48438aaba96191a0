#!/usr/bin/env bash
# Installs missing packages that building gpt.cu needs. Prints nothing if none is missing.
#
#   scripts/setup.sh        the CPU build: g++, make, nlohmann/json, PCRE2, Boost.Context, oneDNN
#   scripts/setup.sh cpu without-onednn    the CPU build without oneDNN
#   scripts/setup.sh gpu    the GPU build: g++, make, nlohmann/json, PCRE2. The CUDA toolkit is checked
#                           but never installed, because its version must match the driver.
#
# CXX=... names a compiler other than g++; it must be installed. The script never asks for a password: without the right
# to install, it downloads Debian's or Ubuntu's packages and unpacks them into build/deps, which the Makefile adds to
# the compiler's search paths. Where that is impossible, it prints the command to type and exits with 2.
set -euo pipefail
cd "$(dirname "$0")/.."
deps=$PWD/build/deps
export CPLUS_INCLUDE_PATH=$deps/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
export LIBRARY_PATH=$deps/lib${LIBRARY_PATH:+:$LIBRARY_PATH}

build=${1:-cpu}
case "$*" in
"" | [cg]pu | [cg]"pu without-onednn") ;;
*)
    echo "setup: expected [cpu|gpu] [without-onednn], found '$*'" >&2
    exit 2
    ;;
esac
compiler=()
eval "compiler=(${CXX:-g++})"    # may include flags in shell quoting, or a prefix such as ccache

# need            apt                   dnf           pacman         brew
table='
g++               g++                   gcc-c++       gcc            gcc
make              make                  make          make           make
nlohmann/json     nlohmann-json3-dev    json-devel    nlohmann-json  nlohmann-json
PCRE2             libpcre2-dev          pcre2-devel   pcre2          pcre2
Boost.Context     libboost-context-dev  boost-devel   boost          boost
oneDNN            libdnnl-dev           onednn-devel  onednn         onednn
'

# packages COLUMN NEED...: prints the names of the needs in a column of the table
packages() {
    local column=$1
    shift
    awk -v column="$column" -v needs=" $* " \
        'NF && index(needs, " " $1 " ") { printf "%s%s", sep, $column; sep = " " }' <<<"$table"
}

# has HEADER [LIBRARY]: succeeds if the compiler finds the header and links the library, however they were installed.
# __has_include does not read the header; reading nlohmann/json would take half a second.
has() {
    printf '#if !__has_include(<%s>)\n#error\n#endif\nint main() {}\n' "$1" |
        "${compiler[@]}" -x c++ - -o /dev/null ${2:+"-l$2"} 2>/dev/null
}

missing=()
if ! command -v "${compiler[0]}" >/dev/null; then
    if [ "${compiler[0]}" != g++ ]; then
        echo "setup: CXX: expected a compiler, found no '${compiler[0]}'; without CXX it is g++" >&2
        exit 2
    fi
    missing+=(g++)
fi
command -v make >/dev/null || missing+=(make)
has nlohmann/json.hpp || missing+=(nlohmann/json)
has pcre2.h pcre2-8 || missing+=(PCRE2)
onednn=present
if [ "$build" = cpu ]; then
    has boost/context/detail/fcontext.hpp boost_context || missing+=(Boost.Context)
    [ "${2:-}" = without-onednn ] || has oneapi/dnnl/dnnl.hpp dnnl || onednn=missing
else
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    if [ ! -x "$nvcc" ]; then
        echo "setup: expected nvcc on PATH or at $nvcc, found none; install the CUDA toolkit" \
            "(developer.nvidia.com/cuda-downloads)" >&2
        exit 2
    fi
    if [ ! -e "${nvcc%/bin/nvcc}/include/cublasLt.h" ] && ! has cublasLt.h; then
        echo "setup: expected cublasLt.h beside $nvcc, found none; install cuBLAS (apt: libcublas-dev-VERSION)" >&2
        exit 2
    fi
fi
if [ ${#missing[@]} = 0 ] && [ $onednn = present ]; then
    exit 0
fi

sudo=
[ "$(id -u)" = 0 ] || sudo='sudo '
can_install() { command -v apt-get >/dev/null && { [ -z "$sudo" ] || sudo -n true 2>/dev/null; }; }
apt_get() { ${sudo:+sudo -n} env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" >"$log" 2>&1; }

# line_to_type NEED...: prints the command that installs the needs with this machine's package manager
line_to_type() {
    if command -v apt-get >/dev/null; then echo "${sudo}apt-get install $(packages 2 "$@")"
    elif command -v dnf >/dev/null; then echo "${sudo}dnf install $(packages 3 "$@")"
    elif command -v pacman >/dev/null; then echo "${sudo}pacman -S $(packages 4 "$@")"
    elif command -v brew >/dev/null; then echo "brew install $(packages 5 "$@")"
    else echo "(expected apt-get, dnf, pacman or brew, found none; Debian's packages are) $(packages 2 "$@")"
    fi
}

# Updates the package lists only if the installation fails, because they are usually recent enough.
install() {
    echo "setup: installing $*"
    apt_get install -y --no-install-recommends "$@" ||
        { apt_get update && apt_get install -y --no-install-recommends "$@"; }
}

# can_unpack NEED...: a compiler and make must be installed
can_unpack() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null && [[ " $* " != *" g++ "* && " $* " != *" make "* ]]
}

# Downloads the packages, and those that they depend on and that are missing, and unpacks them into build/deps. Uses
# package lists of its own, because a user cannot update those of the system.
unpack() (
    echo "setup: unpacking into build/deps: $*"
    rm -rf "$deps/apt"
    mkdir -p "$deps"/apt/{lists,cache/archives,packages}/partial && cd "$deps/apt/packages" || exit
    apt=(apt-get -qq -o Dir::State::lists="$deps/apt/lists" -o Dir::Cache="$deps/apt/cache"
        -o Acquire::Retries=0 -o Acquire::http::Timeout=20)
    exec >"$log" 2>&1
    "${apt[@]}" update || exit
    "${apt[@]}" --simulate --no-install-recommends install "$@" | awk '/^Inst/ { print $2 }' >names || exit
    xargs "${apt[@]}" download <names || exit
    for package in *.deb; do dpkg -x "$package" "$deps" || exit; done
    lib=$(cd "$deps" && echo usr/lib/*-linux-gnu*)
    ln -sfn usr/include "$deps/include"
    ln -sfn "$lib" "$deps/lib"
    # Links to libraries that are installed, so that their packages were not downloaded.
    find "$deps/$lib" -xtype l | while read -r link; do ln -sf "/$lib/$(readlink "$link")" "$link"; done
    rm -rf "$deps/apt"
)

log=$(mktemp)
trap 'rm -f "$log"' EXIT

if ! can_install; then
    all=("${missing[@]}")
    [ $onednn = present ] || all+=(oneDNN)
    read -ra wanted <<<"$(packages 2 "${all[@]}")"
    if [ ${#missing[@]} = 0 ] && [ -e "$deps/tried" ]; then
        exit 0    # without oneDNN, as an earlier message said
    fi
    if can_unpack "${all[@]}"; then
        ! unpack "${wanted[@]}" || exit 0
        touch "$deps/tried"
        cat "$log" >&2
    fi
    if [ ${#missing[@]} != 0 ]; then
        printf 'setup: missing: %s. Install with\n    %s\n' "${all[*]}" "$(line_to_type "${all[@]}")" >&2
        exit 2
    fi
elif [ ${#missing[@]} != 0 ]; then
    read -ra wanted <<<"$(packages 2 "${missing[@]}")"
    if ! install "${wanted[@]}"; then
        cat "$log" >&2
        echo "setup: apt-get could not install: ${wanted[*]}" >&2
        exit 1
    fi
fi

# A missing oneDNN is not an error: the program works without it, with slower matmuls.
if [ $onednn = missing ]; then
    if ! can_install || ! install "$(packages 2 oneDNN)"; then
        echo "setup: continuing without oneDNN, with slower matmuls; to install it: $(line_to_type oneDNN)"
    fi
fi
