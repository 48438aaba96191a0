#!/usr/bin/env bash
# Compiles one object for one GPU and checks it: check_cuda.sh build/check/PRECISION-ARCH.o NVCC ARGUMENTS...
#
# Fails on a warning, a register spill, and a wgmma or setmaxnreg that ptxas serialises or ignores. For bf16-90a.o it
# also checks the SASS of Hopper's kernels (check_sass.py) and tests this check with planted faults.
set -euo pipefail

object=$1
shift
name=$(basename "$object" .o)
log=${object%.o}.log
"$@" -o "$object" 2> "$log" || { cat "$log"; exit 1; }
if grep -iE 'warning' "$log"; then exit 1; fi
if grep -E '[1-9][0-9]* bytes spill' "$log"; then echo "$name: a kernel spills registers"; exit 1; fi
if grep 'Potential Performance Loss' "$log"; then echo "$name: ptxas serialised wgmma or ignored setmaxnreg"; exit 1; fi
echo "sm_${name#*-} ${name%-*}: $(grep -c 'Used .* registers' "$log") kernels, no spills"

[ "$name" = bf16-90a ] || exit 0
sass=${object%.o}.sass
"$CUOBJDUMP" -sass "$object" > "$sass"
"$PYTHON" dev/kernels/check_sass.py "$sass" --expect attention_{forward,backward_dq,backward_dkv}_wgmma_kernel
log=build/check/test_check_sass.log
"$PYTHON" dev/kernels/test_check_sass.py "$sass" > $log || { grep -A 20 FAILED $log; exit 1; }
tail -n 1 $log
