#!/usr/bin/env bash
# Feeds the parsers of untrusted files with libFuzzer. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'USAGE'
usage: tools/fuzz.sh [--seconds N] [--jobs N] [TARGET...]

Builds the fuzz targets with clang under the address and undefined-behaviour sanitizers, and runs
each for N seconds (default 60) from the seeds in tests/fuzz/seeds and what earlier runs found.
Targets: all of tests/fuzz, or those named (index, safetensors, dcp_metadata, ...). An input that
fails is kept, and its path printed: build/fuzz/tests/fuzz/fuzz_TARGET FILE repeats it.

Exit code 0 if all passed, 1 if one failed, 2 on a wrong option.
USAGE
}

seconds=60
jobs=$(nproc)
targets=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --seconds | --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: $1 needs a positive number" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    -*) echo "fuzz: unknown option '$1'; see tools/fuzz.sh --help" >&2; exit 2 ;;
    *)
      [[ -f tests/fuzz/$1.cpp ]] || { echo "fuzz: there is no target '$1' in tests/fuzz" >&2; exit 2; }
      targets+=("$1")
      ;;
  esac
  shift
done

cmake --preset fuzz -DTESSERA_FUZZ_SECONDS="$seconds" >/dev/null
sources=("${targets[@]/%/.cpp}")
[[ ${#targets[@]} -gt 0 ]] || sources=(tests/fuzz/*.cpp)
built=()
for source in "${sources[@]}"; do built+=("fuzz_$(basename "$source" .cpp)"); done
cmake --build build/fuzz --parallel "$jobs" --target "${built[@]}"
pattern=$(IFS='|'; echo "${built[*]/#fuzz_/}")
ctest --test-dir build/fuzz --parallel "$jobs" --output-on-failure --no-tests=error -R "^fuzz\.($pattern)$" || exit 1
