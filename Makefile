# make            builds ./train_gpt for this machine
# make run        builds it and trains a small GPT on this repository's own text; DATA=file.txt: on that
# make test       builds the tests and runs them
# make help       the other targets
#
# DEVICE=gpu|cpu and PRECISION=bf16|fp32 choose otherwise than the machine suggests.

SHELL = /bin/bash

# ---- which build --------------------------------------------------------------------------------

GPU_NAME := $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)
NVCC     := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)

ifdef DEVICE
  REASON := as DEVICE=$(DEVICE) asks
else ifeq ($(NVCC),)
  DEVICE := cpu
  REASON := no nvcc was found
else ifeq ($(GPU_NAME),)
  DEVICE := cpu
  REASON := no GPU was found
else
  DEVICE := gpu
  REASON := nvcc and $(GPU_NAME) were found
endif
ifeq ($(filter $(DEVICE),gpu cpu),)
  $(error DEVICE takes gpu or cpu, found '$(DEVICE)')
endif

PRECISION ?= $(if $(filter gpu,$(DEVICE)),bf16,fp32)
ifeq ($(filter $(PRECISION),bf16 fp32),)
  $(error PRECISION takes bf16 or fp32, found '$(PRECISION)')
endif
DEFINE_bf16 := -DPRECISION_BF16

# ---- how to compile -----------------------------------------------------------------------------

# The CPU build. NaN and infinity keep their meaning; sums may be reordered, once and for all at
# compile time, so that loops over a row become vector instructions.
CXX       ?= g++
VECTORS   := -O3 -march=native -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math -freciprocal-math
VECTORS   += $(if $(shell grep -m1 -o avx512f /proc/cpuinfo 2>/dev/null),-mprefer-vector-width=512)
WARNINGS  := -Wall -Wextra -Wno-unknown-pragmas
# Looked up when it is used: set-up may just have installed it.
ONEDNN     = $(shell printf '\#include <dnnl.hpp>' | $(CXX) -x c++ -E - >/dev/null 2>&1 && echo -DHAVE_ONEDNN)
CPU_FLAGS := -x c++ -std=c++17 $(WARNINGS) -fopenmp -Idev/cpu
CPU_LIBS   = $(if $(ONEDNN),-ldnnl) -lboost_context -lpthread

# The GPU build, for the card that is there, else for Ampere, Ada and Hopper.
CAPABILITY := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1))
ARCHS      := $(if $(CAPABILITY),$(patsubst 90,90a,$(CAPABILITY)),80 89 90a)
GENCODE    := $(foreach a,$(ARCHS),-gencode=arch=compute_$a,code=sm_$a)
GPU_FLAGS  := -std=c++17 -O3 -lineinfo -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas
GPU_LIBS   := -lcublasLt -lcublas

# compile(source, program, precision, width or "gpu", further flags)
define compile
@mkdir -p $(dir $(2))
$(if $(filter gpu,$(4)),$(NVCC) $(GPU_FLAGS) $(GENCODE) $(DEFINE_$(3)) $(5) $(1) -o $(2) $(GPU_LIBS),\
$(CXX) $(CPU_FLAGS) $(5) -DWARP_SIZE=$(4) $(ONEDNN) $(DEFINE_$(3)) $(1) -o $(2) $(CPU_LIBS))
endef

BUILD   := build/$(DEVICE)-$(PRECISION)
HEADERS := $(wildcard dev/cpu/*.h dev/cpu/*/*.h) Makefile

# ---- build and run ------------------------------------------------------------------------------

.PHONY: all setup run debug test test-asan test-cards test-gpu test-gpu-sanitize test-hf check-cuda kernels \
        check-kernels reference bench bench-gpu chapter test-explorer clean help require-gpu require-sanitizer
all: setup $(BUILD)/train_gpt
	@ln -sf $(BUILD)/train_gpt train_gpt
	@echo "./train_gpt is the $(DEVICE) build in $(PRECISION): $(REASON)"

setup:
	@scripts/setup.sh $(DEVICE)

$(BUILD)/train_gpt: train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,$(PRECISION),$(if $(filter gpu,$(DEVICE)),gpu,1),$(if $(filter cpu,$(DEVICE)),$(VECTORS)))

# To step through a kernel in gdb: a warp of 32, nothing optimised away, 1 thread of the machine.
debug: setup
	$(call compile,train_gpt.cu,build/debug/train_gpt,$(PRECISION),32,-g -O0)
	@echo "OMP_NUM_THREADS=1 gdb --args build/debug/train_gpt ..."

# This repository's own text; or DATA=file.txt.
OWN_TEXT := data/own.txt
DATA     ?= $(OWN_TEXT)
$(OWN_TEXT): train_gpt.cu test_gpt.cu README.md Makefile $(wildcard dev/*/*.h dev/*/*.py dev/*/*.md scripts/*)
	@cat $^ > $@

# About a minute on 2 CPU cores.
RUN_OPTIONS ?= --layers 4 --heads 4 --channels 128 --context 128 --micro-batch 8 --steps 1500 --lr 2e-3 --min-lr 2e-4 \
               --warmup 50 --beta2 0.99 --eval-every 500 --sample-every 1500 --sample-tokens 300
run: all $(filter $(OWN_TEXT),$(DATA))
	./train_gpt train --data $(DATA) $(RUN_OPTIONS) --out runs/$$(date +%Y%m%d-%H%M%S)

# ---- tests --------------------------------------------------------------------------------------
# Width 32 is what a GPU does; width 1 is what a CPU runs.

TESTS := $(foreach p,fp32 bf16,$(foreach w,32 1,build/test/$p-$w/test_gpt)) build/test/cpu-32/test_cpu build/test/cpu-1/test_cpu
test_width = $(lastword $(subst -, ,$(notdir $(patsubst %/,%,$(dir $(1))))))
test_kind  = $(firstword $(subst -, ,$(notdir $(patsubst %/,%,$(dir $(1))))))
build/test/%/test_gpt: test_gpt.cu train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,$(call test_kind,$@),$(call test_width,$@),$(if $(filter 1,$(call test_width,$@)),$(VECTORS),-O2 -march=native))
build/test/%/test_cpu: dev/cpu/test_cpu.cpp $(HEADERS) | setup
	$(call compile,$<,$@,,$(call test_width,$@),-O2 -march=native)

SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
build/asan/%/test_gpt: test_gpt.cu train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,$(call test_kind,$@),$(call test_width,$@),$(SANITIZE))
build/asan/%/test_cpu: dev/cpu/test_cpu.cpp $(HEADERS) | setup
	$(call compile,$<,$@,,$(call test_width,$@),$(SANITIZE))

build/test/gpu-%/test_gpt: test_gpt.cu train_gpt.cu | setup
	$(call compile,$<,$@,$*,gpu)

# run_tests(programs, environment, command): runs programs that close with "N passed, N failed", and adds those lines
# up; or else the command, which may name $$program. Threads that sleep while they wait, as the models are tiny and the
# machine may be busy.
define run_tests
@status=0; passed=0; failed=0; export OMP_WAIT_POLICY=passive; \
for program in $(1); do \
    echo "== $$program"; \
    $(2) $(or $(3),$$program) 2>&1 | tee build/test.log; [ $${PIPESTATUS[0]} -eq 0 ] || status=1; \
    line=$$(grep -E '^[0-9]+ passed, [0-9]+ failed' build/test.log | tail -n 1); \
    [ -n "$$line" ] || { echo "$$program did not finish"; status=1; line="0 passed, 1 failed"; }; \
    set -- $$line; passed=$$((passed + $$1)); failed=$$((failed + $$3)); \
done; \
echo "== all"; echo "$$passed passed, $$failed failed"; exit $$status
endef

test: $(TESTS)
	$(call run_tests,$(TESTS))

ASAN_TESTS := build/asan/fp32-32/test_gpt build/asan/bf16-32/test_gpt build/asan/cpu-32/test_cpu
test-asan: $(ASAN_TESTS)
	$(call run_tests,$(ASAN_TESTS),ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1)

# The tests on cards that dev/cpu pretends to be: their limits, and work that is put off. Everything on the first of
# them, on the others what depends on the card.
CARDS           ?= h100 a100 4090
CARD_PRECISIONS ?= bf16
CARD_PARTS      ?= kernels,model against PyTorch,memory,tensor cores,graphs
CARD_RUNS       := $(foreach p,$(CARD_PRECISIONS),$(CARDS:%=$p-%))
card_test = { export CUDA_CPU_CARD=$${program\#*-}; test=build/test/$${program%%-*}-32/test_gpt; \
    if [ $$program = $(firstword $(CARD_RUNS)) ]; then $$test; else $$test --only "$(CARD_PARTS)"; fi; }
test-cards: $(CARD_PRECISIONS:%=build/test/%-32/test_gpt)
	$(call run_tests,$(CARD_RUNS),,$(card_test))

GPU_TESTS := build/test/gpu-fp32/test_gpt build/test/gpu-bf16/test_gpt
test-gpu: $(GPU_TESTS)
	$(call run_tests,$(GPU_TESTS))

# The same programs under compute-sanitizer, each tool on each build: every kernel's tests, and the model's, at
# the small sizes that they have; not the command line's, which would take hours and has the same kernels. memcheck
# also watches NVIDIA's kernels, with a margin behind each allocation so that the next one is not mistaken for it;
# racecheck (shared memory) and synccheck watch ours only. No initcheck: the tests fill what kernels write with NaN,
# so what was never written shows there already.
SANITIZER      := $(shell command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
SANITIZERS     ?= memcheck racecheck synccheck
SANITIZED      ?= kernels,model against PyTorch,tensor cores
FLAGS_memcheck  := --padding 4096
FLAGS_racecheck := --kernel-name kns=_kernel
FLAGS_synccheck := --kernel-name kns=_kernel
require-sanitizer:
	@[ -n "$(SANITIZER)" ] || { echo "test-gpu-sanitize needs compute-sanitizer, which comes with the CUDA toolkit"; exit 2; }

# Sound: the tests passed, the tool exited with 0, and its own summary says that it found nothing.
define sanitize
echo "== $(1) $(2)"; log=build/sanitize-$(1)-$(notdir $(patsubst %/,%,$(dir $(2)))).log; \
$(SANITIZER) --tool $(1) --error-exitcode 9 $(FLAGS_$(1)) $(2) --only "$(SANITIZED)" > $$log 2>&1; code=$$?; \
tests=$$(grep -E '^[0-9]+ passed, [0-9]+ failed' $$log | tail -n 1); summary=$$(grep -E '^=+ .*SUMMARY: ' $$log | tail -n 1 | sed 's/^=* //'); \
echo "$${summary:-no summary}; tests: $${tests:-did not finish}; exit code $$code"; \
if [ $$code -eq 0 ] && grep -qE '^[1-9][0-9]* passed, 0 failed' <<< "$$tests" && \
   grep -qE 'SUMMARY: 0 (errors|hazards displayed \(0 errors, 0 warnings\))' <<< "$$summary"; then passed=$$((passed + 1)); \
else failed=$$((failed + 1)); grep -E '^=+ |FAILED' $$log | head -n 40; tail -n 3 $$log; echo "FAILED: all of it is in $$log"; fi;
endef

test-gpu-sanitize: require-gpu require-sanitizer $(GPU_TESTS)
	@mkdir -p build; passed=0; failed=0; \
	$(foreach program,$(GPU_TESTS),$(foreach tool,$(SANITIZERS),$(call sanitize,$(tool),$(program)))) \
	echo "== all"; echo "$$passed passed, $$failed failed"; [ $$failed -eq 0 ]

# A folder that we wrote, opened by safetensors and transformers.
PYTHON ?= python3
test-hf: build/test/fp32-1/test_gpt
	rm -rf build/hf && mkdir -p build/hf
	$< --export build/hf
	$(PYTHON) dev/reference/check_folder.py build/hf $(CHECK_FOLDER)

# Compiles for each card that we name, without warnings and without a register that spills.
check-cuda:
	@command -v $(NVCC) >/dev/null || { echo "check-cuda needs nvcc"; exit 2; }
	@mkdir -p build/check; \
	for precision in bf16 fp32; do for arch in 80 89 90a; do \
	    define=; [ $$precision = fp32 ] || define=-DPRECISION_BF16; \
	    echo "sm_$$arch $$precision"; \
	    $(NVCC) $(GPU_FLAGS) -Werror all-warnings -Xptxas -v -gencode=arch=compute_$$arch,code=sm_$$arch $$define -c train_gpt.cu \
	        -o build/check/train_gpt.o 2> build/check/log || { cat build/check/log; exit 1; }; \
	    if grep -iE 'warning' build/check/log; then exit 1; fi; \
	    if grep -E '[1-9][0-9]* bytes spill' build/check/log; then echo "a kernel spills registers"; exit 1; fi; \
	    if grep 'Potential Performance Loss' build/check/log; then echo "wgmma or setmaxnreg does not do its part"; exit 1; fi; \
	    grep -c 'Used .* registers' build/check/log | sed 's/$$/ kernels, none spills/'; \
	done; done

# ---- studies ------------------------------------------------------------------------------------
# dev/kernels: each layer's kernel step by step, checked and timed. KERNEL=layernorm: only that one; MARKDOWN=FILE:
# the tables also go there. On a CPU at width 32, as a GPU does it.

STUDIES        := $(sort $(basename $(notdir $(wildcard dev/kernels/*.cu))))
KERNEL         ?= $(STUDIES)
STUDY_PROGRAMS := $(addprefix build/kernels/$(DEVICE)-$(PRECISION)/,$(KERNEL))
build/kernels/$(DEVICE)-$(PRECISION)/%: dev/kernels/%.cu dev/kernels/study.h train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,$(PRECISION),$(if $(filter gpu,$(DEVICE)),gpu,32),$(if $(filter cpu,$(DEVICE)),-O1))
kernels: $(STUDY_PROGRAMS)
	@status=0; for program in $^; do \
	    echo "== $$program"; OMP_WAIT_POLICY=passive $$program $(if $(MARKDOWN),--markdown $(MARKDOWN)) || status=1; \
	done; exit $$status

# They compile for Hopper, without warnings.
check-kernels:
	$(MAKE) --no-print-directory DEVICE=gpu PRECISION=bf16 ARCHS=90a GPU_FLAGS="$(GPU_FLAGS) -Werror all-warnings" \
	    $(STUDIES:%=build/kernels/gpu-bf16/%)

reference:
	$(PYTHON) dev/reference/make_reference.py
	$(PYTHON) dev/reference/make_hf_fixture.py

bench: all
	$(PYTHON) dev/bench/cpu.py --ours ./train_gpt $(BENCH)

# On a GPU, beside PyTorch and, with LLMC=FOLDER, llm.c: a report in runs/bench-gpu. BENCH takes gpu.py's options, such
# as "--minutes 8 --models gpt2,gpt2-xl --out DIR"; with DEVICE=cpu BENCH="--device cpu" it is a dry run.
bench-gpu: require-gpu all $(filter $(OWN_TEXT),$(DATA))
	$(PYTHON) dev/bench/gpu.py --ours ./train_gpt --data '$(DATA)' $(if $(LLMC),--llmc '$(LLMC)') $(BENCH)

require-gpu:
	@[ -n "$(GPU_NAME)$(findstring --device cpu,$(BENCH))" ] || { echo "no GPU was found: nvidia-smi names none"; exit 2; }

# The single-GPU chapter of the Ultra-Scale Playbook, measured on this machine: a report with plots.
chapter: all
	$(PYTHON) dev/chapter/chapter.py --train-gpt ./train_gpt --out runs/chapter $(CHAPTER)

# The page of dev/explorer in a headless Chromium, against plan --json.
test-explorer: all
	$(PYTHON) dev/explorer/test_explorer.py --train-gpt ./train_gpt

clean:
	rm -rf build train_gpt $(OWN_TEXT)

help:
	@sed -n '1,6s/^# \{0,1\}//p' Makefile
	@echo "make debug          build/debug/train_gpt, to step through kernels in gdb on a CPU"
	@echo "make test-asan      the tests under AddressSanitizer and UBSan"
	@echo "make test-cards     the tests on cards that dev/cpu pretends to be: CARDS=\"h100 h200 a100 4090 l40s t4 b200\""
	@echo "make test-gpu       the tests on a GPU"
	@echo "make test-gpu-sanitize  the kernels' and the model's tests under compute-sanitizer"
	@echo "make test-hf        a folder that we wrote, opened by safetensors and transformers"
	@echo "make check-cuda     compiles for sm_80, sm_89 and sm_90a: no warnings, no spills"
	@echo "make kernels        dev/kernels: each layer's kernel step by step, checked and timed; KERNEL=attention: one"
	@echo "make check-kernels  they compile for sm_90a: no warnings"
	@echo "make reference      writes data/reference/ with PyTorch"
	@echo "make bench          this CPU, beside PyTorch and llm.c where they are there"
	@echo "make bench-gpu      this GPU, beside PyTorch and llm.c: a report within 8 minutes"
	@echo "make chapter        memory, recomputation, accumulation, throughput: a report with plots"
	@echo "make test-explorer  dev/explorer's page in headless Chromium, against plan --json"
