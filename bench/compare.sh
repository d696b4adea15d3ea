#!/usr/bin/env bash
# Prompts and texts beside llama.cpp's and PyTorch's, on the same random weights, in turns.
#   bench/compare.sh [SHAPE [TYPE [ROUNDS [THREADS [SEQUENCES]]]]]     stories15m q8_0 5 2 1
# More SEQUENCES than one: only texts, so many at a time, beside llama.cpp's.
#   bench/compare.sh table [ROUNDS [THREADS]]    every row of README's table, the ceilings first
# Needs what `make examples bench` builds, and a Python ($PYTHON) with llama-cpp-python; with torch
# and transformers too, PyTorch takes part where TYPE is f32 or bf16. Prints medians of tokens/s,
# the share of what the machine could do (see bench.c), and ratios. One that fails takes no further
# part, with the reason; ours goes on alone.
# Whether llama.cpp uses AMX its llama_print_system_info tells; built by clang 14 it does not unless
# -D__AMX_INT8__=1 is among the flags.
# KEEP=DIR leaves the models there for the next call: with 0 ROUNDS it only makes them, so that the
# measuring itself can have the machine to itself.
set -eu
cd "$(dirname "$0")/.."

if [ "${1:-}" = table ]; then
  rounds=${2:-3} threads=${3:-2}
  make --no-print-directory -s build/bench
  build/bench ceilings -j "$threads"
  for row in "tinyllama-1.1b "{bf16,q8_0,q4_0,q4_k_m} "gpt2-124m "{f32,bf16,q8_0,q4_0} \
    "stories15m "{f32,q8_0}; do
    # shellcheck disable=SC2086
    "bench/${0##*/}" $row "$rounds" "$threads"
  done
  for type in q8_0 q4_0; do "bench/${0##*/}" tinyllama-1.1b $type "$rounds" "$threads" 16; done
  exit 0
fi

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
  if [ "$type" = q4_k_m ]; then
    made "$models/bf16.gguf" build/convert "$source" "$models/bf16.gguf" -t bf16
    "$python" bench/peers.py q4_k_m "$models/bf16.gguf" "$models/$type.gguf" 2> "$work/log" ||
      { tail -1 "$work/log" >&2; exit 1; }
  else
    build/convert "$source" "$models/$type.gguf" -t "$type"
  fi
fi

peers="llama_cpp"
case $type in f32) torch=torch ;; bf16) torch=torch_bf16 ;; *) torch= ;; esac
if [ "$torch" ] && [ "$sequences" = 1 ] &&
  "$python" -c 'import torch, transformers' 2> "$work/log"; then
  made "$models/folder" build/convert "$source" "$models/folder" &&
    peers="llama_cpp $torch"
fi
[ "$rounds" -gt 0 ] || exit 0

ours() {
  build/bench "$models/$type.gguf" -p $prompt -n $tokens -j "$threads" --batch "$sequences" \
    --repeat 1 --json | tee "$work/last" |
    sed -n 's/.*"tokens_per_s": \([0-9.]*\).*/\1/p' | paste -sd' '
  sed -n 's/.*"share_of_ceiling": \([0-9.]*\).*/\1/p' "$work/last" | paste -sd' ' >> "$work/share"
}
peer() {
  local model=$models/$type.gguf
  [[ $1 = torch* ]] && model=$models/folder
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
  for p in $peers; do
    peer "$p" >> "$work/$p" && continue
    echo "$shape $type: no $p: $(tail -1 "$work/log")" >&2
    peers=$(tr ' ' '\n' <<< "$peers" | grep -vx "$p" | paste -sd' ')
  done
done
column=0
for name in $workloads; do
  column=$((column + 1))
  line=$(printf '%s %s, %d threads, %s: transformer.h %.1f (%.2f of the limit)' "$shape" "$type" \
    "$threads" "$name" "$(median "$work/ours" $column)" "$(median "$work/share" $column)")
  [ "$peers" ] || echo "$line"
  for p in $peers; do
    awk -v line="$line" -v p="$p" -v a="$(median "$work/ours" $column)" \
      -v b="$(median "$work/$p" $column)" \
      'BEGIN { printf "%s, %s %.1f tokens/s, ratio %.2f\n", line, p, b, a / b }'
  done
done
