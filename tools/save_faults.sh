#!/usr/bin/env bash
# Kills, fails and cuts the power at the system calls of a save. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'USAGE'
usage: tools/save_faults.sh [--jobs N] [--build DIR]

Builds the release preset and runs the whole fault campaign on saving with 2, 3 and 4 ranks: a rank
is killed before, after and in the middle of every system call of a save, each call fails with each
error that it can give, and ranks are stopped; with four, the power is cut in 10,000 ways. Then 10,000
bits of a checkpoint are flipped, one at a time. Prints the table of docs/faults.md. N runs go on at once (default 8: they mostly wait); DIR is the build folder (default
build/release). The state of a run takes about 1 MiB in /dev/shm, or in TMPDIR if that is set.

Exit code 0 if nothing was lost, 1 if something was, 2 on a wrong option.
USAGE
}

jobs=8
build=build/release
while [[ $# -gt 0 ]]; do
  case $1 in
    --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "save_faults: --jobs needs a positive number" >&2; exit 2; }
      jobs=$2
      shift
      ;;
    --build)
      [[ -n ${2:-} ]] || { echo "save_faults: --build needs a folder" >&2; exit 2; }
      build=$2
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "save_faults: unknown option '$1'; see tools/save_faults.sh --help" >&2; exit 2 ;;
  esac
  shift
done

cmake --preset release -B "$build" >/dev/null
cmake --build "$build" --parallel --target fault_tests io_checkpoint_tests
[[ -n ${TMPDIR:-} || ! -d /dev/shm ]] || export TMPDIR=/dev/shm
export TESSERA_FAULT_POINTS=all TESSERA_FAULT_JOBS=$jobs
echo "| fault | points | lost | mixed | wrong culprit | other result | late | worst time |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
"$build/tests/faults/fault_tests" --source-file="*save_faults_test.cpp,*power_cut_test.cpp" || exit 1
TESSERA_BIT_FLIPS=10000 "$build/tests/io/io_checkpoint_tests" --source-file="*flips_test.cpp" || exit 1
