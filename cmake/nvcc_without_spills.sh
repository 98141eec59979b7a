#!/usr/bin/env bash
# Runs nvcc (given with -Xptxas=-v), hides the statistics, and fails on slowdowns that no test detects: a kernel spills
# registers, keeps an array on the stack, or takes more registers than kernels/cuda/expected_code.txt allows. For kernels
# that are not in that table, the compiler puts up to 16 bytes on the stack in branches for unaligned rows.
set -uo pipefail
table=$(dirname "$0")/../kernels/cuda/expected_code.txt
output=$("$@" 2>&1)
status=$?
c++filt <<<"$output" | awk '
  FNR == NR {
    if (/^[0-9]/) {
      most[++rows] = $1
      sub(/^([0-9]+ +)+/, "")
      part[rows] = $0
    }
    next
  }
  /^ptxas info/ {
    if (/ Compiling entry function /) arch = $NF
    if (sub(/.* Function properties for /, "")) {
      gsub(/tessera::(kernels::(cuda::)?)?|\(anonymous namespace\)::/, "")
      kernel = $0
      registers = 255
      stack = 16
      for (row = 1; row <= rows; ++row)
        if (index(kernel, part[row])) { registers = most[row]; stack = 0 }
    }
    if (arch ~ /sm_90a/ && sub(/.* Used /, "") && $1 + 0 > registers + 0) {
      print "too many registers: " kernel ": " $1 " on sm_90a; kernels/cuda/expected_code.txt allows " registers
      slow = 1
    }
    next
  }
  /bytes stack frame, .* spill/ {
    if ($5 + $9 > 0) { print "spilled registers: " kernel ":" $0; slow = 1 }
    else if ($1 > stack) { print "array on the stack: " kernel ":" $0; slow = 1 }
    next
  }
  { print }
  END { exit slow }
' "$table" - | sed '/^$/d' >&2
if [[ ${PIPESTATUS[*]} != "0 0 0" && $status -eq 0 ]]; then status=1; fi
exit "$status"
