#!/usr/bin/env bash
# Decode speed beside llama2.c's, on the same random weights, interleaved, with the same threads.
#   LLAMA2C_RUN=path/to/run bench/compare_llama2c.sh [SHAPE [TOKENS [ROUNDS [THREADS]]]]
# Build theirs as its README says: gcc -Ofast -fopenmp -march=native run.c -lm -o run
set -eu
cd "$(dirname "$0")/.."
shape=${1:-stories15m} tokens=${2:-256} rounds=${3:-5} threads=${4:-2}
: "${LLAMA2C_RUN:?set it to the path of a built llama2.c run program}"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make --no-print-directory -s build/bench
build/bench "shape:$shape" --write "$work/model.bin"

theirs() { # stops early when it meets token 1: tokens per second all the same
  OMP_NUM_THREADS=$threads "$LLAMA2C_RUN" "$work/model.bin" -z "$work/model.bin.tokenizer" -t 0 \
    -n "$tokens" 2>&1 > /dev/null | sed -n 's/.*tok\/s: //p'
}
ours() {
  build/bench "$work/model.bin" -p 0 -n "$tokens" -j "$threads" --repeat 1 --json |
    sed -n 's/.*"tokens_per_s": \([0-9.]*\).*/\1/p'
}
median() { # of an even number, the mean of the two in the middle
  sort -g | awk '{ v[NR] = $1 } END { print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'
}

for ((round = 0; round < rounds; round++)); do
  theirs >> "$work/theirs"
  ours >> "$work/ours"
done
awk -v shape="$shape" -v tokens="$tokens" -v threads="$threads" -v a="$(median < "$work/ours")" \
  -v b="$(median < "$work/theirs")" -v rounds="$rounds" 'BEGIN {
  printf "%s, %d tokens, %d threads, median of %d, tokens/s: ", shape, tokens, threads, rounds
  printf "transformer.h %.1f, llama2.c %.1f, ratio %.2f\n", a, b, a / b }'
