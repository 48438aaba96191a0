#!/usr/bin/env bash
# Installs what building gpt.cu needs and this machine lacks. Silent when nothing is missing.
#
#   scripts/setup.sh        the CPU build: g++, make, nlohmann/json, PCRE2, Boost.Context, oneDNN
#   scripts/setup.sh cpu without-onednn    the same but for oneDNN
#   scripts/setup.sh gpu    the GPU build: g++, make, nlohmann/json, PCRE2. The CUDA toolkit is looked
#                           for but never installed: its version has to suit the driver's.
#   scripts/setup.sh ... multi    also what several processes need to train together: Open MPI, and NCCL for the GPU
#                           build, which is looked for only, as it has to suit the toolkit.
#
# CXX=...: with another compiler than g++, which must be there. Nobody is asked for a password: without apt-get, or
# without the right to use it, prints the line to type and exits with 2.
set -euo pipefail

build=${1:-cpu}
case "$*" in
"" | [cg]pu | [cg]"pu without-onednn" | [cg]"pu multi" | [cg]"pu without-onednn multi") ;;
*)
    echo "usage: scripts/setup.sh [cpu|gpu] [without-onednn] [multi]    (found: $*)" >&2
    exit 2
    ;;
esac
compiler=()
eval "compiler=(${CXX:-g++})"    # with flags, quoted as for a shell, or after a program such as ccache

# need            apt (a comma: two)    dnf           pacman         brew
table='
g++               g++                   gcc-c++       gcc            gcc
make              make                  make          make           make
nlohmann/json     nlohmann-json3-dev    json-devel    nlohmann-json  nlohmann-json
PCRE2             libpcre2-dev          pcre2-devel   pcre2          pcre2
Boost.Context     libboost-context-dev  boost-devel   boost          boost
oneDNN            libdnnl-dev           onednn-devel  onednn         onednn
Open-MPI          libopenmpi-dev,openmpi-bin  openmpi-devel  openmpi  open-mpi
'

# packages COLUMN NEED...: what the needs are called in a column of the table
packages() {
    local column=$1
    shift
    awk -v column="$column" -v needs=" $* " 'NF && index(needs, " " $1 " ") { printf "%s%s", sep, $column; sep = " " }' \
        <<<"$table" | tr , ' '
}

# has HEADER [LIBRARY]: a program that includes the one and links the other can be built. Asking
# the compiler, not the package manager, lets every way of installing count; __has_include does
# not read the header, which for nlohmann/json alone would take half a second.
has() {
    printf '#if !__has_include(<%s>)\n#error\n#endif\nint main() {}\n' "$1" |
        "${compiler[@]}" -x c++ - -o /dev/null ${2:+"-l$2"} 2>/dev/null
}

# Open MPI's compiler says where its header is. Some systems have several MPIs, and put none on PATH.
has_open_mpi() {
    local flags
    command -v mpirun >/dev/null && flags=$(mpicxx --showme:compile 2>/dev/null) || return 1
    (eval "compiler+=($flags)" && has mpi.h)
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
if [[ $* == *multi ]]; then
    if [ "$build" = gpu ] && [ ! -e "${nvcc%/bin/nvcc}/include/nccl.h" ] && ! has nccl.h; then
        exec >&2
        pip=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null || echo site-packages)
        flags="CPPFLAGS=-I$pip/nvidia/nccl/include LDFLAGS=-L$pip/nvidia/nccl/lib"
        echo "setup: found $nvcc but no nccl.h: install NCCL for its CUDA, with NVIDIA's repository by"
        echo "    apt-get install libnccl-dev"
        echo "or from PyPI, which takes flags for make then, by (CUDA 13: nvidia-nccl-cu13)"
        echo "    pip install nvidia-nccl-cu12    # $flags"
        exit 2
    fi
    elsewhere=/usr/lib64/openmpi/bin/mpicxx
    if ! has_open_mpi && [ -x $elsewhere ]; then
        echo "setup: found $elsewhere, but not mpicxx and mpirun on PATH: module load mpi/openmpi-$(uname -m)" >&2
        exit 2
    fi
    has_open_mpi || missing+=(Open-MPI)
fi
if [ ${#missing[@]} = 0 ] && [ $onednn = present ]; then
    exit 0
fi

can_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null
}

apt_get() {
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@"
}

# The line to type for some needs, with the package manager that is there.
line_to_type() {
    local line
    if command -v apt-get >/dev/null; then line="apt-get install $(packages 2 "$@")"
    elif command -v dnf >/dev/null; then line="dnf install $(packages 3 "$@")"
    elif command -v pacman >/dev/null; then line="pacman -S $(packages 4 "$@")"
    elif command -v brew >/dev/null; then echo "brew install $(packages 5 "$@")"; return
    else echo "(no apt-get, dnf, pacman or brew was found; in Debian these are) $(packages 2 "$@")"; return
    fi
    if [ "$(id -u)" = 0 ]; then echo "$line"
    elif command -v sudo >/dev/null; then echo "sudo $line"
    else echo "su -c '$line'"
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

# Without oneDNN everything works, only the matrix multiplications are slower: never a failure.
if [ $onednn = missing ]; then
    if ! can_install || ! install "$(packages 2 oneDNN)"; then
        echo "setup: going on without oneDNN, matmuls will be slower; it comes with: $(line_to_type oneDNN)"
    fi
fi
