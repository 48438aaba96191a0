# make            builds ./train_gpt for this machine
# make run        builds it and trains a small GPT on Shakespeare; DATA=file.txt: on that file
# make test       builds the tests and runs them; ONLY=WORDS: those whose names begin so
# make help       lists all targets
#
# The machine decides what is built. DEVICE=gpu|cpu and PRECISION=bf16|fp16|fp32 override it, and so do NCCL=DIR (the
# folder of include/nccl.h, for several GPUs), CXX, MARCH (the value of -march=), ONEDNN=no, and CPPFLAGS, CXXFLAGS and
# LDFLAGS, which are added after the flags below. Targets for development are in dev/Makefile.

SHELL = /bin/bash
.DEFAULT_GOAL := all

# ---- device and precision -----------------------------------------------------------------------

# nvidia_smi(property, pattern): a property of the first GPU. Empty if the driver does not answer: nvidia-smi then
# exits with an error and prints a message where the property should be.
nvidia_smi = $(shell said=$$(nvidia-smi --query-gpu=$(1) --format=csv,noheader 2>/dev/null) && \
                     head -n 1 <<< "$$said" | grep -xE '$(2)')
GPU_NAME := $(call nvidia_smi,name,.+)
# TOOLKIT=DIR: uses the CUDA toolkit in DIR instead of the installed one.
NVCC     := $(if $(TOOLKIT),$(TOOLKIT)/bin/nvcc,$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null))

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

# The GPU's compute capability, such as 90; empty without a GPU.
CAPABILITY := $(subst .,,$(call nvidia_smi,compute_cap,[0-9]+\.[0-9]))
# FP16 on a GPU that has no BF16; BF16 on later ones, and on a CPU with instructions that multiply it faster than FP32.
FAST_BF16 := $(shell grep -owE -m 1 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null | head -n 1)
ifdef PRECISION
  WHY_PRECISION := as PRECISION=$(PRECISION) asks
else ifeq ($(DEVICE)$(filter 6% 7%,$(CAPABILITY)),gpu)
  PRECISION := bf16
  WHY_PRECISION := as on every GPU from Ampere on
else ifeq ($(DEVICE),gpu)
  PRECISION := fp16
  WHY_PRECISION := this GPU is older than BF16
else ifeq ($(FAST_BF16),)
  PRECISION := fp32
  WHY_PRECISION := this processor has neither avx512_bf16 nor amx_bf16
else ifeq ($(ONEDNN),no)
  PRECISION := fp32
  WHY_PRECISION := as without oneDNN $(FAST_BF16) is not used
else
  PRECISION := bf16
  WHY_PRECISION := this processor has $(FAST_BF16)
endif
PRECISIONS := bf16 fp16 fp32
ifeq ($(filter $(PRECISION),$(PRECISIONS)),)
  $(error PRECISION takes one of $(PRECISIONS), found '$(PRECISION)')
endif
DEFINE_bf16 := -DPRECISION_BF16
DEFINE_fp16 := -DPRECISION_FP16

# ---- flags --------------------------------------------------------------------------------------

# The CPU build. NaN and infinity keep their meaning. The compiler may reorder sums, so that loops over a row become
# vector instructions; the order is fixed at compile time.
CXX       ?= g++
USER_CXX   = $(CPPFLAGS) $(CXXFLAGS)
# accepts(flags), links(library): "yes" if the compiler takes these. Evaluated at use, as `make setup` may install them.
accepts    = $(shell $(CXX) $(USER_CXX) $(1) -x c++ -E /dev/null >/dev/null 2>&1 && echo yes)
links      = $(shell $(CXX) $(USER_CXX) -x c++ - -o /dev/null $(LDFLAGS) $(1) <<< 'int main() {}' 2>/dev/null && \
                     echo yes)
# A cross compiler does not accept "native".
MARCH     ?= $(if $(call accepts,-march=native),native)
TARGET     = $(addprefix -march=,$(MARCH))
AVX512     = $(shell $(CXX) $(TARGET) $(USER_CXX) -x c++ -dM -E /dev/null 2>/dev/null | grep -o __AVX512F__)
# A loop over a pack has 16 iterations. g++ would unroll it completely and then not recognise a vector operation.
AS_LOOPS  := $(shell $(CXX) --version 2>/dev/null | grep -qi clang || echo --param max-completely-peel-times=15)
VECTORS    = -O3 $(TARGET) -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math \
             -freciprocal-math $(AS_LOOPS) $(if $(AVX512),-mprefer-vector-width=512)
WARNINGS  := -Wall -Wextra -Wno-unknown-pragmas
ONEDNN    ?= $(and $(call accepts,-include oneapi/dnnl/dnnl.hpp),$(call links,-ldnnl))
CPU_FLAGS  = -x c++ -std=c++17 $(WARNINGS) -fopenmp -Idev/cpu $(if $(filter yes,$(ONEDNN)),-DHAVE_ONEDNN)
CPU_LIBS   = $(if $(filter yes,$(ONEDNN)),-ldnnl) -lboost_context -lpcre2-8 -lpthread

# The GPU build, for this machine's GPU; without one for Ampere, Ada and Hopper, in FP16 also for Turing.
ARCHS      := $(if $(CAPABILITY),$(patsubst 90,90a,$(CAPABILITY)),$(if $(filter fp16,$(PRECISION)),75) 80 89 90a)
comma      := ,
# 89 also as PTX, which the driver compiles for later GPUs.
GENCODE    := $(foreach a,$(ARCHS),-gencode=arch=compute_$a,code=sm_$a) \
              $(addprefix -gencode=arch=compute_89$(comma)code=compute_,$(filter 89,$(ARCHS)))
GPU_FLAGS  := -std=c++17 -O3 -lineinfo -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas
USER_NVCC   = $(addprefix -Xcompiler ,$(CPPFLAGS) $(CXXFLAGS) $(LDFLAGS))
# -rpath: the program finds the toolkit's libraries even if the loader is not configured for them.
CUDA_LIB    = $(firstword $(wildcard $(patsubst %/bin/nvcc,%/lib64,$(NVCC)) $(patsubst %/bin/nvcc,%/lib,$(NVCC))))
GPU_LIBS    = -lcublasLt -lcublas -lpcre2-8 -lpthread $(if $(CUDA_LIB),-Xlinker -rpath -Xlinker $(CUDA_LIB))

# Several GPUs: NCCL, from NCCL=DIR, the system, the toolkit or PyPI's wheel. dev/cpu emulates it on a CPU.
NCCL_WHEEL  = $(shell python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
NCCL_HEADER = $(firstword $(wildcard $(addsuffix /include/nccl.h,$(or $(NCCL),/usr /usr/local $(NVCC:%/bin/nvcc=%) \
                $(NCCL_WHEEL)))))
NCCL_FLAGS  = $(if $(NCCL_HEADER),-DHAVE_NCCL -I$(dir $(NCCL_HEADER)))
NCCL_DIR    = $(filter-out /usr,$(NCCL_HEADER:%/include/nccl.h=%))
# Its rpath comes before the toolkit's, which may have another NCCL.
NCCL_LIBS   = $(if $(NCCL_DIR),-L$(NCCL_DIR)/lib -Xlinker -rpath -Xlinker $(NCCL_DIR)/lib) \
              $(if $(NCCL_HEADER),$(if $(wildcard $(NCCL_DIR)/lib/libnccl.so.2),-l:libnccl.so.2,-lnccl))

# ---- build and run ------------------------------------------------------------------------------

USUALLY_train_gpt := , which usually takes 40 s on one core
USUALLY_test_gpt  := , which usually takes 60 s on one core
# compile(source, program, precision, width or "gpu", further flags); links the objects among the prerequisites.
define compile
@mkdir -p $(dir $(2)); echo "compiling $(2)$(USUALLY_$(basename $(notdir $(1))))"
$(if $(filter gpu,$(4)),$(NVCC) $(GPU_FLAGS) $(GENCODE) $(DEFINE_$(3)) $(5) $(NCCL_FLAGS) $(USER_NVCC) $(1) \
  $(filter %.o,$^) -o $(2) $(NCCL_LIBS) $(GPU_LIBS),\
$(CXX) $(CPU_FLAGS) $(5) -DWARP_SIZE=$(4) $(DEFINE_$(3)) $(USER_CXX) $(1) -x none \
  $(filter %.o,$^) -o $(2) $(LDFLAGS) $(CPU_LIBS))
endef

BUILD    := build/$(DEVICE)-$(PRECISION)
TEST_DIR ?= build/test
HEADERS  := $(wildcard dev/cpu/*.h dev/cpu/*/*.h gpt/*.h gpt/*.cuh dev/*/*.cuh dev/tests/*.h) Makefile dev/Makefile

# Modules of gpt/ without CUDA are compiled once for all builds, the emulator's cuBLASLt once for all CPU builds.
HOST         ?= build/host
host_objects  = $(patsubst gpt/%.cpp,$(1)/%.o,$(wildcard gpt/*.cpp))
HOST_OBJECTS := $(call host_objects,$(HOST))
CPU_OBJECTS  := $(HOST_OBJECTS) $(HOST)/cublasLt.o
compile_host  = $(CXX) -std=c++17 $(WARNINGS) $(1) $(USER_CXX) -c $< -o $@
$(HOST)/%.o: gpt/%.cpp $(wildcard gpt/*.h) $(HOST)/flags | setup
	$(call compile_host,-O2)

# quoted(text): text as one word of the shell.
quoted = '$(subst ','"'"',$(1))'
# DIR/flags holds the command with which DIR's programs are compiled. They are rebuilt when it changes.
CPU_WORDS = $(CXX) $(CPU_FLAGS) $(VECTORS) $(USER_CXX) $(LDFLAGS) $(CPU_LIBS)
GPU_WORDS = $(NVCC) $(GPU_FLAGS) $(GENCODE) $(NCCL_FLAGS) $(NCCL_LIBS) $(USER_NVCC)
WORDS     = $(CPU_WORDS)
build/gpu-%/flags: WORDS = $(GPU_WORDS)
%/flags: FORCE | setup
	@mkdir -p $(@D); new=$@.$$$$; echo $(call quoted,$(WORDS)) > $$new; \
	    if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi
.PRECIOUS: %/flags %/cublasLt.o
# The emulator's cuBLASLt
%/cublasLt.o: dev/cpu/cublasLt.cpp $(wildcard dev/cpu/*.h) %/flags | setup
	$(CXX) $(CPU_FLAGS) $(VECTORS) $(USER_CXX) -c $< -o $@
FORCE:

.PHONY: all setup run test help clean FORCE
all: setup $(BUILD)/train_gpt
	@ln -sf $(BUILD)/train_gpt train_gpt
	@echo "./train_gpt is the $(DEVICE) build: $(REASON); in $(PRECISION): $(WHY_PRECISION)"

setup:
	@CXX=$(call quoted,$(strip $(CXX) $(USER_CXX) $(LDFLAGS))) scripts/setup.sh $(DEVICE) \
	    $(if $(filter no,$(ONEDNN)),without-onednn)

build/gpu-%/train_gpt: train_gpt.cu $(HEADERS) $(HOST_OBJECTS) build/gpu-%/flags | setup
	$(call compile,$<,$@,$*,gpu)
build/cpu-%/train_gpt: train_gpt.cu $(HEADERS) $(CPU_OBJECTS) build/cpu-%/flags | setup
	$(call compile,$<,$@,$*,1,$(VECTORS))

DATA ?= data/shakespeare.txt
# About a minute on 2 CPU cores. In that time a small model that sees much text learns more than a large one.
RUN_OPTIONS ?= --layers 2 --heads 4 --channels 128 --context 64 --micro-batch 8 --steps 4500 --lr 4e-3 --min-lr 1e-4 \
               --warmup 50 --beta2 0.99 --eval-every 2250 --eval-sequences 0 --sample-every 2250 \
               --sample-tokens 300 --temperature 0.8
run: all
	./train_gpt train --data '$(DATA)' $(RUN_OPTIONS) --out runs/$$(date +%Y%m%d-%H%M%S)

# ---- test ---------------------------------------------------------------------------------------

# What `make test` runs: one program at width 32 (a warp has 32 threads, as on a GPU) and one at width 1 (as in the CPU
# build). QUICK_NAME selects tests of program NAME by how their names begin, separated by commas; empty: all tests.
# `make test-all` runs everything.
TESTS ?= $(TEST_DIR)/bf16-32/test_gpt $(TEST_DIR)/fp32-1/test_gpt
QUICK_bf16-32 ?= $(MODEL_PARTS),initial weights,shards,model in FP8,runs: the same bits,runs: FP8
QUICK_fp32-1  ?=
test:
	$(call run_tests,QUICK,$(TESTS))

clean:
	rm -rf build train_gpt

help:
	@sed -n '1,4s/^# //p' Makefile; sed -n 's/^## //p' dev/Makefile

include dev/Makefile
