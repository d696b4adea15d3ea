#!/usr/bin/env bash
# fuzz.sh replay NAME...: every committed input of tests/data/fuzz/NAME once more.
# fuzz.sh run SECONDS NAME...: looks for new ones; a finding is left in build/fuzz/.
# NAME is a tests/NAME.c with LLVMFuzzerTestOneInput; needs clang with libFuzzer, else skipped.
passed=0 failed=0 skipped=0
mode=$1
shift
[ "$mode" = run ] && seconds=$1 && shift

fuzz() { # NAME
  local name=$1 corpus=tests/data/fuzz/${1#fuzz_} work=build/fuzz/corpus/$1
  if ! make --no-print-directory -s "build/fuzz/$name"; then return 1; fi
  if [ "$mode" = run ]; then
    mkdir -p "$work" "$corpus"
    "build/fuzz/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
      -print_final_stats=1 -artifact_prefix="build/fuzz/$name-" "$work" "$corpus" 2>&1 | tail -n 25
    return "${PIPESTATUS[0]}"
  fi
  find "$corpus" -type f -print0 2> /dev/null |
    xargs -0 -r "build/fuzz/$name" -timeout=10 -rss_limit_mb=2048 > "build/fuzz/$name.log" 2>&1 ||
    { tail -n 40 "build/fuzz/$name.log"; return 1; }
}

have_fuzzer() {
  echo 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return !d && n; }' |
    clang -x c -fsanitize=fuzzer -o build/fuzz/probe - 2> /dev/null
}

mkdir -p build/fuzz
if ! have_fuzzer; then
  echo "skip $*: clang with libFuzzer is not installed"
  skipped=$#
  set --
fi
for name in "$@"; do
  if fuzz "$name"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $name"; fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
