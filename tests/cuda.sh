#!/usr/bin/env bash
# Compiles transformer_cuda.cu without warnings, links an example with it, and runs its host side
# against a stand-in for the CUDA runtime. Skipped where there is no nvcc.
if ! command -v nvcc > /dev/null; then
  echo "skip cuda-check: nvcc is not installed"
  echo "0 passed, 0 failed, 1 skipped"
elif out=$(make --no-print-directory -B cuda-check 2>&1) && ! grep -q warning <<< "$out" &&
  out=$(make --no-print-directory CUDA=1 build/hello 2>&1); then
  build/cuda_host
else
  echo "$out"
  echo "FAIL cuda-check"
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
fi
