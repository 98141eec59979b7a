#!/usr/bin/env bash
# Kills, stops and fails ranks wherever that can be done. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'USAGE'
usage: tools/faults.sh [--only runs|saves|others] [--jobs N] [--build DIR]

Builds the release preset, tries every fault that a run must survive or name, with 2, 3 and 4
ranks, and prints the tables of docs/faults.md.

  runs    at each labelled point of a run, each rank in turn is killed, stopped, aborts, exits, or
          finds no memory
  saves   a rank is killed before, after and in the middle of every system call of a save, each call
          fails with each error that it can give, and ranks are stopped; with four, the power is cut
          in 10,000 ways
  others  hangs, slow and late ranks, starts that differ, calls that differ, bits that flip, full
          disks, NaN, networks that are cut (as root), strangers, ...: see tools/fault_table.py

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
      [[ ${2:-} =~ ^(runs|saves|others)$ ]] || { echo "faults: --only needs runs, saves or others" >&2; exit 2; }
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
cmake --build "$build" --parallel
[[ -n ${TMPDIR:-} || ! -d /dev/shm ]] || export TMPDIR=/dev/shm
exec python3 -B tools/fault_table.py "$build" --jobs "$jobs" ${only:+--only "$only"}
