#!/usr/bin/env bash
# cuda_sanitize.sh: the kernels under compute-sanitizer, on a GPU, all at a time: memcheck for every
# entry, decode and layer; racecheck where blocks share memory. B: the folder of the programs.
set -u
bin=${B:-build/cuda}
if ! command -v compute-sanitizer > /dev/null; then
  echo "skip cuda_sanitize: compute-sanitizer is not installed"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi
logs=$(mktemp -d) || exit 1
trap 'kill $(jobs -p) 2> /dev/null; rm -rf "$logs"' EXIT
trap 'exit 1' INT TERM # ends what it began
export QUICK=1         # of long tests a part

check() { # check TOOL PROGRAM TEST
  TABLE=cuda timeout 300 compute-sanitizer --tool "$1" --error-exitcode 9 "$bin/$2" "$3" \
    > "$logs/$1 $2 $3" 2>&1 &
}

for test in pack other_block f8 becomes matmul_epilogue matmul_rows matmul_of_few cast embed norm \
  rope attn glu experts sample top; do
  check memcheck test_kernels "$test"
done
check memcheck test_session a_batch_is_each_alone
check memcheck test_session decoding_far
for test in matmul_rows matmul_of_few norm attn_rows sample; do
  check racecheck test_kernels "$test"
done
check racecheck test_session cache_types # the chain of decode
wait

passed=0 failed=0
for log in "$logs"/*; do
  if grep -qE 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$log" &&
    grep -qE '^[1-9][0-9]* passed, 0 failed' "$log"; then
    passed=$((passed + 1))
    echo "ok ${log##*/}"
  else
    failed=$((failed + 1))
    tail -n 25 "$log"
    echo "FAIL ${log##*/}"
  fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
