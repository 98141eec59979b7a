#!/usr/bin/env bash
# Builds tessera and runs its tests. See usage() below.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'EOF'
usage: tools/test.sh [options]

Runs each test once: end-to-end tests in the release build (with the CUDA plugins if nvcc is found), unit
tests and fuzz corpora under the address and undefined-behaviour sanitizers, tests of communication and
threads under the thread sanitizer. The end-to-end tests include a sample of the faults of
tools/campaign.sh, a different one for each commit.

  --quick      only unit tests of files that changed since --quick last passed
  --asan       only all tests under the address and undefined-behaviour sanitizers
  --tsan       only all tests under the thread sanitizer
  --no-setup   don't install missing packages
  --jobs N     parallel jobs (default: the number of processors)
  --help       this text

Ends with a table of stages; tools/check_times.py shows the slowest objects and tests.
Exit code 0 if everything passed, 1 if something failed, 2 on a wrong option. Reads no input.
EOF
}

mode=default
setup=yes
jobs=$(nproc)
while [[ $# -gt 0 ]]; do
  case $1 in
    --quick | --asan | --tsan) mode=${1#--} ;;
    --no-setup) setup=no ;;
    --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || { echo "test: --jobs needs a positive number" >&2; exit 2; }
      jobs=$2
      shift
      ;;
    --help | -h) usage; exit 0 ;;
    *) echo "test: unknown option '$1'; see tools/test.sh --help" >&2; exit 2 ;;
  esac
  shift
done

names=()
results=()
times=()
cpu_times=()
failed=0

# Sets `cpu` to the CPU seconds of finished child processes.
cpu_seconds() {
  local lines
  lines=$(mktemp) && times >"$lines"
  cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%d", 60 * ($1 + $3) + $2 + $4 }' "$lines")
  rm -f "$lines"
}

# stage NAME COMMAND...: runs a command and records its result for the summary.
stage() {
  local name=$1 start=$SECONDS result=ok cpu before
  shift
  cpu_seconds
  before=$cpu
  printf '\n== %s\n' "$name"
  "$@" </dev/null || { result=FAILED; failed=1; }
  names+=("$name")
  results+=("$result")
  times+=("$((SECONDS - start))")
  cpu_seconds
  cpu_times+=("$((cpu - before))")
  [[ $result == ok ]]
}

check_format() {
  git ls-files --cached --others --exclude-standard '*.h' '*.cpp' '*.cu' | xargs clang-format --dry-run --Werror
}

# build PRESET TARGET...
build() {
  local preset=$1
  shift
  cmake --preset "$preset" >/dev/null && cmake --build "build/$preset" --parallel "$jobs" --target "$@"
}

# check PRESET [ctest options]
check() {
  local preset=$1
  shift
  ctest --test-dir "build/$preset" --parallel "$jobs" --output-on-failure --no-tests=error \
    --output-junit "$PWD/build/$preset/tests.xml" "$@"
}

# Builds and runs the unit tests of files that changed since the last pass.
quick() {
  local stamp=build/asan/quick.passed names programs pattern
  mkdir -p build
  touch build/quick.started
  cmake --preset asan >/dev/null || return 1
  names=$(python3 -B tools/affected_tests.py build/asan "$stamp") || return 1
  if [[ -z $names ]]; then
    echo "no unit test is affected by the changes"
    return 0
  fi
  mapfile -t programs < <(sed 's/[.].*//' <<<"$names" | sort -u)
  build asan "${programs[@]}" || return 1
  pattern=$(sed 's/[.+]/[&]/g' <<<"$names" | paste -sd '|')
  check asan -R "^($pattern)\$" && mv build/quick.started "$stamp"
}

# Builds for the sanitizers and runs the unit tests in the background at the lowest priority, since
# end-to-end tests mostly sleep.
start_unit_tests() {
  (
    renice -n 19 -p "$BASHPID" >/dev/null
    build asan tests-unit && build tsan tests-dist && check asan -L '^unit$'
  ) >build/sanitizers.log 2>&1 </dev/null &
  sanitizers=$!
}
finish_unit_tests() {
  local result=0
  wait "$sanitizers" || result=1
  sed -n '/^Internal ctest/,$p' build/sanitizers.log | grep . || tail -n 100 build/sanitizers.log
  return "$result"
}

# The seed selects the sample of faults, and the order of warps on fibers; by default it is the commit.
if [[ -z ${TESSERA_CAMPAIGN_SEED:-} ]]; then
  commit=$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0)
  export TESSERA_CAMPAIGN_SEED=$((16#$commit))
fi
export TESSERA_FIBER_SEED=${TESSERA_FIBER_SEED:-$TESSERA_CAMPAIGN_SEED}

[[ $setup == no ]] || stage "packages" tools/setup.sh
case $mode in
  quick) stage "asan: affected unit tests" quick ;;
  asan | tsan) stage "$mode: build" build "$mode" all && stage "$mode: all tests" check "$mode" ;;
  default)
    if command -v clang-format >/dev/null; then stage "format" check_format; fi
    stage "release: build" build release tests-e2e
    built=$?
    start_unit_tests
    [[ $built -ne 0 ]] || stage "release: end-to-end tests" check release -L '^e2e$'
    stage "asan, tsan: build; asan: unit tests" finish_unit_tests
    stage "tsan: communication and threads" check tsan -L '^dist$'
    ;;
esac

printf '\n%-40s %-8s %7s %7s\n' "stage" "result" "seconds" "CPU s"
for i in "${!names[@]}"; do
  printf '%-40s %-8s %7d %7d\n' "${names[$i]}" "${results[$i]}" "${times[$i]}" "${cpu_times[$i]}"
done
cpu_seconds
printf '%-40s %-8s %7d %7d\n' "total" "$([[ $failed -eq 0 ]] && echo ok || echo FAILED)" "$SECONDS" "$cpu"
if [[ $mode == default && -e build/release/build.ninja && ! -e build/release/bin/libtessera_cuda.so ]]; then
  printf '\ntest: CUDA WAS NOT COMPILED: no usable nvcc. CUDA kernels were tested as host code on fibers.\n'
fi
exit "$failed"
