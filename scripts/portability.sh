#!/usr/bin/env bash
# Builds and runs the tests with compilers and for processors other than those that make chooses. Warnings are errors.
# Prints a line for each configuration, then "N passed, N failed".
#
#   scripts/portability.sh            every configuration whose compiler is installed
#   scripts/portability.sh NAME...    these configurations; a missing compiler is a failure
#
# aarch64 needs g++-aarch64-linux-gnu, qemu-user and Debian's libboost-context1.74-dev:arm64 and libpcre2-dev:arm64,
# installed or unpacked in build/ports/arm64.
set -euo pipefail
cd "$(dirname "$0")/.."

all=(clang++-14 clang++-22 g++-11 no-onednn aarch64)
# Tests of arithmetic, which another compiler, matmul or vector width may change.
numbers='kernels,model against PyTorch,tensor cores in,folders,evaluation,graphs,runs: the same bits'

# Sets `variables` (of make), `program` (the test program to build) and `parts` (the tests to run).
configure() {
    program=fp32-1 parts=$numbers
    case $1 in
    clang++-14) variables=(CXX=clang++-14 MARCH=x86-64-v3) program=bf16-32 ;;
    clang++-22) # warns about deprecated declarations in the headers of g++ 12
        variables=(CXX=clang++-22 CPPFLAGS=-Wno-deprecated-declarations) ;;
    g++-11)     # for a processor without AVX, where oneDNN has no BF16 matmul
        variables=(CXX=g++-11 MARCH=x86-64-v2 TEST_RUNNER='env DNNL_MAX_CPU_ISA=SSE41')
        program=bf16-1 parts+=',bad' ;;
    no-onednn)  # with the checks that Ubuntu's g++ enables by default
        variables=(CXX=g++ MARCH=x86-64-v3 ONEDNN=no 'CPPFLAGS=-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3')
        parts+=',runs: matmul' ;;
    aarch64)    # emulated: slow, and tests that start the program as a new process do not work
        variables=(CXX=aarch64-linux-gnu-g++ ONEDNN=no TEST_RUNNER=qemu-aarch64
                   LDFLAGS='-static -Lbuild/ports/arm64/usr/lib/aarch64-linux-gnu')
        parts='kernels,folders,evaluation' ;;
    *)  echo "portability.sh: expected ${all[*]}; found '$1'" >&2
        exit 2 ;;
    esac
}

try() {
    configure "$1"
    local dir=build/ports/$1 log=build/ports/$1.log verdict=FAILED counts
    SECONDS=0
    make -j1 "${variables[@]}" CXXFLAGS=-Werror TEST_DIR="$dir" HOST="$dir/host" TESTS="$dir/$program/test_gpt" \
        ONLY="$parts" test >"$log" 2>&1 && verdict='ok    '
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1) || counts="not built or not finished"
    echo "$verdict  $1: ${variables[*]}, $program: $counts, $SECONDS s"
    if [ "$verdict" = FAILED ]; then
        grep -E '^FAILED|error:|did not finish|setup:' "$log" | head -n 10
        echo "log: $log"
    fi
}

if [ "${1:-}" = --try ]; then
    try "$2"
    exit
fi
names=("$@")
for name in "${all[@]}"; do
    [ $# = 0 ] || break
    configure "$name"
    compiler=${variables[0]#CXX=}
    if command -v "$compiler" >/dev/null; then names+=("$name"); else echo "skipped $name: found no $compiler"; fi
done
[ ${#names[@]} != 0 ] || { echo "portability.sh: expected the compiler of a configuration, found none" >&2; exit 2; }
for name in "${names[@]}"; do configure "$name"; done    # rejects unknown names before any build
mkdir -p build/ports
results=build/ports/results
printf '%s\n' "${names[@]}" | xargs -P "$(nproc)" -I NAME "$0" --try NAME | tee $results
failed=$(grep -c '^FAILED' $results || true)
echo "$(grep -c '^ok' $results || true) passed, $failed failed"
[ "$failed" = 0 ]
