#!/usr/bin/env bash
# cuda.sh BENCH: the figures of a GPU that bench/results keeps, as lines of JSON; REPEAT=3.
set -u
bench=${1:?the benchmark}
run() { "$bench" -d cuda --json --cache f16 --repeat "${REPEAT:-3}" "$@"; }

for type in f16 q8_0 q4_0; do
  run shape:gpt2-124m --type $type -p 512 --rows 512 -n 256 --check
done
run shape:llama-1b -p 2048 --rows 2048 -n 128 --check
for type in f16 q8_0 q4_0; do run shape:llama-8b --type $type -p 2048 --rows 2048 -n 64; done
run shape:llama-8b -p 0 -n 32 --batch 64 --depth 1000 --rows 1024
