#!/usr/bin/env bash
# portability.sh [TARGET...]: the core tests on other machines and C libraries, through Debian's
# cross compilers, qemu-user and wine. Portable code only (-O1, no companion), linked statically
# where that saves an emulated loader. What is not installed is skipped, with its package's name.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
tests="test_formats test_model test_kernels test_tokenizer"
work=$(mktemp -d) || exit 1
trap 'wineserver -k 2> /dev/null; rm -rf "$work"' EXIT
export WINEPREFIX=$work/wine WINEDEBUG=-all

# name, compiler, what runs its programs, packages
x86=qemu-i386
[ "$(uname -m)" = x86_64 ] && x86=env # itself
targets="
aarch64  aarch64-linux-gnu-gcc   qemu-aarch64  gcc-aarch64-linux-gnu,qemu-user
i686     i686-linux-gnu-gcc      $x86          gcc-i686-linux-gnu,qemu-user
musl     musl-gcc                env           musl-tools
windows  x86_64-w64-mingw32-gcc  wine          gcc-mingw-w64-x86-64,wine
s390x    s390x-linux-gnu-gcc     refused       gcc-s390x-linux-gnu"

# stb_ds.h by itself: a cross compiler must not see the rest of /usr/include.
stb=$(${CC:-cc} -M -x c -DTRANSFORMER_IMPLEMENTATION transformer.h | tr ' ' '\n' |
  grep -m 1 'stb_ds\.h$')
mkdir "$work/include" && cp "$stb" "$work/include/" || exit 1

note() { # STATUS NAME: the log tells why it failed
  if [ "$1" -eq 0 ]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    echo "FAIL $2"
    tail -n 20 "$work/log"
  fi
}

run() { # TARGET COMPILER RUNNER TEST
  [ "$1" = i686 ] && set -- "$@" -msse2 -mfpmath=sse
  "$2" -std=gnu11 -O1 -Wall -Wextra -I"$work/include" -static "${@:5}" -o "$work/$1.exe" \
    "tests/$4.c" -lm -lpthread > "$work/log" 2>&1 &&
    timeout 600 "$3" "$work/$1.exe" > "$work/log" 2>&1
  note $? "$4 on $1"
}

# Big-endian machines are refused when compiled, not found out when weights are garbage.
refused() { # TARGET COMPILER
  ! "$2" -fsyntax-only -I"$work/include" -x c transformer.h > "$work/log" 2>&1 &&
    grep -q 'error.*little-endian' "$work/log"
  note $? "$1 is refused"
}

while read -r name compiler runner packages; do
  [ -n "$name" ] && { [ $# -eq 0 ] || [[ " $* " == *" $name "* ]]; } || continue
  if ! command -v "$compiler" > /dev/null ||
    { [ "$runner" != refused ] && ! command -v "$runner" > /dev/null; }; then
    skipped=$((skipped + 1))
    echo "skip $name: $compiler or $runner is not installed: ${packages/,/ }"
  elif [ "$runner" = refused ]; then
    refused "$name" "$compiler"
  else
    for test in $tests; do run "$name" "$compiler" "$runner" "$test" < /dev/null; done
  fi
done <<< "$targets"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
