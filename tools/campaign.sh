#!/usr/bin/env bash
# The long checks. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'EOF'
usage: tools/campaign.sh faults [--only runs|saves|others] [--jobs N] [--build DIR]
       tools/campaign.sh fuzz [--seconds N] [--jobs N] [TARGET...]
       tools/campaign.sh suites [--jobs N]

faults   injects every fault that a run must survive or report, with 2, 3 and 4 ranks, and prints the tables
         of docs/faults.md (about an hour):
           runs    each rank in turn is killed, stopped, aborts, exits or runs out of memory at each
                   labelled point of a run
           saves   a rank is killed before, after and within every system call of a save; each call
                   fails with each of its errors; with four ranks the power is cut in 10,000 ways
           others  hangs, slow and late ranks, differing starts and calls, flipped bits, full disks,
                   NaN, cut networks (as root), unauthorized clients, ...: see tools/fault_table.py
         N: parallel runs (default 4); DIR: build folder (default build/release). A run needs about 1 MiB in
         TMPDIR (default /dev/shm).
fuzz     runs all targets of tests/fuzz, or the given ones, with libFuzzer for N seconds each (default 60),
         from the seeds and the findings of earlier runs. Needs clang. Prints the path of a failing input;
         build/fuzz/tests/fuzz/fuzz_TARGET FILE repeats it.
suites   runs all tests in the debug build and under each sanitizer with all checks; tools/test.sh runs each
         test in one build only.

Exit code 0 if all passed, 1 if something failed, 2 on a wrong option.
EOF
}

fail() {
  echo "campaign: $1; see tools/campaign.sh --help" >&2
  exit 2
}

what=${1:-}
case $what in
  faults | fuzz | suites) shift ;;
  --help | -h) usage; exit 0 ;;
  *) fail "expected faults, fuzz or suites, not '$what'" ;;
esac

only=
seconds=60
jobs=
build=build/release
targets=()
while [[ $# -gt 0 ]]; do
  case $what:$1 in
    *:--help | *:-h) usage; exit 0 ;;
    *:--jobs | fuzz:--seconds)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "$1 needs a positive number"
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    faults:--only)
      [[ ${2:-} =~ ^(runs|saves|others)$ ]] || fail "--only needs runs, saves or others"
      only=$2
      shift
      ;;
    faults:--build)
      [[ -n ${2:-} ]] || fail "--build needs a folder"
      build=$2
      shift
      ;;
    fuzz:[!-]*)
      [[ -f tests/fuzz/$1.cpp ]] || fail "there is no target '$1' in tests/fuzz"
      targets+=("$1")
      ;;
    *) fail "unknown option '$1'" ;;
  esac
  shift
done

case $what in
  faults)
    cmake --preset release -B "$build" >/dev/null
    cmake --build "$build" --parallel
    [[ -n ${TMPDIR:-} || ! -d /dev/shm ]] || export TMPDIR=/dev/shm
    exec python3 -B tools/fault_table.py "$build" --jobs "${jobs:-4}" ${only:+--only "$only"}
    ;;
  fuzz)
    jobs=${jobs:-$(nproc)}
    cmake --preset fuzz -DTESSERA_FUZZ_SECONDS="$seconds" >/dev/null
    if [[ ${#targets[@]} -eq 0 ]]; then
      for source in tests/fuzz/*.cpp; do
        targets+=("$(basename "$source" .cpp)")
      done
    fi
    cmake --build build/fuzz --parallel "$jobs" --target "${targets[@]/#/fuzz_}"
    pattern=$(IFS='|'; echo "${targets[*]}")
    ctest --test-dir build/fuzz --parallel "$jobs" --output-on-failure --no-tests=error -R "^fuzz\.($pattern)$" || exit 1
    ;;
  suites)
    result=0
    for preset in debug asan tsan; do
      build=build/$preset-all
      cmake --preset "$preset" -B "$build" -DTESSERA_SANITIZE_ALL=ON >/dev/null
      cmake --build "$build" --parallel "${jobs:-$(nproc)}"
      ctest --test-dir "$build" --parallel "${jobs:-$(nproc)}" --output-on-failure --no-tests=error || result=1
    done
    exit "$result"
    ;;
esac
