# transformer.h: `make run` writes a text, `make test` checks all, `make help` lists the rest.
# Nothing is configured and nothing is written outside build/. Set on the command line as you like:
#   make CC=clang CFLAGS='-O2 -g'      another compiler, other flags
#   make CUDA=1                        link transformer_cuda.cu into the tools (needs nvcc)

CC      ?= cc
CXX     ?= c++
CFLAGS  ?= -O3 -march=native
NVCC    ?= nvcc
PREFIX  ?= /usr/local
T       ?= 60
PROMPT  ?= Once upon a time
SEED    ?= 1
WARN     = -Wall -Wextra
LIBS     = -lm -lpthread
SANITIZE = -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
VERSION := $(shell sed -n 's/^.define TFM_VERSION "\(.*\)"/\1/p' transformer.h 2>/dev/null)

CUDA_HOME = $(abspath $(dir $(shell command -v $(NVCC)))..)

B        = build
HEADERS  = transformer.h $(wildcard examples/*.h) $(wildcard tests/*.h)
EXAMPLES = $(patsubst examples/%.c,$B/%,$(wildcard examples/*.c)) $B/cpp
UNITS    = $(patsubst tests/%.c,%,$(wildcard tests/test_*.c))
CUDA_UNITS = test_kernels test_model test_session test_engine cuda_faults
FUZZERS  = $(patsubst tests/%.c,%,$(wildcard tests/fuzz_*.c))
TESTS    = $(UNITS:%=$B/%) $(UNITS:%=$B/asan/%) $B/simd/test_kernels $B/simd/test_gradients
REPLAYS  = $(FUZZERS:%=$B/asan/%)
LIBRARY  = $B/libtransformer.a

# Programs that see only the public functions link them. The rest bring the header's code along, for
# its private parts, some of them no more than they use of it; a linker takes nothing from the
# library that a program has itself.
LINKED   = $(EXAMPLES) $(foreach t,convert session,$B/test_$t $B/asan/test_$t) \
           $(filter-out %_json,$(REPLAYS))
PARTS    = $(foreach t,chat data tokenizer vocabulary,$B/test_$t $B/asan/test_$t)
$(LINKED): CODE = -DTFM_LINKED
$(PARTS): CODE = -DTFM_STATIC

# What the tools are linked with. A companion that declines its kernels is passed over at run time.
USE      = -DTFM_USE_CPU
OBJECTS  = $B/transformer_cpu.o
ifdef CUDA
USE     += -DTFM_USE_CUDA
OBJECTS += $B/transformer_cuda.o
LIBS    += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart -lcublasLt -lstdc++
endif

all: examples tests bench ## the tools, the tests and the benchmark, in build/
examples: $(EXAMPLES) ## the programs of examples/
tests: $(TESTS) $(REPLAYS) ## the unit tests, plain and with sanitizers
bench: $B/bench ## the benchmark: build/bench --help
lib: $(LIBRARY) ## the static library
lib-shared: $B/libtransformer.so ## the shared library, for examples/transformer.py

# ---- Building ----

$B $B/asan $B/simd $B/tsan $B/fuzz:
	@mkdir -p $@

$B/%: examples/%.c $(HEADERS) $(LIBRARY)
	$(CC) $(CFLAGS) $(WARN) $(USE) $(CODE) -o $@ $< $(LIBRARY) $(LIBS)

$B/cpp: examples/cpp.cpp $(HEADERS) $(LIBRARY)
	$(CXX) -std=c++17 $(CFLAGS) $(WARN) $(USE) $(CODE) -o $@ $< $(LIBRARY) $(LIBS)

$B/bench $B/entries: $B/%: bench/%.c $(HEADERS) $(LIBRARY)
	$(CC) $(CFLAGS) $(WARN) $(USE) -o $@ $< $(LIBRARY) $(LIBS)

$B/test_%: tests/test_%.c $(HEADERS) $(LIBRARY)
	$(CC) $(CFLAGS) $(WARN) $(USE) $(CODE) -o $@ $< $(LIBRARY) $(LIBS)

$B/asan/test_%: tests/test_%.c $(HEADERS) $B/asan/libtransformer.a
	$(CC) $(SANITIZE) $(WARN) $(CODE) -o $@ $< $B/asan/libtransformer.a $(LIBS)

# Replays what the fuzzers found: no libFuzzer needed.
$B/asan/fuzz_%: tests/fuzz_%.c tests/replay.c $(HEADERS) $B/asan/libtransformer.a
	$(CC) $(SANITIZE) $(WARN) $(CODE) -o $@ $< tests/replay.c $B/asan/libtransformer.a $(LIBS)

$B/asan/transformer.o: transformer.h | $B/asan
	$(CC) $(SANITIZE) $(WARN) -DTRANSFORMER_IMPLEMENTATION -x c -c -o $@ $<

# Every path of the companion: AMX's tiles in C, for processors that have AVX-512 with BF16 and no
# tiles; with TEST_AVX2 in the environment, AVX2 alone.
$B/simd/transformer_cpu.o: transformer_cpu.c transformer.h tests/amx_standin.h | $B/simd
	$(CC) $(SANITIZE) $(WARN) -DTFM_CPU_AMX_STANDIN='"tests/amx_standin.h"' -DTFM_CPU_SCRATCH=2048 \
	  -DTFM_CPU_AVX2_ONLY='(getenv("TEST_AVX2") != NULL)' -c -o $@ $<

$B/simd/test_%: tests/test_%.c $(HEADERS) $B/simd/transformer_cpu.o
	$(CC) $(SANITIZE) $(WARN) -DTFM_USE_CPU -o $@ $< $B/simd/transformer_cpu.o $(LIBS)

$B/tsan/test_%: tests/test_%.c $(HEADERS) | $B/tsan
	$(CC) -O1 -g -fsanitize=thread $(WARN) -o $@ $< $(LIBS)

$B/fuzz/fuzz_%: tests/fuzz_%.c $(HEADERS) | $B/fuzz
	clang -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -o $@ $< $(LIBS)

$B/transformer.o: transformer.h | $B
	$(CC) $(CFLAGS) $(WARN) $(USE) -DTRANSFORMER_IMPLEMENTATION -x c -c -o $@ $<

$B/transformer_cpu.o: transformer_cpu.c transformer.h | $B
	$(CC) $(CFLAGS) $(WARN) -c -o $@ $<

$B/transformer_cuda.o: transformer_cuda.cu transformer.h | $B
	$(NVCC) -arch=sm_90a -O3 -Xcompiler -Wall,-Wextra -c -o $@ $<

$B/cuda_host: tests/cuda_host.c tests/cuda_standin.c tests/cuda_standin.h $(HEADERS) \
    $B/transformer_cuda.o
	$(CC) -O1 -g -fsanitize=address,undefined $(WARN) -I$(CUDA_HOME)/include -o $@ \
	  tests/cuda_host.c tests/cuda_standin.c $B/transformer_cuda.o -lm -lpthread -lstdc++

$B/cuda_faults: tests/cuda_host.c tests/cuda_real.c tests/cuda_standin.h $(HEADERS) $(OBJECTS)
	$(CC) $(CFLAGS) $(WARN) $(USE) -I$(CUDA_HOME)/include -o $@ tests/cuda_host.c \
	  tests/cuda_real.c $(OBJECTS) $(LIBS) -ldl

$(LIBRARY): $B/transformer.o $(OBJECTS)
$B/asan/libtransformer.a: $B/asan/transformer.o
%/libtransformer.a:
	@rm -f $@
	$(AR) rcs $@ $^

# Nothing is seen of it but the public functions: tests/api.txt.
$B/libtransformer.so: transformer.h transformer_cpu.c tests/api.txt | $B
	(echo '{ global:'; sed -n 's/.*[ *]\(tfm_[a-z0-9_]*\)(.*/  \1;/p' tests/api.txt; \
	  echo '  local: *; };') > $B/libtransformer.map
	$(CC) $(CFLAGS) $(WARN) $(USE) -fPIC -c -DTRANSFORMER_IMPLEMENTATION -x c \
	  -o $B/transformer.pic.o transformer.h
	$(CC) $(CFLAGS) $(WARN) $(USE) -fPIC -c -o $B/transformer_cpu.pic.o transformer_cpu.c
	$(CC) -shared -Wl,--version-script=$B/libtransformer.map -o $@ $B/transformer.pic.o \
	  $B/transformer_cpu.pic.o $(LIBS)

# ---- Using ----

TALES = examples/tales/tales.gguf

deps: ## install what is missing (Debian, Ubuntu); does nothing when all is there
	@.ci/deps all
run: ## a small model of our own goes on with a tale; PROMPT='...' SEED=1
	@.ci/deps build && $(MAKE) --no-print-directory -j 2 $B/generate
	@$B/generate $(TALES) -p "$(PROMPT)" -n 150 -t 0.7 --top-p 0.9 --seed $(SEED)

# ---- Checking: each suite closes with "N passed, N failed, N skipped"; run.sh adds them up ----

test: ## everything below but tsan and fuzz, with one closing line
	@.ci/deps all
	@$(MAKE) --no-print-directory -j 2 -k tests examples bench || echo "not all could be built"
	@tests/run.sh $(TESTS) "env TEST_AVX2=1 $B/simd/test_kernels" \
	  "env TEST_AVX2=1 $B/simd/test_gradients" $(REPLAYS) tests/examples.sh tests/python.py \
	  tests/lint.py tests/compat.sh "tests/portability.sh --compile"
lint: ## style, budgets, symbols, the list of public functions
	@tests/lint.py
compat: ## gcc and clang, C11 to C++17, strict warnings, beside the application's stb_ds
	@tests/compat.sh
portability: ## the core tests on AArch64 (all its kernels), i686, musl, Windows, where installed
	@tests/portability.sh
tsan: $(UNITS:%=$B/tsan/%) ## the unit tests under the thread sanitizer
	@tests/run.sh $^
fuzz: ## every fuzzer for T=60 seconds
	@tests/fuzz.sh $(T) $(FUZZERS)
test-cuda: ## the tests that use a GPU, on a GPU: needs nvcc, a C compiler, stb_ds.h
	@$(MAKE) --no-print-directory -j CUDA=1 B=$B/cuda cuda-tests
cuda-tests: $(CUDA_UNITS:%=$B/%)
	@tests/run.sh $^ tests/cuda_sanitize.sh
bench-cuda: ## the benchmark on a GPU, beside PyTorch: shapes of 124M, 1B and 8B; REPEAT=3
	@$(MAKE) --no-print-directory -j CUDA=1 B=$B/cuda $B/cuda/bench $B/cuda/entries
	@bench/cuda.sh $B/cuda
cuda-archs: ## the CUDA companion for other GPUs: 80, 86, 89, 100, 120
	for arch in 80 86 89 100 120; do \
	  $(NVCC) -arch=sm_$$arch -O3 -c -o $B/transformer_cuda.$$arch.o transformer_cuda.cu || exit 1; \
	done
cuda-check: $B/transformer_cuda.o $B/cuda_host ## the CUDA companion's host side, no GPU needed
format: ## clang-format on the lines that differ from the last commit
	git clang-format --extensions c,h,cu,cpp

# ---- Installing ----

DEST = $(DESTDIR)$(PREFIX)
install: $(LIBRARY) ## header, companions, static library, pkg-config file; PREFIX= DESTDIR=
	install -d $(DEST)/include $(DEST)/lib/pkgconfig
	install -m 644 transformer.h transformer_cpu.c transformer_cuda.cu $(DEST)/include
	install -m 644 $(LIBRARY) $(DEST)/lib
	printf '%s\n' 'prefix=$(PREFIX)' 'Name: transformer' 'Description: transformer language models' \
	  'Version: $(VERSION)' 'Cflags: -I$${prefix}/include' \
	  'Libs: -L$${prefix}/lib -ltransformer $(LIBS)' > $(DEST)/lib/pkgconfig/transformer.pc
uninstall: ## remove these files again
	rm -f $(addprefix $(DEST)/include/,transformer.h transformer_cpu.c transformer_cuda.cu)
	rm -f $(DEST)/lib/libtransformer.a $(DEST)/lib/pkgconfig/transformer.pc
clean: ## remove build/
	rm -rf $B
help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

.PHONY: all examples tests bench lib lib-shared deps run test lint compat portability tsan \
  fuzz cuda-archs cuda-check test-cuda cuda-tests bench-cuda format install uninstall clean help
.DELETE_ON_ERROR:
.SUFFIXES:
