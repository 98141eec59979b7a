#!/usr/bin/env bash
# Kills, stops and fails ranks wherever that can be done. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'USAGE'
usage: tools/faults.sh [--only runs|saves] [--jobs N] [--build DIR]

Builds the release preset and runs the whole fault campaign with 2, 3 and 4 ranks, and prints the
tables of docs/faults.md.

  runs    at each labelled point of a run, each rank in turn is killed, stopped, aborts, exits, or
          finds no memory; while loading and in a step it hangs, too
  saves   a rank is killed before, after and in the middle of every system call of a save, each call
          fails with each error that it can give, and ranks are stopped; with four, the power is cut
          in 10,000 ways; then 10,000 bits of a checkpoint are flipped, one at a time

N runs go on at once (default 4: they mostly wait); DIR is the build folder (default build/release).
The state of a run takes about 1 MiB in /dev/shm, or in TMPDIR if that is set.

Exit code 0 if nothing was lost, late or blamed on the wrong rank, 1 if something was, 2 on a wrong
option.
USAGE
}

only=
jobs=4
build=build/release
while [[ $# -gt 0 ]]; do
  case $1 in
    --only)
      [[ ${2:-} =~ ^(runs|saves)$ ]] || { echo "faults: --only needs runs or saves" >&2; exit 2; }
      only=$2
      shift
      ;;
    --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "faults: --jobs needs a positive number" >&2; exit 2; }
      jobs=$2
      shift
      ;;
    --build)
      [[ -n ${2:-} ]] || { echo "faults: --build needs a folder" >&2; exit 2; }
      build=$2
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "faults: unknown option '$1'; see tools/faults.sh --help" >&2; exit 2 ;;
  esac
  shift
done

cmake --preset release -B "$build" >/dev/null
cmake --build "$build" --parallel --target fault_tests io_checkpoint_tests
[[ -n ${TMPDIR:-} || ! -d /dev/shm ]] || export TMPDIR=/dev/shm
export TESSERA_FAULT_POINTS=all TESSERA_FAULT_JOBS=$jobs
failed=0
if [[ $only != saves ]]; then
  echo "| fault | runs | not named by all | other exit code | lost | late | worst time | withheld |"
  echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
  "$build/tests/faults/fault_tests" --source-file="*run_faults_test.cpp,*founding_cases_test.cpp" || failed=1
fi
if [[ $only != runs ]]; then
  echo "| fault | points | lost | mixed | wrong culprit | other result | late | worst time |"
  echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
  "$build/tests/faults/fault_tests" --source-file="*save_faults_test.cpp,*power_cut_test.cpp" || failed=1
  TESSERA_BIT_FLIPS=10000 "$build/tests/io/io_checkpoint_tests" --source-file="*flips_test.cpp" || failed=1
fi
exit $failed
