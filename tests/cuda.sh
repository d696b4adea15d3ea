#!/usr/bin/env bash
# Compiles transformer_cuda.cu without warnings, links programs with it, with and without
# transformer_cpu.c, and runs its host side against a stand-in for the CUDA runtime. Skipped where
# there is no nvcc.
cd "$(dirname "$0")/.." || exit 1
if ! command -v nvcc > /dev/null; then
  echo "skip cuda-check: nvcc is not installed"
  echo "0 passed, 0 failed, 1 skipped"
  exit
fi

fail() { # WHAT OUTPUT
  echo "$2"
  echo "FAIL $1"
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
}

out=$(make --no-print-directory -B -j 2 CUDA=1 B=build/cuda cuda-check build/cuda/hello 2>&1) ||
  fail "cuda-check" "$out"
! grep -q warning <<< "$out" || fail "cuda-check: warnings" "$out"
printf '#define TRANSFORMER_IMPLEMENTATION\n#include "transformer.h"\n%s\n' \
  'int main(void) { return 0; }' > build/cuda/alone.c
out=$(gcc -I. -DTFM_USE_CUDA -c -o build/cuda/alone.o build/cuda/alone.c 2>&1 &&
  nvcc -o build/cuda/alone build/cuda/alone.o build/cuda/transformer_cuda.o -lcublasLt 2>&1) ||
  fail "links without transformer_cpu.c" "$out"
exec build/cuda/cuda_host
