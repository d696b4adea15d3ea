#!/usr/bin/env bash
# cuda_sanitize.sh: the kernels under compute-sanitizer, on a GPU: memcheck for every entry, decode
# and layer; racecheck where blocks share memory. B=build/cuda names the programs' folder.
set -u
bin=${B:-build/cuda}
if ! command -v compute-sanitizer > /dev/null; then
  echo "skip cuda_sanitize: compute-sanitizer is not installed"
  echo "0 passed, 0 failed, 1 skipped"
  exit 0
fi

passed=0 failed=0
check() { # check TOOL PROGRAM TEST
  local tool=$1 out seconds=$SECONDS
  shift
  if out=$(TABLE=cuda timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$bin/$1" \
    "$2" 2>&1) && grep -qE 'ERROR SUMMARY: 0 |RACECHECK SUMMARY: 0 hazards' <<< "$out"; then
    passed=$((passed + 1))
    echo "ok $tool $* $((SECONDS - seconds)) s"
  else
    failed=$((failed + 1))
    tail -n 25 <<< "$out"
    echo "FAIL $tool $*"
  fi
}

for test in pack matmul cast embed norm rope attn glu experts sample top; do
  check memcheck test_kernels "$test"
done
check memcheck test_session a_batch_is_each_alone
for test in matmul_rows norm attn_rows sample; do check racecheck test_kernels "$test"; done
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
