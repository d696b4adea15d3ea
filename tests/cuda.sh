#!/usr/bin/env bash
# Compiles transformer_cuda.cu without warnings and links an example with it; skipped where there is
# no nvcc.
if ! command -v nvcc > /dev/null; then
  echo "skip cuda-check: nvcc is not installed"
  echo "0 passed, 0 failed, 1 skipped"
elif out=$(make --no-print-directory -B cuda-check 2>&1) && ! grep -q warning <<< "$out" &&
  out=$(make --no-print-directory CUDA=1 build/hello 2>&1); then
  echo "1 passed, 0 failed, 0 skipped"
else
  echo "$out"
  echo "FAIL cuda-check"
  echo "0 passed, 1 failed, 0 skipped"
  exit 1
fi
