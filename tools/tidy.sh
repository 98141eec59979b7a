#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy. See usage() below.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'EOF'
usage: tools/tidy.sh [--since COMMIT] [FILE.cpp ...]

Checks the given files, or files that differ from COMMIT, or all files except the fuzz targets, which only
clang builds. About 10 s per file, one job per CPU. Needs clang-tidy and jq. Writes to build/tidy.

Exit code 0 without findings, 1 with findings, 2 on a wrong option or a missing program.
EOF
}

mapfile -t files < <(git ls-files '*.cpp' ':!tools/examples' ':!tests/fuzz')
case ${1:-} in
  --help | -h) usage; exit 0 ;;
  --since) mapfile -t files < <(git diff --name-only --diff-filter=d "${2:?a commit}" -- '*.cpp' \
                                  ':!tools/examples' ':!tests/fuzz') ;;
  -*) echo "tidy: unknown option '$1'; see tools/tidy.sh --help" >&2; exit 2 ;;
  ?*) files=("$@") ;;
esac
[[ ${#files[@]} -gt 0 ]] || { echo "tidy: no files to check"; exit 0; }

for program in clang-tidy jq; do
  command -v "$program" >/dev/null || { echo "tidy: $program is missing" >&2; exit 2; }
done
cmake --preset release -B build/tidy -DTESSERA_BUILD_BENCH=ON -DTESSERA_UNITY=OFF >/dev/null
# Check CPU kernels once instead of once per CPU level. They use g++ options and a builtin that clang lacks;
# a stub of the right type is enough for clang-tidy.
mkdir -p build/tidy/once
jq 'unique_by(.file) | map(.command |= gsub(" -fno-thread-jumps| -fopenmp-simd"; "")
    + " \"-D__builtin_shuffle(a,...)=((void)(__VA_ARGS__),a)\" -Wno-unused-value")' \
  build/tidy/compile_commands.json >build/tidy/once/compile_commands.json
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" clang-tidy -p build/tidy/once --quiet \
    2> >(grep -v 'warnings\? generated' >&2) ||
  { echo "tidy: findings in the ${#files[@]} files, see above" >&2; exit 1; }
echo "tidy: no findings in ${#files[@]} files"
