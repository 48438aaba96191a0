# make            builds ./train_gpt for this machine
# make run        builds it and trains a small GPT on Shakespeare; DATA=file.txt: on that
# make test       builds the tests and runs them
# make help       the other targets
#
# DEVICE=gpu|cpu, PRECISION=bf16|fp16|fp32 and MULTI=yes|no (for many GPUs, with MPI and NCCL; NCCL=DIR: where that is)
# choose otherwise than the machine suggests; so do CXX, MARCH (after -march=), ONEDNN=no, and CPPFLAGS, CXXFLAGS and LDFLAGS,
# which come after ours.

SHELL = /bin/bash
.DEFAULT_GOAL := all

# ---- which build --------------------------------------------------------------------------------

# nvidia_smi(property, pattern): what it says of the first card. A driver that does not answer makes it fail, with its
# complaint where the answer should be.
nvidia_smi = $(shell said=$$(nvidia-smi --query-gpu=$(1) --format=csv,noheader 2>/dev/null) && \
                     head -n 1 <<< "$$said" | grep -xE '$(2)')
GPU_NAME := $(call nvidia_smi,name,.+)
# TOOLKIT=DIR: the CUDA toolkit in DIR, not the machine's.
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

# Of the GPU that is there; nothing where none is.
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

# ---- how to compile -----------------------------------------------------------------------------

# The CPU build. NaN and infinity keep their meaning; sums may be reordered, once and for all at
# compile time, so that loops over a row become vector instructions.
CXX       ?= g++
USER_CXX   = $(CPPFLAGS) $(CXXFLAGS)
# Whether the compiler takes some flags, and links a library. They are asked when it matters: set-up may just have
# installed what is asked for.
accepts    = $(shell $(CXX) $(USER_CXX) $(1) -x c++ -E /dev/null >/dev/null 2>&1 && echo yes)
links      = $(shell $(CXX) $(USER_CXX) -x c++ - -o /dev/null $(LDFLAGS) $(1) <<< 'int main() {}' 2>/dev/null && \
                     echo yes)
# A compiler for another processor than this one does not know "native".
MARCH     ?= $(if $(call accepts,-march=native),native)
TARGET     = $(addprefix -march=,$(MARCH))
AVX512     = $(shell $(CXX) $(TARGET) $(USER_CXX) -x c++ -dM -E /dev/null 2>/dev/null | grep -o __AVX512F__)
# A loop over a pack has 16 turns. g++ would write them out one by one and then miss that they are one vector.
AS_LOOPS  := $(shell $(CXX) --version 2>/dev/null | grep -qi clang || echo --param max-completely-peel-times=15)
VECTORS    = -O3 $(TARGET) -fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math \
             -freciprocal-math $(AS_LOOPS) $(if $(AVX512),-mprefer-vector-width=512)
WARNINGS  := -Wall -Wextra -Wno-unknown-pragmas
ONEDNN    ?= $(and $(call accepts,-include oneapi/dnnl/dnnl.hpp),$(call links,-ldnnl))
CPU_FLAGS  = -x c++ -std=c++17 $(WARNINGS) -fopenmp -Idev/cpu $(if $(filter yes,$(ONEDNN)),-DHAVE_ONEDNN) \
             $(and $(MULTI_ON),$(MULTI_FLAGS))
CPU_LIBS   = $(if $(filter yes,$(ONEDNN)),-ldnnl) -lboost_context -lpcre2-8 -lpthread $(and $(MULTI_ON),$(MPI_LIBS))

# The GPU build, for the card that is there, else for Ampere, Ada and Hopper, and in FP16 for Turing.
ARCHS      := $(if $(CAPABILITY),$(patsubst 90,90a,$(CAPABILITY)),$(if $(filter fp16,$(PRECISION)),75) 80 89 90a)
comma      := ,
# With 89 also as PTX, from which the driver makes code for cards that are newer than all of these.
GENCODE    := $(foreach a,$(ARCHS),-gencode=arch=compute_$a,code=sm_$a) \
              $(addprefix -gencode=arch=compute_89$(comma)code=compute_,$(filter 89,$(ARCHS)))
GPU_FLAGS  := -std=c++17 -O3 -lineinfo -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas
# Where only what nvcc makes of kernels is looked at: optimising the code around them is half of the time.
GPU_CHECKS := -Werror all-warnings -Xcompiler -O0
USER_NVCC   = $(addprefix -Xcompiler ,$(CPPFLAGS) $(CXXFLAGS) $(LDFLAGS))
# The toolkit's libraries are found when the program starts, even if the loader does not know them.
CUDA_LIB    = $(firstword $(wildcard $(patsubst %/bin/nvcc,%/lib64,$(NVCC)) $(patsubst %/bin/nvcc,%/lib,$(NVCC))))
GPU_LIBS    = -lcublasLt -lcublas -lpcre2-8 -lpthread $(if $(CUDA_LIB),-Xlinker -rpath -Xlinker $(CUDA_LIB))

# For many GPUs: what MPI's compiler would add, and NCCL, for which dev/cpu stands in on a CPU.
MULTI      ?= auto
MPI_WORDS   = $(shell mpicc -show 2>/dev/null)
MPI_LIBS    = $(filter -L% -l% -Wl%,$(MPI_WORDS))
NCCL_HEADER = $(wildcard $(if $(NCCL),$(NCCL)/include/nccl.h,/usr/include/nccl.h /usr/local/include/nccl.h \
                $(patsubst %/bin/nvcc,%/include/nccl.h,$(NVCC))))
MULTI_FLAGS = -DMULTI -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX $(filter -I%,$(MPI_WORDS))
NCCL_LIBS   = $(if $(NCCL),-L$(NCCL)/lib -l:libnccl.so.2 -Xlinker -rpath -Xlinker $(NCCL)/lib,-lnccl)
NOT_MULTI   = $(strip $(if $(MPI_WORDS),,MPI) $(if $(filter gpu,$(DEVICE)),$(if $(NCCL_HEADER),,NCCL)))
MULTI_ON    = $(if $(filter yes,$(MULTI)),yes,$(if $(filter auto,$(MULTI)),$(if $(NOT_MULTI),,yes)))
MULTI_GPU   = $(and $(MULTI_ON),$(NCCL_HEADER))
GPU_MULTI   = $(if $(MULTI_GPU),$(MULTI_FLAGS) $(addprefix -I,$(dir $(firstword $(NCCL_HEADER)))))
GPU_MULTI_LIBS = $(if $(MULTI_GPU),$(NCCL_LIBS) $(subst -Wl$(comma),-Xlinker ,$(MPI_LIBS)))
ifeq ($(filter $(MULTI),yes no auto),)
  $(error MULTI takes yes, no or auto, found '$(MULTI)')
endif

# compile(source, program, precision, width or "gpu", further flags)
define compile
@mkdir -p $(dir $(2))
$(if $(filter gpu,$(4)),$(NVCC) $(GPU_FLAGS) $(GENCODE) $(DEFINE_$(3)) $(5) $(GPU_MULTI) $(USER_NVCC) $(1) -o $(2) $(GPU_LIBS) $(GPU_MULTI_LIBS),\
$(CXX) $(CPU_FLAGS) $(5) -DWARP_SIZE=$(4) $(DEFINE_$(3)) $(USER_CXX) $(1) -o $(2) $(LDFLAGS) $(CPU_LIBS))
endef

BUILD    := build/$(DEVICE)-$(PRECISION)
TEST_DIR ?= build/test
HEADERS := $(wildcard dev/cpu/*.h dev/cpu/*/*.h gpt/*.h gpt/*.cuh dev/*/*.cuh) Makefile

# A text as one word of the shell's.
quoted = '$(subst ','"'"',$(1))'
# What a folder's programs are compiled with: they are compiled anew when that changes.
CPU_WORDS = $(CXX) $(CPU_FLAGS) $(VECTORS) $(USER_CXX) $(LDFLAGS) $(CPU_LIBS)
GPU_WORDS = $(NVCC) $(GPU_FLAGS) $(GENCODE) $(GPU_MULTI) $(USER_NVCC)
$(BUILD)/flags: WORDS = $(if $(filter gpu,$(DEVICE)),$(GPU_WORDS),$(CPU_WORDS))
$(TEST_DIR)/flags build/asan/flags: WORDS = $(CPU_WORDS)
build/debug/flags: WORDS = $(CPU_WORDS) $(PRECISION)
$(BUILD)/flags $(TEST_DIR)/flags build/asan/flags build/debug/flags: FORCE | setup
	@mkdir -p $(@D); echo $(call quoted,$(WORDS)) > $@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

# ---- build and run ------------------------------------------------------------------------------

.PHONY: all setup run debug fuzz test test-asan test-cards test-ports test-gpu test-gpu-sanitize test-hf check-cuda \
        kernels check-kernels reference bench bench-sampling bench-gpu chapter test-explorer test-faults test-many test-many-gpu require-multi inspect test-inspect clean help require-gpu require-sanitizer FORCE
all: setup $(BUILD)/train_gpt
	@ln -sf $(BUILD)/train_gpt train_gpt
	@echo "./train_gpt is the $(DEVICE) build: $(REASON); in $(PRECISION): $(WHY_PRECISION)"

setup:
	@CXX=$(call quoted,$(strip $(CXX) $(USER_CXX) $(LDFLAGS))) scripts/setup.sh $(DEVICE)$(if $(filter no,$(ONEDNN)), without-onednn)$(if $(filter yes,$(MULTI)), multi)

$(BUILD)/train_gpt: train_gpt.cu $(HEADERS) $(BUILD)/flags | setup
	$(call compile,$<,$@,$(PRECISION),$(if $(filter gpu,$(DEVICE)),gpu,1),$(if $(filter cpu,$(DEVICE)),$(VECTORS)))

# To step through a kernel in gdb: a warp of 32, nothing optimised away, 1 thread of the machine.
debug: build/debug/train_gpt
	@echo "OMP_NUM_THREADS=1 gdb --args build/debug/train_gpt ..."
build/debug/train_gpt: train_gpt.cu $(HEADERS) build/debug/flags | setup
	$(call compile,$<,$@,$(PRECISION),32,-g -O0)

DATA ?= data/shakespeare.txt
# A minute or so on 2 CPU cores; a small model that has seen much learns more in that time than a large one.
RUN_OPTIONS ?= --layers 2 --heads 4 --channels 128 --context 64 --micro-batch 8 --steps 4500 --lr 4e-3 --min-lr 1e-4 \
               --warmup 50 --beta2 0.99 --eval-every 2250 --eval-sequences 0 --sample-every 2250 --sample-tokens 300 --temperature 0.8
run: all
	./train_gpt train --data '$(DATA)' $(RUN_OPTIONS) --out runs/$$(date +%Y%m%d-%H%M%S)

# ---- tests --------------------------------------------------------------------------------------
# Width 32 is what a GPU does; width 1 is what a CPU runs.

# The longest first, so that the last ones to run are short.
TESTS := $(addprefix $(TEST_DIR)/,bf16-32/test_gpt fp32-32/test_gpt fp16-32/test_gpt bf16-1/test_gpt fp32-1/test_gpt \
                                  cpu-32/test_cpu cpu-1/test_cpu text/test_tokenizer)
test_width = $(lastword $(subst -, ,$(notdir $(patsubst %/,%,$(dir $(1))))))
test_kind  = $(firstword $(subst -, ,$(notdir $(patsubst %/,%,$(dir $(1))))))
TEST_FLAGS_1  = $(VECTORS)
TEST_FLAGS_32 = -O2 $(TARGET)
$(TEST_DIR)/%/test_gpt: test_gpt.cu train_gpt.cu $(HEADERS) $(TEST_DIR)/flags | setup
	$(call compile,$<,$@,$(call test_kind,$@),$(call test_width,$@),$(TEST_FLAGS_$(call test_width,$@)))
$(TEST_DIR)/%/test_cpu: dev/cpu/test_cpu.cpp $(HEADERS) $(TEST_DIR)/flags | setup
	$(call compile,$<,$@,,$(call test_width,$@),-O2 $(TARGET))
compile_text = @mkdir -p $(@D); $(CXX) -std=c++17 $(WARNINGS) $(1) $(USER_CXX) $< -o $@ $(LDFLAGS) -lpcre2-8
$(TEST_DIR)/text/test_tokenizer: dev/tests/test_tokenizer.cpp gpt/tokenizer.h gpt/json.h $(TEST_DIR)/flags | setup
	$(call compile_text,-O2)

SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
build/asan/%/test_gpt: test_gpt.cu train_gpt.cu $(HEADERS) build/asan/flags | setup
	$(call compile,$<,$@,$(call test_kind,$@),$(call test_width,$@),$(SANITIZE))
build/asan/%/test_cpu: dev/cpu/test_cpu.cpp $(HEADERS) build/asan/flags | setup
	$(call compile,$<,$@,,$(call test_width,$@),$(SANITIZE))
build/asan/text/test_tokenizer: dev/tests/test_tokenizer.cpp gpt/tokenizer.h gpt/json.h build/asan/flags | setup
	$(call compile_text,$(SANITIZE))

build/test/gpu-%/test_gpt: test_gpt.cu train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,$*,gpu)

ASAN_TESTS := build/asan/bf16-32/test_gpt build/asan/fp32-1/test_gpt build/asan/cpu-32/test_cpu build/asan/text/test_tokenizer
GPU_TESTS  := $(addprefix build/test/gpu-,$(addsuffix /test_gpt,fp32 $(if $(filter 6% 7%,$(CAPABILITY)),,bf16) fp16))

# Runs a program and prints all that it has said when it ends. Two threads, which sleep while they wait: as the models
# are tiny, a machine's cores are better used by running programs side by side. TEST_RUNNER: words before the program.
LOGS := $(addsuffix .log,$(TESTS) $(ASAN_TESTS) $(GPU_TESTS))
$(LOGS): %.log: % FORCE
	@echo "== $<"; OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
	$(TEST_RUNNER) $< $(if $(or $(ONLY),$(PARTS)),--only '$(or $(ONLY),$(PARTS))') 2>&1 | tee $@; \
	echo "exit code $${PIPESTATUS[0]}" >> $@
$(addsuffix .log,$(ASAN_TESTS)): export ASAN_OPTIONS = detect_leaks=0
# The command line is the same in all precisions and at both widths. Under ASan, where warps of 32 are slow, the program
# that has warps of one runs it; otherwise one at each width does.
build/asan/bf16-32/test_gpt.log: PARTS = $(CARD_PARTS)
$(TEST_DIR)/fp32-32/test_gpt.log $(TEST_DIR)/fp16-32/test_gpt.log $(TEST_DIR)/bf16-1/test_gpt.log: PARTS = $(MODEL_PARTS)
$(addsuffix .log,$(ASAN_TESTS)): export UBSAN_OPTIONS = print_stacktrace=1
# The tests on cards that dev/cpu pretends to be: their limits, and work that is put off. Everything on the first of
# them, on the others what depends on the card.
CARDS           ?= h100 a100 4090
CARD_PRECISIONS ?= bf16
# And an old one, which FP16 is for.
OLD_CARDS       ?= fp16-32/test_gpt@t4
CARD_PARTS      ?= kernels,model against PyTorch,memory,tensor cores,graphs
MODEL_PARTS     := $(CARD_PARTS),loss scaling,plan:,naive attention in,folders,windows,loader,evaluation,HellaSwag,schedule,samp,lines,words
CARD_TESTS      := $(foreach p,$(CARD_PRECISIONS),$(CARDS:%=$(TEST_DIR)/$p-32/test_gpt@%)) $(OLD_CARDS:%=$(TEST_DIR)/%)
$(addsuffix .log,$(CARD_TESTS)): $(sort $(foreach t,$(CARD_TESTS),$(firstword $(subst @, ,$t)))) FORCE
	@echo "== $(basename $@)"; OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
	CUDA_CPU_CARD=$(lastword $(subst @, ,$(basename $@))) $(firstword $(subst @, ,$@)) \
	$(if $(filter $(basename $@),$(firstword $(CARD_TESTS))),,--only '$(CARD_PARTS)') 2>&1 | tee $@; \
	echo "exit code $${PIPESTATUS[0]}" >> $@

# Damaged input for all readers, TIME seconds for each: by clang's libFuzzer. What it finds goes to build/fuzz/found.
TIME      ?= 60
FUZZ_CXX  ?= $(firstword $(foreach c,clang++ $(addprefix clang++-,22 21 20 19 18 17 16 15 14),$(shell command -v $c)))
FUZZ      := config weights moments index shard tuning prompt-tokens tokenizer questions log flags resume
build/fuzz/fuzz: dev/fuzz/fuzz.cpp dev/fuzz/ignored.txt train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,fp32,1,-g -O1 -fno-omit-frame-pointer -fsanitize=fuzzer$(comma)address$(comma)undefined -fno-sanitize-recover=undefined -fsanitize-ignorelist=dev/fuzz/ignored.txt)
fuzz:
	@[ -n "$(FUZZ_CXX)" ] || { echo "make fuzz needs clang with libFuzzer (apt: clang libclang-rt-dev libomp-dev); or FUZZ_CXX=..."; exit 2; }
	@$(MAKE) --no-print-directory CXX=$(FUZZ_CXX) ONEDNN=no build/fuzz/fuzz
	@export ASAN_OPTIONS=detect_leaks=0; FUZZ_SEEDS=build/fuzz/seeds build/fuzz/fuzz; \
	mkdir -p $(FUZZ:%=build/fuzz/corpus/%) build/fuzz/found; failed=; for target in $(FUZZ); do \
	    FUZZ_TARGET=$$target build/fuzz/fuzz -max_total_time=$(TIME) -timeout=5 -rss_limit_mb=4096 -max_len=100000 -dict=dev/fuzz/words.dict \
	        -verbosity=0 -print_final_stats=1 -artifact_prefix=build/fuzz/found/$$target- \
	        build/fuzz/corpus/$$target build/fuzz/seeds/$$target $$(ls -d dev/fuzz/cases/$$target 2>/dev/null) \
	        > build/fuzz/$$target.log 2>&1 && verdict=ok || { verdict=FAILED; failed=yes; }; \
	    printf '%-7s %-14s %10d inputs\n' $$verdict $$target \
	        "$$(sed -n 's/^stat::number_of_executed_units: *//p' build/fuzz/$$target.log)"; \
	    [ $$verdict = ok ] || tail -n 30 build/fuzz/$$target.log; \
	done; [ -z "$$failed" ]

# There is one GPU: one program after the other.
build/test/gpu-bf16/test_gpt.log: | build/test/gpu-fp32/test_gpt.log
build/test/gpu-fp16/test_gpt.log: | $(filter-out build/test/gpu-fp16/%,$(GPU_TESTS:=.log))

# Builds and runs programs that close with "N passed, N failed", as many at a time as the machine has cores where make's
# -j does not say how many, and adds those lines up.
SIDE_BY_SIDE = $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell nproc)) --output-sync=target
define run_tests
@echo "$(words $(1)) programs are built and run side by side; what one says comes when it ends"
@$(MAKE) --no-print-directory $(SIDE_BY_SIDE) $(addsuffix .log,$(1))
@$(about)
@status=0; passed=0; failed=0; \
for program in $(1); do \
    line=$$(grep -E '^[0-9]+ passed, [0-9]+ failed' $$program.log | tail -n 1); \
    [ "$$(tail -n 1 $$program.log)" = "exit code 0" ] || status=1; \
    [ -n "$$line" ] || { echo "$$program did not finish"; status=1; line="0 passed, 1 failed"; }; \
    set -- $$line; passed=$$((passed + $$1)); failed=$$((failed + $$3)); \
done; \
echo "== all"; echo "$$passed passed, $$failed failed"; exit $$status
endef

# What the tests ran on.
ONEDNN_VERSION = $(shell $(CXX) $(USER_CXX) -x c++ -include oneapi/dnnl/dnnl_version.h -E -dM /dev/null 2>/dev/null | \
    awk '/DNNL_VERSION_(MAJOR|MINOR|PATCH) / { v[$$2] = $$3 } \
         END { print v["DNNL_VERSION_MAJOR"] "." v["DNNL_VERSION_MINOR"] "." v["DNNL_VERSION_PATCH"] }')
define about
echo "== on"; \
echo "processor  $$(LC_ALL=C lscpu | sed -n 's/^Model name: *//p' | head -n 1), $$(nproc) cores"; \
echo "compiler   $$($(CXX) --version | head -n 1), $(or $(TARGET),for the processor that it takes)"; \
echo "oneDNN     $(if $(filter yes,$(ONEDNN)),$(ONEDNN_VERSION),none)"
endef

test:
	$(call run_tests,$(TESTS))
test-asan:
	$(call run_tests,$(ASAN_TESTS))
test-cards:
	$(call run_tests,$(CARD_TESTS))
test-gpu:
	$(call run_tests,$(GPU_TESTS))
test-ports:
	@scripts/portability.sh

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

PYTHON ?= python3
# Many GPUs, each a process: what they send, who watches over them, and training with 1 to 4 of them on this CPU.
MANY      := $(TEST_DIR)/many
RUN_RANKS := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 mpirun --oversubscribe --bind-to none
$(MANY)/test_nccl: dev/cpu/test_nccl.cpp $(HEADERS) $(TEST_DIR)/flags | setup
	$(call compile,$<,$@,,32,-O2 $(TARGET))
$(MANY)/test_watch: dev/tests/test_watch.cpp gpt/watch.h $(TEST_DIR)/flags | setup
	@mkdir -p $(@D); $(CXX) -std=c++17 -O2 $(WARNINGS) $(USER_CXX) $< -o $@ $(LDFLAGS) -lpthread
$(MANY)/train_gpt: train_gpt.cu $(HEADERS) $(TEST_DIR)/flags | setup
	$(call compile,$<,$@,fp32,1,$(TEST_FLAGS_1))
require-multi:
	@[ -n "$(MULTI_ON)" ] || { echo "this needs a build for many GPUs: MULTI=yes, with $(or $(NOT_MULTI),MPI)"; exit 2; }
test-many: require-multi $(MANY)/test_nccl $(MANY)/test_watch $(MANY)/train_gpt $(TEST_DIR)/bf16-32/test_gpt
	@status=0; for ranks in 1 2 3 4; do $(RUN_RANKS) -n $$ranks $(MANY)/test_nccl > $(MANY)/nccl-$$ranks.log 2>&1 || \
	    { grep -v '^ok' $(MANY)/nccl-$$ranks.log; status=1; }; echo "test_nccl, $$ranks ranks: $$(tail -n 1 $(MANY)/nccl-$$ranks.log)"; done; \
	$(MANY)/test_watch > $(MANY)/watch.log 2>&1 || { grep -v '^ok' $(MANY)/watch.log; status=1; }; echo "test_watch: $$(tail -n 1 $(MANY)/watch.log)"; \
	$(PYTHON) dev/tests/test_many.py --ours $(MANY)/train_gpt --card $(TEST_DIR)/bf16-32/test_gpt || status=1; exit $$status
# N: how many GPUs this machine has.
N ?= 2
test-many-gpu: require-gpu require-multi $(BUILD)/train_gpt
	$(PYTHON) dev/tests/test_many.py --ours $(BUILD)/train_gpt --ranks $$(seq 2 $(N)) --same-bits no

# A folder that we wrote, opened by safetensors and transformers.
test-hf: $(TEST_DIR)/fp32-1/test_gpt
	rm -rf build/hf && mkdir -p build/hf
	$< --export build/hf
	$(PYTHON) dev/reference/check_folder.py build/hf $(CHECK_FOLDER)

# Compiles for each card that we name, without warnings and without a register that spills; then reads what the
# assembler made of Hopper's kernels, and tests that reader by what it finds in spoilt copies of them.
CHECK_ARCHS      ?= 90a 80 89
CHECK_PRECISIONS ?= bf16 fp32
# FP16 is BF16's source, so two suffice: the oldest card, and all kernels that there are. In FP32 Ada has what Ampere has.
CHECK_FP16       ?= 75 90a
CUOBJDUMP        := $(or $(wildcard $(dir $(NVCC))cuobjdump),$(shell command -v cuobjdump))
WGMMA_KERNELS    := $(foreach k,forward backward_dq backward_dkv,attention_$(k)_wgmma_kernel)
CHECKED          := $(filter-out build/check/fp32-89.o,$(foreach p,$(CHECK_PRECISIONS),$(CHECK_ARCHS:%=build/check/$p-%.o))) \
                    $(CHECK_FP16:%=build/check/fp16-%.o)
define check_sass
set -- $@ --cuobjdump $(CUOBJDUMP); log=build/check/test_check_sass.log; \
$(PYTHON) dev/kernels/check_sass.py "$$@" --expect $(WGMMA_KERNELS) || exit 1; \
$(PYTHON) dev/kernels/test_check_sass.py "$$@" > $$log || { grep -A 20 FAILED $$log; exit 1; }; tail -n 1 $$log
endef
# check_arch, check_precision: of a target build/check/PRECISION-ARCH.o
check_arch      = $(lastword $(subst -, ,$(*F)))
check_precision = $(firstword $(subst -, ,$(*F)))
$(CHECKED): build/check/%.o: FORCE
	@mkdir -p $(@D); log=$(@:.o=.log); \
	$(NVCC) $(GPU_FLAGS) $(GPU_CHECKS) $(GPU_MULTI) -Xptxas -v $(DEFINE_$(check_precision)) \
	    -gencode=arch=compute_$(check_arch),code=sm_$(check_arch) -c train_gpt.cu -o $@ 2> $$log || { cat $$log; exit 1; }; \
	if grep -iE 'warning' $$log; then exit 1; fi; \
	if grep -E '[1-9][0-9]* bytes spill' $$log; then echo "a kernel spills registers"; exit 1; fi; \
	if grep 'Potential Performance Loss' $$log; then echo "wgmma or setmaxnreg does not do its part"; exit 1; fi; \
	echo "sm_$(check_arch) $(check_precision): $$(grep -c 'Used .* registers' $$log) kernels, none spills"; \
	$(if $(filter bf16-90a,$*),$(check_sass))
check-cuda:
	@[ -x "$(NVCC)" ] || { echo "check-cuda needs nvcc$(if $(NVCC),; found no $(NVCC))"; exit 2; }
	@command -v $(PYTHON) >/dev/null || { echo "check-cuda needs $(PYTHON)"; exit 2; }
	@[ -x "$(CUOBJDUMP)" ] || { echo "check-cuda needs cuobjdump, on PATH or beside $(NVCC). It comes with the toolkit;" \
	    "or: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, and CUOBJDUMP=..."; exit 2; }
	@$(NVCC) --version | grep release
	@$(MAKE) --no-print-directory $(SIDE_BY_SIDE) $(CHECKED)

# ---- studies ------------------------------------------------------------------------------------
# ---- inspect ------------------------------------------------------------------------------------
# What kernels do to memory, on a CPU: dev/inspect. KERNEL=layernorm_backward: one, line by line; FILE=mine.cu: a
# program of one's own (more files and its options: FILE="a.cu b.cu" ARGS="..."); CARD=h100; JSON=FILE; CHECK=yes;
# BARRIERS=yes: forgets each barrier in turn. INSPECT_OPTIONS: of train_gpt, such as "--model gpt2-xl --micro-batch 16".
# Instrumented as for -fsanitize=thread, whose library is not linked. Values stay as wide as they are accessed: no
# scalar replacement, and what was loaded is not looked for behind other stores. A program's functions become part of
# their caller, as on a GPU: arguments in memory, as in f(tile[i]) of a float4, are instrumented in no call. (The
# trainer's kernels have none, and it would take longer to compile.)
INSPECT_INLINE = -finline-functions -finline-small-functions --param max-inline-insns-auto=1000
INSPECT_DIR   := build/inspect
INSPECT_FLAGS  = -O1 -g $(TARGET) -fno-tree-vectorize -fno-tree-sra --param sccvn-max-alias-queries-per-access=0 \
                 -fsanitize=thread -Wno-tsan -DCUDA_CPU_INSPECT -DWARP_SIZE=32
CARD          ?= h100
$(INSPECT_DIR)/flags: WORDS = $(CPU_WORDS) $(INSPECT_FLAGS)
$(INSPECT_DIR)/flags: FORCE | setup
	@mkdir -p $(@D); echo $(call quoted,$(WORDS)) > $@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
$(INSPECT_DIR)/recorder.o: $(wildcard dev/inspect/*.cpp dev/inspect/*.h) dev/cpu/watch.h dev/cpu/card.h | setup
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -g $(WARNINGS) -Wno-missing-field-initializers $(USER_CXX) -c dev/inspect/recorder.cpp -o $@

$(INSPECT_DIR)/%.o: %.cu $(HEADERS) $(INSPECT_DIR)/flags | setup
	$(CXX) $(CPU_FLAGS) $(INSPECT_FLAGS) $(DEFINE_bf16) $(USER_CXX) -c $< -o $@
link_inspected = $(CXX) -no-pie -fopenmp $(1) $(INSPECT_DIR)/recorder.o -o $(2) $(LDFLAGS) $(CPU_LIBS)
$(INSPECT_DIR)/train_gpt: $(INSPECT_DIR)/train_gpt.o $(INSPECT_DIR)/recorder.o
	$(call link_inspected,$<,$@)

# What ptxas says of registers, where there is an nvcc.
INSPECT_REGISTERS = $(if $(NVCC),$(INSPECT_DIR)/registers-$(CARD).json)
$(INSPECT_DIR)/registers-%.json: train_gpt.cu $(HEADERS) dev/inspect/registers.py | setup
	@mkdir -p $(@D)
	$(PYTHON) dev/inspect/registers.py train_gpt.cu --nvcc $(NVCC) --card $* --define PRECISION_BF16 --out $@

INSPECT_REPORT = --card $(CARD) --html runs/inspect/report.html $(if $(JSON),--json '$(JSON)') \
    $(if $(filter command environment,$(firstword $(origin KERNEL))),--kernel '$(KERNEL)') \
    $(if $(filter yes,$(CHECK)),--check) $(if $(filter yes,$(BARRIERS)),--barriers) $(if $(SECONDS),--seconds $(SECONDS))
ifdef FILE
MINE := $(INSPECT_DIR)/$(basename $(notdir $(firstword $(FILE))))/program
inspect: $(INSPECT_DIR)/recorder.o
	@mkdir -p $(dir $(MINE)) runs/inspect
	@sources=$$($(PYTHON) dev/inspect/rewrite.py $(FILE) -o $(MINE).cpp $(filter -I% -D%,$(CPPFLAGS))) || exit 2; \
	for source in $$sources; do \
	    $(CXX) $(CPU_FLAGS) $(INSPECT_FLAGS) $(INSPECT_INLINE) -w -include cuda_runtime.h $(USER_CXX) -c $$source -o $$source.o || exit 2; \
	done; \
	$(CXX) -no-pie -fopenmp $$(printf '%s.o ' $$sources) $(INSPECT_DIR)/recorder.o -o $(MINE) $(LDFLAGS) $(CPU_LIBS)
	@rm -f $(MINE).registers; $(if $(NVCC),$(PYTHON) dev/inspect/registers.py $(FILE) --nvcc $(NVCC) --card $(CARD) \
	    $(filter -I% -D%,$(CPPFLAGS)) --out $(MINE).registers >$(MINE).nvcc.log 2>&1 || true)
	@$(PYTHON) dev/inspect/run.py $(MINE) $(INSPECT_REPORT) \
	    $$([ ! -f $(MINE).registers ] || echo --registers $(MINE).registers) -- $(ARGS)
else
inspect:
	@mkdir -p runs/inspect
	@$(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j2) $(INSPECT_DIR)/train_gpt $(INSPECT_REGISTERS)
	@$(PYTHON) dev/inspect/run.py $(INSPECT_DIR)/train_gpt --step $(addprefix --registers ,$(INSPECT_REGISTERS)) \
	    $(INSPECT_REPORT) -- $(INSPECT_OPTIONS)
endif

# Claims about what it finds, what it says, and how it makes C++ of a .cu file.
test-inspect: $(INSPECT_DIR)/recorder.o
	$(PYTHON) dev/inspect/test_rewrite.py
	$(PYTHON) dev/inspect/test_report.py
	$(PYTHON) dev/inspect/test_inspect.py

# ---- dev/kernels, benchmarks, reports ---------------------------------------------------------------

# dev/kernels: each layer's kernel step by step, checked and timed. KERNEL=layernorm: only that one; MARKDOWN=FILE:
# the tables also go there. On a CPU at width 32, as a GPU does it.

STUDIES        := $(sort $(basename $(notdir $(wildcard dev/kernels/*.cu))))
KERNEL         ?= $(STUDIES)
STUDY_PROGRAMS := $(addprefix build/kernels/$(DEVICE)-$(PRECISION)/,$(KERNEL))
build/kernels/gpu-$(PRECISION)/%: dev/kernels/%.cu dev/kernels/study.h train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,$(PRECISION),gpu)
build/kernels/cpu-$(PRECISION)/%: dev/kernels/%.cu dev/kernels/study.h train_gpt.cu $(HEADERS) \
                                  $(INSPECT_DIR)/recorder.o $(INSPECT_DIR)/flags | setup
	@mkdir -p $(@D)
	$(CXX) $(CPU_FLAGS) $(INSPECT_FLAGS) $(DEFINE_$(PRECISION)) $(USER_CXX) -c $< -o $@.o
	$(call link_inspected,$@.o,$@)
# The study of FP8 also trains a model. On a CPU that takes a program of its own, in which nothing is counted.
STUDY_PROGRAMS += $(and $(filter cpu-bf16,$(DEVICE)-$(PRECISION)),$(filter quantize,$(KERNEL)),build/kernels/fast-bf16/quantize)
build/kernels/fast-bf16/%: dev/kernels/%.cu dev/kernels/study.h train_gpt.cu $(HEADERS) | setup
	$(call compile,$<,$@,bf16,1,$(VECTORS))
STUDY_RUNS := $(STUDY_PROGRAMS:=.run)
$(STUDY_RUNS): %.run: % FORCE
	@echo "== $<"; OMP_NUM_THREADS=1 INSPECT_MODE=few INSPECT_OUT=$<.json $< $(if $(MARKDOWN),--markdown $(MARKDOWN)) || { \
	    [ ! -s $<.json ] || $(PYTHON) dev/inspect/report.py $<.json; exit 1; }
# One after the other where they are timed, or write into one file.
kernels: $(STUDY_PROGRAMS)
	@$(MAKE) --no-print-directory -k --output-sync=target $(if $(MARKDOWN)$(filter gpu,$(DEVICE)),-j1) $(STUDY_RUNS)

# They compile for Hopper, without warnings.
check-kernels:
	$(MAKE) --no-print-directory DEVICE=gpu PRECISION=bf16 ARCHS=90a GPU_FLAGS="$(GPU_FLAGS) $(GPU_CHECKS)" \
	    $(STUDIES:%=build/kernels/gpu-bf16/%)

reference:
	$(PYTHON) dev/reference/make_reference.py
	$(PYTHON) dev/reference/make_hf_fixture.py

# Beside this machine's own choice, FP32.
BENCH_PRECISIONS ?= $(sort $(PRECISION) fp32)
bench: setup
	@for p in $(BENCH_PRECISIONS); do \
	    $(MAKE) --no-print-directory DEVICE=cpu PRECISION=$$p build/cpu-$$p/train_gpt || exit 2; \
	done
	$(PYTHON) dev/bench/cpu.py $(BENCH_PRECISIONS:%=--ours build/cpu-%/train_gpt) $(BENCH)

# Samples of GPT-2 124M on a CPU beside transformers' generate, which PYTHON must have. BENCH takes sampling.py's options.
bench-sampling: setup
	@for p in $(BENCH_PRECISIONS); do \
	    $(MAKE) --no-print-directory DEVICE=cpu PRECISION=$$p build/cpu-$$p/train_gpt || exit 2; \
	done
	$(PYTHON) dev/bench/sampling.py $(BENCH_PRECISIONS:%=--ours build/cpu-%/train_gpt) $(BENCH)

# On a GPU, beside PyTorch and, with LLMC=FOLDER, llm.c: a report in runs/bench-gpu. BENCH takes gpu.py's options, such
# as "--minutes 8 --models gpt2,gpt2-xl --out DIR"; with DEVICE=cpu BENCH="--device cpu" it is a dry run.
bench-gpu: require-gpu all
	$(PYTHON) dev/bench/gpu.py --ours ./train_gpt --data '$(DATA)' $(if $(LLMC),--llmc '$(LLMC)') $(BENCH)

require-gpu:
	@[ -n "$(GPU_NAME)$(findstring --device cpu,$(BENCH))" ] || { echo "no GPU was found: nvidia-smi names none"; exit 2; }

# The single-GPU chapter of the Ultra-Scale Playbook, measured on this machine: a report with plots. What 16 bits do is
# measured with programs of those precisions.
$(BUILD)/formats: dev/chapter/formats.cu train_gpt.cu $(HEADERS) $(BUILD)/flags | setup
	$(call compile,$<,$@,$(PRECISION),$(if $(filter gpu,$(DEVICE)),gpu,1),$(if $(filter cpu,$(DEVICE)),$(VECTORS)))
CHAPTER_16_BITS := bf16 fp16
in_16_bits       = build/$(DEVICE)-$(1)/train_gpt $(if $(filter bf16,$(1)),build/$(DEVICE)-$(1)/formats)
chapter: all
	@$(foreach p,$(CHAPTER_16_BITS),$(MAKE) --no-print-directory $(SIDE_BY_SIDE) PRECISION=$p \
	    $(call in_16_bits,$p) &&) true
	$(PYTHON) dev/chapter/chapter.py --train-gpt ./train_gpt --out runs/chapter \
	    --formats build/$(DEVICE)-bf16/formats $(foreach p,$(CHAPTER_16_BITS),--$p build/$(DEVICE)-$p/train_gpt) $(CHAPTER)

# The page of dev/explorer in a headless Chromium, against plan --json.
test-explorer: all
	$(PYTHON) dev/explorer/test_explorer.py --train-gpt ./train_gpt

# Runs on a CPU that are killed, stopped, cut off from power, on a full disk, without their files: dev/faults. FAULTS
# takes test_faults.py's options, such as --quick.
build/faults/failing.so: dev/faults/failing.cpp Makefile | setup
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 $(WARNINGS) -U_FORTIFY_SOURCE -shared -fPIC $(USER_CXX) $< -o $@ $(LDFLAGS) -ldl
test-faults: build/faults/failing.so
	$(MAKE) --no-print-directory DEVICE=cpu PRECISION=fp32 build/cpu-fp32/train_gpt
	$(PYTHON) dev/faults/test_faults.py --program build/cpu-fp32/train_gpt --preload $< $(FAULTS)

clean:
	rm -rf build train_gpt

help:
	@sed -n '1,8s/^# \{0,1\}//p' Makefile
	@echo "make debug          build/debug/train_gpt, to step through kernels in gdb on a CPU"
	@echo "make test-asan      the tests under AddressSanitizer and UBSan"
	@echo "make test-ports     a part of the tests with other compilers and for other processors"
	@echo "make test-cards     the tests on cards that dev/cpu pretends to be: CARDS=\"h100 h200 a100 4090 l40s t4 b200\""
	@echo "make test-gpu       the tests on a GPU"
	@echo "make test-gpu-sanitize  the kernels' and the model's tests under compute-sanitizer"
	@echo "make test-hf        a folder that we wrote, opened by safetensors and transformers"
	@echo "make check-cuda     compiles for sm_75 (FP16), sm_80, sm_89 and sm_90a: no warnings, no spills, sound machine code;"
	@echo "                    TOOLKIT=DIR: with the CUDA toolkit in DIR (scripts/toolkit.sh makes one of CUDA 12.4)"
	@echo "make inspect        what each kernel does to memory, and races: KERNEL=, FILE=mine.cu, CARD=, CHECK=yes, BARRIERS=yes"
	@echo "make test-inspect   claims about what make inspect finds"
	@echo "make kernels        dev/kernels: each layer's kernel step by step, checked and timed; KERNEL=attention: one"
	@echo "make check-kernels  they compile for sm_90a: no warnings"
	@echo "make reference      writes data/reference/ with PyTorch"
	@echo "make bench          this CPU, beside PyTorch and llm.c where they are there"
	@echo "make bench-sampling samples of GPT-2 124M on a CPU, beside transformers"
	@echo "make bench-gpu      this GPU, beside PyTorch and llm.c: a report within 8 minutes"
	@echo "make chapter        memory, recomputation, accumulation, throughput: a report with plots"
	@echo "make test-faults    runs that are killed, stopped, cut off from power, on a full disk: resumed with the same bits"
	@echo "make test-many      training on 1 to 4 GPUs, each imitated by a process; test-many-gpu N=2: on as many"
	@echo "make test-explorer  dev/explorer's page in headless Chromium, against plan --json"
