# gpt.cu
#   make                 build ./train_gpt for this machine
#   make run             train a small GPT on Shakespeare; DATA=FILE: on that text
#   make test            run the tests; ONLY="kernels,plan": by name prefix
#   make dev             compile in half the time, for changes: build/dev/train_gpt
#   make debug           build/debug/train_gpt, for gdb
#   make kernels         each layer from naive to final kernel; KERNEL=matmul: one
#   make inspect         profile and race-check on the CPU; FILE=mine.cu: your own
#   make puzzle          write kernels: the next of twenty puzzles; P=7: puzzle 7
#   make fork            train another model, such as F=llama, in a copy
#   make book            the code with notes: build/book/index.html
#   make playbook        claims of the Ultra-Scale Playbook, measured here
#   make bench           speed on this CPU, and PyTorch's if it is installed
#   make gpu-kit         a folder with tests and benchmarks for a GPU node without root
#   make clean           delete build/ and ./train_gpt
#   make help-all        all commands, and variables of every command

SHELL = /bin/bash
.DEFAULT_GOAL := all

# ---- device and precision -----------------------------------------------------------------------

# nvidia_smi(property, pattern): a property of the first GPU. Empty if the driver does not answer: then nvidia-smi
# exits with an error and prints a message instead of the property.
nvidia_smi = $(shell output=$$(nvidia-smi --query-gpu=$(1) --format=csv,noheader 2>/dev/null) && \
                     head -n 1 <<< "$$output" | grep -xE '$(2)')
GPU_NAME := $(call nvidia_smi,name,.+)
NVCC     := $(if $(TOOLKIT),$(TOOLKIT)/bin/nvcc,$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null))

ifdef DEVICE
  DEVICE_REASON := set by DEVICE=$(DEVICE)
else ifeq ($(NVCC),)
  DEVICE := cpu
  DEVICE_REASON := no nvcc was found
else ifeq ($(GPU_NAME),)
  DEVICE := cpu
  DEVICE_REASON := no GPU was found
else
  DEVICE := gpu
  DEVICE_REASON := nvcc and $(GPU_NAME) were found
endif
ifeq ($(filter $(DEVICE),gpu cpu),)
  $(error DEVICE=$(DEVICE): expected gpu or cpu)
endif

# The GPU's compute capability, such as 90; empty without a GPU.
CAPABILITY := $(subst .,,$(call nvidia_smi,compute_cap,[0-9]+\.[0-9]))
# FP16 on GPUs before Ampere, BF16 on later ones. On a CPU: BF16 if it has BF16 matrix instructions, otherwise FP32.
FAST_BF16 := $(shell grep -owE -m 1 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null | head -n 1)
ifdef PRECISION
  PRECISION_REASON := set by PRECISION=$(PRECISION)
else ifeq ($(DEVICE)$(filter 6% 7%,$(CAPABILITY)),gpu)
  PRECISION := bf16
  PRECISION_REASON := the default on Ampere and later GPUs
else ifeq ($(DEVICE),gpu)
  PRECISION := fp16
  PRECISION_REASON := this GPU has no BF16 tensor cores
else ifeq ($(FAST_BF16),)
  PRECISION := fp32
  PRECISION_REASON := this processor has neither avx512_bf16 nor amx_bf16
else ifeq ($(ONEDNN),no)
  PRECISION := fp32
  PRECISION_REASON := $(FAST_BF16) is used only with oneDNN
else
  PRECISION := bf16
  PRECISION_REASON := this processor has $(FAST_BF16)
endif
PRECISIONS := bf16 fp16 fp32
ifeq ($(filter $(PRECISION),$(PRECISIONS)),)
  $(error PRECISION=$(PRECISION): expected one of $(PRECISIONS))
endif
DEFINE_bf16 := -DPRECISION_BF16
DEFINE_fp16 := -DPRECISION_FP16

# ---- flags --------------------------------------------------------------------------------------

# Libraries that scripts/setup.sh unpacks for users who may not install packages.
DEPS := $(CURDIR)/build/deps
export CPLUS_INCLUDE_PATH := $(DEPS)/include$(addprefix :,$(CPLUS_INCLUDE_PATH))
export LIBRARY_PATH       := $(DEPS)/lib$(addprefix :,$(LIBRARY_PATH))
export LD_RUN_PATH        := $(DEPS)/lib$(addprefix :,$(LD_RUN_PATH))
# $(shell) does not export variables.
WITH_DEPS := CPLUS_INCLUDE_PATH='$(CPLUS_INCLUDE_PATH)' LIBRARY_PATH='$(LIBRARY_PATH)'

# The CPU build. NaN and infinity keep their meaning. The compiler may reorder sums, which lets it vectorise loops over
# a row. The order is fixed at compile time.
CXX       ?= g++
USER_CXX   = $(CPPFLAGS) $(CXXFLAGS)
# accepts(flags), links(library): "yes" if the compiler accepts them. Evaluated at use: `make setup` may install them.
accepts    = $(shell $(WITH_DEPS) $(CXX) $(USER_CXX) $(1) -x c++ -E /dev/null >/dev/null 2>&1 && echo yes)
links      = $(shell $(WITH_DEPS) $(CXX) $(USER_CXX) -x c++ - -o /dev/null $(LDFLAGS) $(1) <<< 'int main() {}' \
                     2>/dev/null && echo yes)
# Cross compilers do not accept "native".
MARCH     ?= $(if $(call accepts,-march=native),native)
TARGET     = $(addprefix -march=,$(MARCH))
AVX512     = $(shell $(CXX) $(TARGET) $(USER_CXX) -x c++ -dM -E /dev/null 2>/dev/null | grep -o __AVX512F__)
IS_GXX    := $(shell $(CXX) --version 2>/dev/null | grep -qi clang || echo yes)
# A loop over a pack has up to 16 iterations. g++ would unroll it completely and then not vectorise it.
AS_LOOPS  := $(if $(IS_GXX),--param max-completely-peel-times=15)
# g++ frees its own memory rarely: it compiles 15 % faster and needs 1.4 instead of 1.1 GB.
KEEP_MEMORY := $(if $(IS_GXX),--param ggc-min-expand=400)
VECTORS    = -O3 $(TARGET) -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math \
             -freciprocal-math $(AS_LOOPS) $(if $(AVX512),-mprefer-vector-width=512)
WARNINGS  := -Wall -Wextra -Wno-unknown-pragmas
ONEDNN    ?= $(and $(call accepts,-include oneapi/dnnl/dnnl.hpp),$(call links,-ldnnl))
CPU_FLAGS  = -x c++ -std=c++17 $(WARNINGS) $(KEEP_MEMORY) -fopenmp -Idev/cpu $(if $(filter yes,$(ONEDNN)),-DHAVE_ONEDNN)
CPU_LIBS   = $(if $(filter yes,$(ONEDNN)),-ldnnl) -lboost_context -lpcre2-8 -lpthread

# The GPU build targets this machine's GPU. Without a GPU: Ampere, Ada and Hopper, and in FP16 also Turing.
ARCHS      := $(if $(CAPABILITY),$(patsubst 90,90a,$(CAPABILITY)),$(if $(filter fp16,$(PRECISION)),75) 80 89 90a)
comma      := ,
# sm_89 also as PTX, which the driver compiles for later GPUs.
GENCODE    := $(foreach a,$(ARCHS),-gencode=arch=compute_$a,code=sm_$a) \
              $(addprefix -gencode=arch=compute_89$(comma)code=compute_,$(filter 89,$(ARCHS)))
GPU_FLAGS  := -std=c++17 -O3 -lineinfo -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas
USER_NVCC   = $(addprefix -Xcompiler ,$(CPPFLAGS) $(CXXFLAGS) $(LDFLAGS))
# -rpath: the program finds the toolkit's libraries even if ldconfig does not list them.
CUDA_LIB    = $(firstword $(wildcard $(patsubst %/bin/nvcc,%/lib64,$(NVCC)) $(patsubst %/bin/nvcc,%/lib,$(NVCC))))
PCRE2      := -lpcre2-8
GPU_LIBS    = -lcublasLt -lcublas $(PCRE2) -lpthread \
              $(if $(CUDA_LIB),-Xlinker -rpath -Xlinker $(CUDA_LIB):$(DEPS)/lib)

# NCCL for several GPUs: from NCCL=DIR, the system, the toolkit or PyPI's wheel, in this order. dev/cpu emulates it.
NCCL_WHEEL  = $(shell python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)
NCCL_HEADER = $(firstword $(wildcard $(addsuffix /include/nccl.h,$(or $(NCCL),/usr /usr/local $(NVCC:%/bin/nvcc=%) \
                $(NCCL_WHEEL)))))
NCCL_FLAGS  = $(if $(NCCL_HEADER),-DHAVE_NCCL -I$(dir $(NCCL_HEADER)))
NCCL_DIR    = $(filter-out /usr,$(NCCL_HEADER:%/include/nccl.h=%))
# NCCL's rpath precedes the toolkit's, because the toolkit may contain another NCCL.
NCCL_LIBS   = $(if $(NCCL_DIR),-L$(NCCL_DIR)/lib -Xlinker -rpath -Xlinker $(NCCL_DIR)/lib) \
              $(if $(NCCL_HEADER),$(if $(wildcard $(NCCL_DIR)/lib/libnccl.so.2),-l:libnccl.so.2,-lnccl))

# ---- build and run ------------------------------------------------------------------------------

DURATION_train_gpt := , about 40 s on one core
DURATION_test_gpt  := , about 60 s on one core
# compile(source, program, precision, warp width or "gpu", additional flags): also links the .o files among the
# prerequisites.
define compile
@mkdir -p $(dir $(2)); echo "compiling $(2)$(DURATION_$(basename $(notdir $(1))))"
$(if $(filter gpu,$(4)),$(NVCC) $(GPU_FLAGS) $(GENCODE) $(DEFINE_$(3)) $(5) $(NCCL_FLAGS) $(USER_NVCC) $(1) \
  $(filter %.o,$^) -o $(2) $(NCCL_LIBS) $(GPU_LIBS),\
$(CXX) $(CPU_FLAGS) $(5) -DWARP_SIZE=$(4) $(DEFINE_$(3)) $(USER_CXX) $(1) -x none \
  $(filter %.o,$^) -o $(2) $(LDFLAGS) $(CPU_LIBS))
endef

BUILD    := build/$(DEVICE)-$(PRECISION)
TEST_DIR ?= build/test
HEADERS  := $(wildcard dev/cpu/*.h dev/cpu/*/*.h gpt/*.h gpt/*.cuh dev/*/*.cuh dev/tests/*.h) Makefile dev/Makefile

# The host modules of gpt/ are compiled once for all builds, the emulator's cuBLASLt once for all CPU builds.
HOST         ?= build/host
HOST_FLAGS   ?= -O2
host_objects  = $(patsubst gpt/%.cpp,$(1)/%.o,$(wildcard gpt/*.cpp))
HOST_OBJECTS := $(call host_objects,$(HOST))
CPU_OBJECTS  := $(HOST_OBJECTS) $(HOST)/cublasLt.o
compile_host  = $(CXX) -std=c++17 $(WARNINGS) $(1) $(USER_CXX) -c $< -o $@
$(HOST)/%.o: gpt/%.cpp $(wildcard gpt/*.h) $(HOST)/flags | setup
	$(call compile_host,$(HOST_FLAGS))

# quoted(text): text quoted as one word for the shell.
quoted = '$(subst ','"'"',$(1))'
# DIR/flags holds the command that compiles DIR's programs. When the command changes, they are rebuilt.
CPU_COMMAND = $(CXX) $(CPU_FLAGS) $(VECTORS) $(USER_CXX) $(LDFLAGS) $(CPU_LIBS)
GPU_COMMAND = $(NVCC) $(GPU_FLAGS) $(GENCODE) $(NCCL_FLAGS) $(NCCL_LIBS) $(USER_NVCC)
COMMAND     = $(CPU_COMMAND)
build/gpu-%/flags: COMMAND = $(GPU_COMMAND)
%/flags: FORCE | setup
	@mkdir -p $(@D); new=$@.$$$$; echo $(call quoted,$(COMMAND)) > $$new; \
	    if cmp -s $$new $@; then rm $$new; else mv $$new $@; fi
.PRECIOUS: %/flags %/cublasLt.o
# The emulator's cuBLASLt
%/cublasLt.o: dev/cpu/cublasLt.cpp $(wildcard dev/cpu/*.h) %/flags | setup
	$(CXX) $(CPU_FLAGS) $(VECTORS) $(USER_CXX) -c $< -o $@
FORCE:

.PHONY: all setup run test help help-all clean FORCE
all: setup $(BUILD)/train_gpt
	@ln -sf $(BUILD)/train_gpt train_gpt
	@echo "./train_gpt: $(DEVICE) build in $(PRECISION) ($(DEVICE_REASON); $(PRECISION_REASON))"

setup:
	@CXX=$(call quoted,$(strip $(CXX) $(USER_CXX) $(LDFLAGS))) scripts/setup.sh $(DEVICE) \
	    $(if $(filter no,$(ONEDNN)),without-onednn)

build/gpu-%/train_gpt: train_gpt.cu $(HEADERS) $(HOST_OBJECTS) build/gpu-%/flags | setup
	$(call compile,$<,$@,$*,gpu)
build/cpu-%/train_gpt: train_gpt.cu $(HEADERS) $(CPU_OBJECTS) build/cpu-%/flags | setup
	$(call compile,$<,$@,$*,1,$(VECTORS))

DATA ?= data/shakespeare.txt
# One to five minutes on 2 CPU cores. In this time a small model reaches a lower loss than a large one: it sees more
# text.
RUN_OPTIONS ?= --layers 2 --heads 4 --channels 128 --context 64 --micro-batch 8 --steps 4500 --lr 4e-3 --min-lr 1e-4 \
               --warmup 50 --beta2 0.99 --eval-every 2250 --eval-sequences 0 --sample-every 2250 \
               --sample-tokens 300 --temperature 0.8
run: all
	./train_gpt train --data '$(DATA)' $(RUN_OPTIONS) --out runs/$$(date +%Y%m%d-%H%M%S)

test:
	$(call run_tests,QUICK,$(TESTS))

clean:
	rm -rf build train_gpt

help help-all:
	@for file in Makefile $(if $(filter help-all,$@),dev/Makefile); do sed '/^$$/q; s/^# \{0,1\}//' $$file; done

include dev/Makefile
