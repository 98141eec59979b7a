#!/usr/bin/env bash
# Runs nvcc (given with -Xptxas=-v), hides the statistics, and fails if a kernel spills registers or keeps an
# array on the stack, slowdowns that no test detects. The compiler puts up to 16 bytes there in branches for
# unaligned rows.
set -uo pipefail
output=$("$@" 2>&1)
status=$?
awk '
  /^ptxas info/ {
    if ($0 ~ /Function properties for/) kernel = $NF
    next
  }
  /bytes stack frame, .* spill/ {
    if ($5 + $9 > 0) { print "spilled registers: " kernel ":" $0; slow = 1 }
    else if ($1 > 16) { print "array on the stack: " kernel ":" $0; slow = 1 }
    next
  }
  { print }
  END { exit slow }
' <<<"$output" | sed '/^$/d' >&2
if [[ ${PIPESTATUS[0]} -ne 0 && $status -eq 0 ]]; then status=1; fi
exit "$status"
