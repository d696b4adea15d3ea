#!/usr/bin/env bash
# Prompts and texts beside llama.cpp's and PyTorch's, on the same random weights, in turns.
#   bench/compare.sh [SHAPE [TYPE [ROUNDS [THREADS [SEQUENCES]]]]]     stories15m q8_0 5 2 1
# More SEQUENCES than one: only texts, so many at a time, beside llama.cpp's.
# Needs what `make examples bench` builds, and a Python ($PYTHON) with llama-cpp-python; with torch
# and transformers too, PyTorch takes part where TYPE is f32. Prints medians of tokens/s and ratios.
# KEEP=DIR leaves the models there for the next call: with 0 ROUNDS it only makes them, so that the
# measuring itself can have the machine to itself.
set -eu
cd "$(dirname "$0")/.."
shape=${1:-stories15m} type=${2:-q8_0} rounds=${3:-5} threads=${4:-2} sequences=${5:-1}
python=${PYTHON:-python3} prompt=512 tokens=128
workloads="pp$prompt tg$tokens"
if [ "$sequences" -gt 1 ]; then
  prompt=0 tokens=32
  workloads=tg${tokens}x$sequences
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
models=${KEEP:-$work}/$shape
mkdir -p "$models"
make --no-print-directory -s build/bench build/convert

source=$models/model.bin
case $shape in gpt2*) source=$models/model.safetensors ;; esac
made() { [ -e "$1" ] || { "${@:2}"; }; }
if [ ! -e "$models/$type.gguf" ]; then
  made "$source" build/bench "shape:$shape" --write "$source"
  made "$models/$type.gguf" build/convert "$source" "$models/$type.gguf" -t "$type"
fi

peers="llama_cpp"
if [ "$type" = f32 ] && [ "$sequences" = 1 ] &&
  "$python" -c 'import torch, transformers' 2> "$work/log"; then
  made "$models/folder" build/convert "$source" "$models/folder" && peers="llama_cpp torch"
fi
[ "$rounds" -gt 0 ] || exit 0

ours() {
  build/bench "$models/$type.gguf" -p $prompt -n $tokens -j "$threads" --batch "$sequences" \
    --repeat 1 --json |
    sed -n 's/.*"tokens_per_s": \([0-9.]*\).*/\1/p' | paste -sd' '
}
peer() {
  local model=$models/$type.gguf
  [ "$1" = torch ] && model=$models/folder
  if [ "$sequences" -gt 1 ]; then
    "$python" bench/peers.py sequences "$model" "$sequences" $tokens "$threads" 2> "$work/log"
  else
    "$python" bench/peers.py "$1" "$model" $prompt $tokens "$threads" 2> "$work/log"
  fi
}
median() { # of column $2 in a file; of an even number, the mean of the two in the middle
  cut -d' ' -f"$2" "$1" | sort -g |
    awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'
}

for ((round = 0; round < rounds; round++)); do
  ours >> "$work/ours"
  for p in $peers; do peer "$p" >> "$work/$p" || { tail -3 "$work/log"; exit 1; }; done
done
column=0
for name in $workloads; do
  column=$((column + 1))
  a=$(median "$work/ours" $column)
  for p in $peers; do
    awk -v name="$name" -v shape="$shape" -v p="$p" -v type="$type" \
      -v n="$threads" -v a="$a" -v b="$(median "$work/$p" $column)" 'BEGIN {
      printf "%s %s, %d threads, %s: transformer.h %.1f, %s %.1f tokens/s, ratio %.2f\n",
             shape, type, n, name, a, p, b, a / b }'
  done
done
