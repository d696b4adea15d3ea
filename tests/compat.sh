#!/usr/bin/env bash
# Compiles transformer.h and its companions with every compiler and standard that is promised, with
# strict warnings as errors, and beside an application's own stb_ds. What runs, is run.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
tiny=tests/data/models/tiny
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
strict="-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -I."
libs="-lm -lpthread"

printf '#define TRANSFORMER_IMPLEMENTATION\n#include "transformer.h"\n%s\n' \
  'int main(void) { return tfm_next(0, 0) == TFM_E_ARG ? 0 : 1; }' > "$work/all.c"
printf '#include "transformer.h"\nint answer(void);\nint answer(void) { return TFM_END; }\n' \
  > "$work/declarations.c"

check() { # NAME COMMAND...
  local name=$1
  shift
  if "$@" > "$work/log" 2>&1; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAIL $name: $*"
    head -n 30 "$work/log"
  fi
}

skip() { # NAME REASON
  skipped=$((skipped + 1))
  echo "skip $1: $2"
}

check_language() { # COMPILER LANGUAGE-FLAGS...
  local cc=$1 lang="${*:2}" use
  # shellcheck disable=SC2086
  {
    check "$cc $lang declarations" $cc $lang $strict -fsyntax-only "$work/declarations.c"
    check "$cc $lang optimised" $cc $lang $strict -O2 -o "$work/all" "$work/all.c" -x none $libs
    check "$cc $lang runs" "$work/all"
    check "$cc $lang TFM_STATIC" $cc $lang $strict -Wno-unused-function -DTFM_STATIC \
      -o "$work/all" "$work/all.c" -x none $libs
    for use in -DTFM_USE_CPU -DTFM_USE_CUDA "-DTFM_USE_CPU -DTFM_USE_CUDA"; do
      check "$cc $lang $use" $cc $lang $strict $use -fsyntax-only "$work/all.c"
    done
    check "$cc $lang transformer_cpu.c" $cc $lang $strict -O2 -c -o "$work/cpu.o" transformer_cpu.c
    check "$cc $lang links the companion" $cc $lang $strict -DTFM_USE_CPU -o "$work/all" \
      "$work/all.c" -x none "$work/cpu.o" $libs
  }
}

# The application's stb_ds does not promise our warnings, so only the default ones here.
check_stb() { # COMPILER before|after LANGUAGE-FLAGS...
  local cc=$1 order=$2 lang="${*:3}"
  # shellcheck disable=SC2086
  check "$cc $lang stb_ds $order" $cc $lang -g -fsanitize=address,undefined -Werror -o "$work/stb" \
    "tests/compat_stb_$order.c" -x none $libs
  check "$cc $lang stb_ds $order, run" "$work/stb" $tiny
}

for cc in gcc clang; do
  if ! command -v $cc > /dev/null; then
    skip $cc "it is not installed"
    continue
  fi
  check_language $cc -std=c11 -Wstrict-prototypes
  check_language $cc -std=c17 -Wstrict-prototypes
  check_stb $cc before -std=gnu11
  check_stb $cc after -std=gnu11
  if ! echo 'int main() { return 0; }' | $cc -x c++ -fsyntax-only - 2> /dev/null; then
    skip "$cc C++17" "it has no C++"
    continue
  fi
  check_language $cc -x c++ -std=c++17
  # shellcheck disable=SC2086
  check "$cc compat.cpp" $cc -std=c++17 $strict -o "$work/cpp" tests/compat.cpp $libs
  check "$cc compat.cpp, run" "$work/cpp"
  check "$cc examples/cpp.cpp" $cc -std=c++17 $strict -fsyntax-only examples/cpp.cpp
done

for example in examples/*.c bench/bench.c; do # shellcheck disable=SC2086
  check "$example" gcc -std=c11 $strict -Wstrict-prototypes -fsyntax-only "$example"
done

link_cuda() { # all four combinations: none, CPU and what nvcc adds
  nvcc -arch=sm_90a -c -o "$work/cuda.o" transformer_cuda.cu &&
    gcc -O1 -I. -c -o "$work/cpu.o" transformer_cpu.c &&
    gcc -I. -DTFM_USE_CUDA -c -o "$work/a.o" "$work/all.c" &&
    nvcc -o "$work/a" "$work/a.o" "$work/cuda.o" -lcublasLt -lpthread &&
    gcc -I. -DTFM_USE_CUDA -DTFM_USE_CPU -c -o "$work/a.o" "$work/all.c" &&
    nvcc -o "$work/a" "$work/a.o" "$work/cuda.o" "$work/cpu.o" -lcublasLt -lpthread && "$work/a"
}
if command -v nvcc > /dev/null; then check "links CUDA" link_cuda
else skip "links CUDA" "nvcc is not installed"; fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
