#!/usr/bin/env bash
# fuzz.sh SECONDS NAME...: looks for inputs that break tests/NAME.c; findings lie in build/fuzz/.
# Needs clang with libFuzzer, else skipped. `make test` replays the committed inputs: replay.c.
passed=0 failed=0 skipped=0
seconds=$1
shift

fuzz() { # NAME: from the committed inputs and those found before
  local corpus=tests/data/fuzz/${1#fuzz_} found=build/fuzz/corpus/$1
  make --no-print-directory -s "build/fuzz/$1" || return 1
  mkdir -p "$found"
  [ -d "$corpus" ] || corpus=
  # shellcheck disable=SC2086
  "build/fuzz/$1" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/$1-" "$found" $corpus 2>&1 | tail -n 25
  return "${PIPESTATUS[0]}"
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
