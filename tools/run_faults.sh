#!/usr/bin/env bash
# Kills, stops and fails a rank at every labelled point of a run. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'USAGE'
usage: tools/run_faults.sh [--jobs N] [--build DIR]

Builds the release preset and runs the whole fault campaign on training with 2, 3 and 4 ranks: at each
labelled point, each rank in turn is killed, stopped, aborts, exits, or finds no memory. Prints the
table of docs/faults.md. N runs go on at once (default 4: they mostly wait); DIR is the build folder
(default build/release). The state of a run takes about 1 MiB in /dev/shm, or in TMPDIR if that is set.

Exit code 0 if every run ended in time and every survivor named the culprit, 1 if not, 2 on a wrong
option.
USAGE
}

jobs=4
build=build/release
while [[ $# -gt 0 ]]; do
  case $1 in
    --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "run_faults: --jobs needs a positive number" >&2; exit 2; }
      jobs=$2
      shift
      ;;
    --build)
      [[ -n ${2:-} ]] || { echo "run_faults: --build needs a folder" >&2; exit 2; }
      build=$2
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "run_faults: unknown option '$1'; see tools/run_faults.sh --help" >&2; exit 2 ;;
  esac
  shift
done

cmake --preset release -B "$build" >/dev/null
cmake --build "$build" --parallel --target fault_tests
[[ -n ${TMPDIR:-} || ! -d /dev/shm ]] || export TMPDIR=/dev/shm
export TESSERA_FAULT_POINTS=all TESSERA_FAULT_JOBS=$jobs
echo "| fault | runs | not named by all | other exit code | lost | late | worst time | withheld |"
echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
"$build/tests/faults/fault_tests" --source-file="*run_faults_test.cpp" || exit 1
