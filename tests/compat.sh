#!/usr/bin/env bash
# Compiles transformer.h and its companions with every compiler and standard that is promised, with
# strict warnings as errors, and beside an application's own stb_ds. What runs, is run.
# compat.sh GROUP runs one group of checks; without, all of them, as many at a time as processors.
cd "$(dirname "$0")/.." || exit 1
groups="gcc_c clang_c gcc_cpp clang_cpp stb examples"
if [ $# = 0 ]; then
  logs=$(mktemp -d) || exit 1
  trap 'rm -rf "$logs"' EXIT
  # shellcheck disable=SC2016,SC2086
  printf '%s\n' $groups | xargs -P "$(nproc)" -I{} \
    sh -c 'tests/compat.sh {} > "$0/{}" 2>&1' "$logs"
  cat "$logs"/* | grep -v '^[0-9]* passed, '
  cat "$logs"/* | awk '/^[0-9]+ passed, / { p += $1; f += $3; s += $5; n++ }
    END { f += n != groups; print p + 0 " passed, " f + 0 " failed, " s + 0 " skipped"; exit f > 0 }
    ' groups="$(wc -w <<< "$groups")"
  exit
fi
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

has() { # COMPILER
  command -v "$1" > /dev/null || { skip "$1" "it is not installed"; return 1; }
}

has_cpp() { # COMPILER
  has "$1" || return 1
  echo 'int main() { return 0; }' | "$1" -x c++ -fsyntax-only - 2> /dev/null && return
  skip "$1 C++17" "it has no C++"
  return 1
}

check_c() { # COMPILER
  has "$1" || return
  check_language "$1" -std=c11 -Wstrict-prototypes
  # shellcheck disable=SC2086
  check "$1 -std=c17" "$1" -std=c17 $strict -fsyntax-only "$work/all.c"
}

check_cpp() { # COMPILER
  has_cpp "$1" || return
  check_language "$1" -x c++ -std=c++17
  # shellcheck disable=SC2086
  check "$1 compat.cpp" "$1" -std=c++17 $strict -o "$work/cpp" tests/compat.cpp $libs
  check "$1 compat.cpp, run" "$work/cpp"
  # shellcheck disable=SC2086
  check "$1 examples/cpp.cpp" "$1" -std=c++17 $strict -fsyntax-only examples/cpp.cpp
}

case $1 in
  gcc_c) check_c gcc ;;
  clang_c) check_c clang ;;
  gcc_cpp) check_cpp gcc ;;
  clang_cpp) check_cpp clang ;;
  stb)
    for cc in gcc clang; do
      has $cc || continue
      check_stb $cc before -std=gnu11
      check_stb $cc after -std=gnu11
    done ;;
  examples)
    for example in examples/*.c bench/bench.c; do # shellcheck disable=SC2086
      check "$example" gcc -std=c11 $strict -Wstrict-prototypes -fsyntax-only "$example"
    done ;;
  *) echo "compat.sh: no group $1; there are $groups" ;;
esac

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
