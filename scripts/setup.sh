#!/usr/bin/env bash
# Installs what building gpt.cu needs and this machine lacks. Silent when nothing is missing.
#
#   scripts/setup.sh        the CPU build: g++, make, nlohmann/json, PCRE2, Boost.Context, oneDNN
#   scripts/setup.sh cpu without-onednn    the same but for oneDNN
#   scripts/setup.sh gpu    the GPU build: g++, make, nlohmann/json, PCRE2. The CUDA toolkit is looked
#                           for but never installed: its version has to suit the driver's.
#
# CXX=...: with another compiler than g++, which must be there. Nobody is asked for a password: without apt-get, or
# without the right to use it, prints the line to type and exits with 2.
set -euo pipefail

build=${1:-cpu}
case "$*" in
"" | [cg]pu | [cg]"pu without-onednn") ;;
*)
    echo "usage: scripts/setup.sh [cpu|gpu] [without-onednn]    (found: $*)" >&2
    exit 2
    ;;
esac
compiler=()
eval "compiler=(${CXX:-g++})"    # with flags, quoted as for a shell, or after a program such as ccache

# need            apt                   dnf           pacman         brew
table='
g++               g++                   gcc-c++       gcc            gcc
make              make                  make          make           make
nlohmann/json     nlohmann-json3-dev    json-devel    nlohmann-json  nlohmann-json
PCRE2             libpcre2-dev          pcre2-devel   pcre2          pcre2
Boost.Context     libboost-context-dev  boost-devel   boost          boost
oneDNN            libdnnl-dev           onednn-devel  onednn         onednn
'

# packages COLUMN NEED...: what the needs are called in a column of the table
packages() {
    local column=$1
    shift
    awk -v column="$column" -v needs=" $* " \
        'NF && index(needs, " " $1 " ") { printf "%s%s", sep, $column; sep = " " }' <<<"$table"
}

# has HEADER [LIBRARY]: whether a program that includes the one and links the other can be built, however it was
# installed. __has_include does not read the header, which for nlohmann/json would take half a second.
has() {
    printf '#if !__has_include(<%s>)\n#error\n#endif\nint main() {}\n' "$1" |
        "${compiler[@]}" -x c++ - -o /dev/null ${2:+"-l$2"} 2>/dev/null
}

missing=()
if ! command -v "${compiler[0]}" >/dev/null; then
    if [ "${compiler[0]}" != g++ ]; then
        echo "setup: CXX names ${compiler[0]}, which was not found; without CXX it is g++" >&2
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

sudo=
[ "$(id -u)" = 0 ] || sudo='sudo '
can_install() { command -v apt-get >/dev/null && { [ -z "$sudo" ] || sudo -n true 2>/dev/null; }; }
apt_get() { ${sudo:+sudo -n} env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@" >"$log" 2>&1; }

# Prints the line to type for some needs, with the package manager that is there.
line_to_type() {
    if command -v apt-get >/dev/null; then echo "${sudo}apt-get install $(packages 2 "$@")"
    elif command -v dnf >/dev/null; then echo "${sudo}dnf install $(packages 3 "$@")"
    elif command -v pacman >/dev/null; then echo "${sudo}pacman -S $(packages 4 "$@")"
    elif command -v brew >/dev/null; then echo "brew install $(packages 5 "$@")"
    else echo "(no apt-get, dnf, pacman or brew was found; in Debian these are) $(packages 2 "$@")"
    fi
}

# The package lists are fetched only if an installation fails: usually they are recent enough.
install() {
    echo "setup: installing $*"
    apt_get install -y --no-install-recommends "$@" ||
        { apt_get update && apt_get install -y --no-install-recommends "$@"; }
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

if [ ${#missing[@]} != 0 ]; then
    if ! can_install; then
        all=("${missing[@]}")
        [ $onednn = present ] || all+=(oneDNN)
        printf 'setup: missing: %s. Install with\n    %s\n' "${all[*]}" "$(line_to_type "${all[@]}")" >&2
        exit 2
    fi
    read -ra wanted <<<"$(packages 2 "${missing[@]}")"
    if ! install "${wanted[@]}"; then
        cat "$log" >&2
        echo "setup: apt-get could not install: ${wanted[*]}" >&2
        exit 1
    fi
fi

# Without oneDNN everything works, with slower matmuls: never a failure.
if [ $onednn = missing ]; then
    if ! can_install || ! install "$(packages 2 oneDNN)"; then
        echo "setup: going on without oneDNN, matmuls will be slower; it comes with: $(line_to_type oneDNN)"
    fi
fi
