#!/usr/bin/env bash
# Builds tessera and runs its tests. See usage() below.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'EOF'
usage: tools/test.sh [options]

Without options: the release build with the whole suite, then the parts that sanitizers have most to
say about: input parsing, checkpoints and kernels (those of CUDA, too, as fibers) with the address
and undefined-behaviour sanitizers, communication and threads with the thread sanitizer. Where clang
and its libFuzzer are, parsers of untrusted files are fuzzed (tools/fuzz.sh), for a minute each where
CI is set, else for 20 seconds.

  --quick      the release build and its unit tests only
  --asan       the whole suite with address and undefined-behaviour sanitizers only
  --tsan       the whole suite with the thread sanitizer only
  --no-setup   don't look for missing packages
  --jobs N     parallel jobs of build and tests (default: the number of processors)
  --help       this text

Where CI is set and nvcc is missing or too old, the last lines say that CUDA was not compiled.
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
no_cuda=

# Seconds of processors that ended commands have taken, into `cpu`.
cpu_seconds() {
  local lines
  lines=$(mktemp) && times >"$lines"
  cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%d", 60 * ($1 + $3) + $2 + $4 }' "$lines")
  rm -f "$lines"
}

# stage NAME COMMAND...: runs a command, keeps its result for the summary, and goes on.
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

# build PRESET [TARGET...], with the options of the array `options`. Where everything is built from
# nothing, and no compiler cache helps the next time, headers are parsed once.
options=()
build() {
  local preset=$1 headers=OFF
  shift
  [[ -n ${CI:-} ]] && headers=ON
  cmake --preset "$preset" "${options[@]}" -DTESSERA_PRECOMPILED_HEADERS=$headers >/dev/null &&
    cmake --build "build/$preset" --parallel "$jobs" ${1:+--target "$@"}
}

# check PRESET [ctest options]: sanitizers make tests up to 20 times slower.
check() {
  local preset=$1
  shift
  ctest --test-dir "build/$preset" --parallel "$jobs" --output-on-failure --no-tests=error "$@"
}

# Whether the release build, the one that has it, was configured without the CUDA backend.
without_cuda() {
  [[ -e build/release/build.ninja ]] && ! grep -q 'libtessera_cuda[.]so' build/release/build.ninja
}

has_fuzzer() {
  command -v clang++ >/dev/null && [[ -e $(clang++ -print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer-$(uname -m).a ]]
}

[[ $setup == no ]] || stage "packages" tools/setup.sh

if [[ $mode == default || $mode == quick ]]; then
  if command -v clang-format >/dev/null; then stage "format" check_format; fi
  if stage "release: build" build release; then
    # A machine without a CUDA toolkit that serves passes; but what CI did not check must not look checked.
    [[ -z ${CI:-} ]] || ! without_cuda || no_cuda=yes
    if [[ $mode == quick ]]; then
      stage "release: unit tests" check release -L unit
    else
      stage "release: all tests" check release
    fi
  fi
fi

if [[ $mode == asan || $mode == tsan ]]; then
  options=(-DTESSERA_GENERIC_CPU=OFF)
  stage "$mode: build" build "$mode" && stage "$mode: all tests" check "$mode"
fi

if [[ $mode == default ]]; then
  # All kernels, but each only once: the CPU's for other processors take minutes to compile.
  options=(-DTESSERA_GENERIC_CPU=ON)
  stage "asan, kernels: build" build asan base_test kernels_test fiber_test &&
    stage "asan: kernels" check asan -R "^(base|kernels|fiber)_tests?\."
  # With clang, where it is: a second compiler, and the fuzz targets are made of the same libraries.
  preset=asan
  has_fuzzer && preset=fuzz
  stage "asan, files: build" build "$preset" io_tests io_data_tests tools_config_tests \
    tools_report_tests &&
    stage "asan: parsers and files" \
      check "$preset" -R "^(io|io_data|tools_config|tools_report)_tests?\."
  stage "tsan: build" build tsan base_test comm_test comm_control_test launcher_test &&
    stage "tsan: communication and threads" check tsan -R "^(base|comm|comm_control|launcher)_tests?\."
  if has_fuzzer; then
    stage "fuzz: parsers" tools/fuzz.sh --jobs "$jobs" --seconds "$([[ -n ${CI:-} ]] && echo 60 || echo 20)"
  else
    echo "test: no clang with libFuzzer (Debian: clang, libclang-rt-14-dev): nothing is fuzzed"
  fi
fi

printf '\n%-40s %-8s %7s %7s\n' "stage" "result" "seconds" "of CPU"
for i in "${!names[@]}"; do
  printf '%-40s %-8s %7d %7d\n' "${names[$i]}" "${results[$i]}" "${times[$i]}" "${cpu_times[$i]}"
done
cpu_seconds
printf '%-40s %-8s %7d %7d\n' "total" "$([[ $failed -eq 0 ]] && echo ok || echo FAILED)" "$SECONDS" "$cpu"
if [[ -n $no_cuda ]]; then
  printf '\ntest: CUDA WAS NOT COMPILED: there is no nvcc here, or none that serves, so nothing above tells whether the\n'
  printf 'test: CUDA backend compiles. Its kernels were compiled for the host alone, as fibers.\n'
fi
exit "$failed"
