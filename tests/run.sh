#!/usr/bin/env bash
# run.sh SUITE...: runs commands that each close with "N passed, N failed, N skipped", shows what
# they print, and closes with the sum. A suite that ends without such a line, or fails without
# saying so, counts as one failure. A suite gets LIMIT seconds (1200).
passed=0 failed=0 skipped=0
out=$(mktemp) || exit 1
trap 'rm -f "$out"' EXIT

for suite in "$@"; do
  echo "== $suite"
  began=$SECONDS
  # shellcheck disable=SC2086
  timeout "${LIMIT:-1200}" $suite 2>&1 | tee "$out"
  status=${PIPESTATUS[0]}
  last=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$out" | tail -n 1)
  if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+) ]]; then
    passed=$((passed + BASH_REMATCH[1]))
    failed=$((failed + BASH_REMATCH[2]))
    skipped=$((skipped + BASH_REMATCH[3]))
    [ "$status" -eq 0 ] || [ "${BASH_REMATCH[2]}" -gt 0 ] || failed=$((failed + 1))
  else
    echo "FAIL $suite: no closing line, exit status $status"
    failed=$((failed + 1))
  fi
  echo "   ($((SECONDS - began)) s)"
done

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
