#!/usr/bin/env bash
# cuda.sh FOLDER: the figures of a GPU that bench/results keeps, as lines of JSON, by the programs
# in FOLDER, and PyTorch's where python3 has it. REPEAT=3; WORK=/tmp: where 16 GB may be written.
# Figures are held against MEMORY GB/s and PRODUCTS TFLOP/s: what an H200 was measured to reach.
set -u
bin=${1:?the folder of bench and entries}
run() {
  "$bin/bench" -d cuda --json --repeat "${REPEAT:-3}" --memory "${MEMORY:-4360}" \
    --products "${PRODUCTS:-790}" "$@"
}

for type in f16 q8_0 q4_0; do
  run shape:gpt2-124m --type $type -p 512 --rows 512 -n 256 --check
done
run shape:llama-1b -p 2048 --rows 2048 -n 128 --check
for type in f16 q8_0 f8_e4m3 q4_0; do
  run shape:llama-8b --type $type -p 2048 --rows 2048 -n 64
done
run shape:llama-8b -p 0 -n 32 --batch 64 --depth 1000 --rows 1024
run shape:llama-8b -p 0 -n 32 --batch 64 --depth 1000 --rows 1024 --deterministic
"$bin/entries" cuda

work=$(mktemp -d "${WORK:-/tmp}/load.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
if "$bin/bench" shape:llama-8b --write "$work/model.safetensors"; then
  run "$work" --load | sed "s#$work#16 GB of F16#"
fi
rm -rf "$work"

if python3 -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null; then
  python3 "$(dirname "$0")/peers_cuda.py"
else
  echo "skip PyTorch: python3 does not have it, or not for a GPU" >&2
fi
