#!/usr/bin/env bash
# portability.sh [TARGET...]: the core tests on other machines and C libraries, through Debian's
# cross compilers, qemu-user and wine, linked statically where that saves an emulated loader. With
# transformer_cpu.c where it has kernels for the machine, else portable code only. What is not
# installed is skipped, with its package's name.
#   portability.sh --compile     that compilers take transformer_cpu.c: `make test` has time for it
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 skipped=0
work=$(mktemp -d) || exit 1
trap 'wineserver -k 2> /dev/null; rm -rf "$work"' EXIT
export WINEPREFIX=$work/wine WINEDEBUG=-all

# name, compiler, what runs its programs, tests, packages
x86=qemu-i386
[ "$(uname -m)" = x86_64 ] && x86=env # itself
core=test_formats,test_model,test_kernels,test_tokenizer
files=$core,test_convert,test_data # big-endian: what is written, too
tuned=test_kernels,test_model,test_gradients
arm=gcc-aarch64-linux-gnu,qemu-user
zarch=gcc-s390x-linux-gnu,qemu-user
targets="
aarch64  aarch64-linux-gnu-gcc   qemu-aarch64                   $core   $arm
neon     aarch64-linux-gnu-gcc   qemu-aarch64,-cpu,cortex-a53   $tuned  $arm
dotprod  aarch64-linux-gnu-gcc   qemu-aarch64,-cpu,neoverse-n1  $tuned  $arm
i8mm     aarch64-linux-gnu-gcc   qemu-aarch64,-cpu,max          $tuned  $arm
i686     i686-linux-gnu-gcc      $x86                           $core   gcc-i686-linux-gnu,qemu-user
musl     musl-gcc                env                            $core   musl-tools
windows  x86_64-w64-mingw32-gcc  wine                           $core   gcc-mingw-w64-x86-64,wine
s390x    s390x-linux-gnu-gcc     qemu-s390x                     $files  $zarch"

# Flags of a target, and sources beside the test: SSE as transformer.h's #error asks, the companion.
declare -A flags=([i686]="-msse2 -mfpmath=sse")
declare -A extra
for name in neon dotprod i8mm windows; do
  flags[$name]=-DTFM_USE_CPU
  extra[$name]=transformer_cpu.c
done

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

skip() { # NAME REASON
  skipped=$((skipped + 1))
  echo "skip $1: $2"
}

installed() { command -v "$1" > /dev/null; }

# Targets with the same compiler and sources share a program. Prints its name.
build() { # TARGET COMPILER TEST
  local program=$work/$2-${extra[$1]:-portable}-$3.exe
  [ -e "$program" ] && { echo "$program"; return; }
  # shellcheck disable=SC2086
  "$2" -std=gnu11 -O1 -Wall -Wextra -I"$work/include" ${flags[$1]} -static -o "$program" \
    "tests/$3.c" ${extra[$1]} -lm -lpthread > "$work/log" 2>&1 && echo "$program"
}

run() { # TARGET COMPILER RUNNER TEST
  local program status=1
  if program=$(build "$1" "$2" "$4"); then
    timeout 900 ${3//,/ } "$program" > "$work/log" 2>&1
    status=$?
  fi
  note $status "$4 on $1"
}

compile() {
  local compiler=aarch64-linux-gnu-gcc
  if installed $compiler; then
    $compiler -std=c11 -fsyntax-only -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror \
      -I"$work/include" transformer_cpu.c > "$work/log" 2>&1
    note $? "transformer_cpu.c on aarch64"
  else
    skip aarch64 "$compiler is not installed: gcc-aarch64-linux-gnu"
  fi
}

test_targets() { # NAME...: all of them without any
  local name compiler runner tests packages
  while read -r name compiler runner tests packages; do
    [ -n "$name" ] && { [ $# -eq 0 ] || [[ " $* " == *" $name "* ]]; } || continue
    if ! installed "$compiler" || ! installed "${runner%%,*}"; then
      skip "$name" "$compiler or ${runner%%,*} is not installed: ${packages/,/ }"
    else
      for test in ${tests//,/ }; do run "$name" "$compiler" "$runner" "$test" < /dev/null; done
    fi
  done <<< "$targets"
}

if [ "${1:-}" = --compile ]; then compile; else test_targets "$@"; fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
