#!/usr/bin/env bash
# fuzz.sh replay NAME...: every committed input once more: tests/data/fuzz/gguf/ for fuzz_gguf.
# fuzz.sh run SECONDS NAME...: looks for new ones; a finding is left in build/fuzz/.
# NAME is a tests/NAME.c with LLVMFuzzerTestOneInput; needs clang with libFuzzer, else skipped.
passed=0 failed=0 skipped=0
mode=$1
shift
[ "$mode" = run ] && seconds=$1 && shift

search() { # NAME: from the committed inputs and those found before
  local name=$1 corpus=tests/data/fuzz/${1#fuzz_} found=build/fuzz/corpus/$1
  mkdir -p "$found"
  [ -d "$corpus" ] || corpus=
  # shellcheck disable=SC2086
  "build/fuzz/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="build/fuzz/$name-" "$found" $corpus 2>&1 | tail -n 25
  return "${PIPESTATUS[0]}"
}

replay() { # NAME
  find "tests/data/fuzz/${1#fuzz_}" -type f -print0 |
    xargs -0 -r "build/fuzz/$1" -timeout=10 -rss_limit_mb=2048 > "build/fuzz/$1.log" 2>&1 && return
  tail -n 40 "build/fuzz/$1.log"
  return 1
}

fuzz() { # NAME
  make --no-print-directory -s "build/fuzz/$1" || return 1
  if [ "$mode" = run ]; then search "$1"; else replay "$1"; fi
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
  if [ "$mode" = replay ] && [ ! -d "tests/data/fuzz/${name#fuzz_}" ]; then
    skipped=$((skipped + 1))
    echo "skip $name: tests/data/fuzz/${name#fuzz_} holds no inputs yet"
    continue
  fi
  if fuzz "$name"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL $name"; fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
