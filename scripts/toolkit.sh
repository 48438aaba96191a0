#!/usr/bin/env bash
# Creates a folder with the compiler and headers of the CUDA 12.4 toolkit. The machine's own toolkit stays as it is.
#
#   scripts/toolkit.sh DIR
#   make check-cuda TOOLKIT=DIR
#
# The compiler comes from Debian's package nvidia-cuda-toolkit, which is unpacked, not installed; the headers come from
# NVIDIA's Python wheels. The script downloads 480 MB; DIR takes 190 MB. Programs can be compiled but not linked: there
# are no libraries. If DIR already has nvcc, the script does nothing.
set -euo pipefail

for program in apt-get dpkg-deb unzip python3; do
    command -v $program >/dev/null || { echo "toolkit: expected the program $program, found none" >&2; exit 2; }
done
[ $# = 1 ] || { echo "usage: scripts/toolkit.sh DIR    (found: $*)" >&2; exit 2; }
[ ! -x "$1/bin/nvcc" ] || exit 0

# Debian 13 has CUDA 12.4, in non-free; its nvcc also runs on Debian 12.
SUITE=trixie PACKAGE=nvidia-cuda-toolkit
WHEELS=(nvidia-cuda-nvcc-cu12==12.4.131       # crt/: headers that nvcc includes
        nvidia-cuda-runtime-cu12==12.4.127 nvidia-nvtx-cu12==12.4.127 nvidia-cublas-cu12==12.4.5.8
        nvidia-cuda-cccl-cu12==12.4.127.post1)   # nv/target, included by cuda_bf16.h

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
made=$work/made from=$work/package/usr/lib/nvidia-cuda-toolkit
mkdir -p "$(dirname "$1")" "$work"/{lists/partial,cache/archives/partial} "$made"/{bin,include,nvvm/bin}

# apt-get with separate lists, settings and cache
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$') ||
    { echo "toolkit: expected a Debian mirror among the sources of apt-get, found none" >&2; exit 2; }
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $SUITE non-free" > "$work/sources.list"
: > "$work/status"
own=(-o Dir::State="$work" -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status"
     -o Dir::Cache="$work/cache" -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
     -o APT::Sandbox::User="$(id -un)")
apt-get -qq "${own[@]}" update
(cd "$work" && apt-get -qq "${own[@]}" download "$PACKAGE")
dpkg-deb -x "$work"/"$PACKAGE"_*.deb "$work/package"
for wheel in "${WHEELS[@]}"; do   # one at a time: the largest takes 360 MB
    python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$work/wheel" "$wheel"
    unzip -q "$work"/wheel/*.whl '*/include/*' -d "$work/headers"
    rm -r "$work/wheel"
done

# Same layout as NVIDIA's installer; nvcc reads it from nvcc.profile
cp -r "$work"/headers/nvidia/*/include/. "$made/include"
cp -r "$work"/package/usr/bin/{cudafe++,cuobjdump,fatbinary,nvdisasm,nvlink,ptxas} "$from"/bin/{nvcc,crt} "$made/bin"
cp -r "$from/libdevice" "$made/nvvm"
cp "$from/bin/cicc" "$made/nvvm/bin"
cat > "$made/bin/nvcc.profile" <<'END'
TOP                = $(_HERE_)/..
CICC_PATH          = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH              += $(CICC_PATH):$(_HERE_):
INCLUDES          += "-I$(TOP)/include" $(_SPACE_)
END
mv "$made" "$1"
"$1/bin/nvcc" --version | grep release
