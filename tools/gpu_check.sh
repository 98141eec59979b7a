#!/usr/bin/env bash
# shellcheck disable=SC2317  # functions are called by name
# Builds, tests and measures tessera on a machine with a GPU. See usage() below.
set -uo pipefail
caller=$PWD
cd "$(dirname "$0")/.." || exit
root=$PWD

usage() {
  cat <<'EOF'
usage: tools/gpu_check.sh [PART...] [options]

Builds tessera, tests and measures it on the GPU, and writes a report, docs/gpu/DATE-GPU.md, and its data
as JSON. Without a PART: build, test, bench, nccl and sanitize, in less than 10 minutes on 16 cores.

  build      the program, the CUDA backend and their tests
  pack       BUILD.tar.gz, with all of build that the parts below need and the libraries of this system,
             for a GPU machine without compiler or network: unpack it there in the sources, and run
             'test bench nccl sanitize'
  test       kernels and whole training steps on the GPU
  bench      each kernel against the measured roofs; GPT-2 steps against PyTorch
  nccl       collectives over NCCL; runs of one and more ranks against the reference values
  sanitize   kernel tests under compute-sanitizer: memcheck, racecheck, initcheck
  suite      all tests of tessera, with the GPU visible; failed tests again without it

  --build DIR    build folder (default build/gpu-check), kept between runs; for pack in the sources
  --out DIR      folder for report, data and logs (default: report and data in docs/gpu, logs in
                 BUILD/gpu-check)
  --limit S      seconds for all parts together (default 570); steps beyond the limit are left out
  --sizes "S..." GPT-2 sizes of bench (default "124M 350M 1558M"); sizes above 350M run last, if
                 memory and time allow
  --commit REV   commit to name in the report, for sources without git
  --quick        tiny shapes, to test this script
  --help         this text

A failed part does not stop the next. Parts that don't run keep their results from a report of the same
commit, GPU and day. Building needs nvcc, CMake 3.25 and Ninja, the comparison PyTorch in python3. Does
not change GPU settings.

Exit code 0 if everything passed; 1 if something failed, suite was requested and not completed, or there
is no GPU; 2 on a wrong option.
EOF
}

parts=()
build=build/gpu-check
out=
limit=570
sizes="124M 350M 1558M"
commit=
quick=
fail_usage() {
  echo "gpu_check: $1; see tools/gpu_check.sh --help" >&2
  exit 2
}
# absolute PATH: prints it as an absolute path, seen from the caller's directory.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$caller/$1" ;; esac; }
while [[ $# -gt 0 ]]; do
  case $1 in
    build | pack | test | bench | nccl | sanitize | suite) parts+=("$1") ;;
    --build | --out | --limit | --sizes | --commit)
      [[ $# -gt 1 ]] || fail_usage "$1 needs a value"
      value=$2
      case $1 in
        --build | --out) value=$(absolute "$2") ;;
        --limit) [[ $2 =~ ^[1-9][0-9]*$ ]] || fail_usage "--limit needs a positive number of seconds" ;;
      esac
      printf -v "${1#--}" '%s' "$value"
      shift
      ;;
    --quick) quick=yes ;;
    --help | -h) usage; exit 0 ;;
    *) fail_usage "unknown argument '$1'" ;;
  esac
  shift
done
wanted() { [[ " ${parts[*]} " == *" $1 "* ]]; }  # wanted PART: whether it was requested
[[ ${#parts[@]} -gt 0 ]] || parts=(build test bench nccl sanitize)

case $build in /*) ;; *) build=$root/$build ;; esac
deadline=$((SECONDS + limit))
jobs=$(nproc)

# --- the machine ---------------------------------------------------------------------------------

if ! command -v nvcc >/dev/null; then
  for bin in /usr/local/cuda/bin /usr/local/cuda-*/bin /opt/cuda/bin; do
    [[ -x $bin/nvcc ]] && PATH=$bin:$PATH && break
  done
fi
if ! command -v nvcc >/dev/null && wanted build; then
  echo "gpu_check: nvcc was not found; put it on the PATH" >&2
  exit 1
fi
gpu=
if command -v nvidia-smi >/dev/null; then
  gpu=$(timeout 60 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)
fi
for part in "${parts[@]}"; do
  [[ $part == build || $part == pack || -n $gpu ]] ||
    { echo "gpu_check: nvidia-smi shows no GPU here; only 'build' and 'pack' work here" >&2; exit 1; }
done
cuda_root=/usr/local/cuda
! command -v nvcc >/dev/null || cuda_root=$(cd "$(dirname "$(readlink -f "$(command -v nvcc)")")/.." && pwd)

work=$build/gpu-check
mkdir -p "$work/logs"
rm -f "$work"/logs/* "$work"/*.json "$work"/*.jsonl "$work"/clean-*
: >"$work/steps.tsv"
[[ -n $commit ]] || commit=$(git rev-parse --short=12 HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo "+")
[[ $commit != + ]] || commit=unknown

# Links the libraries of NVIDIA's Python packages under the names that linkers expect.
links=$work/nvidia
link_nvidia() {
  local site file name toolkit_has_cublas=no
  if compgen -G "$cuda_root/lib*/libcublasLt.so" >/dev/null || compgen -G "$cuda_root/targets/*/lib/libcublasLt.so" >/dev/null; then
    toolkit_has_cublas=yes
  fi
  mkdir -p "$links/lib" "$links/include"
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null) || return 0
  for file in "$site"/nvidia/{nccl,cudnn,cu13,cublas,cuda_nvrtc}/lib/lib{nccl,cudnn,cublas,nvrtc}*.so*; do
    [[ -e $file ]] || continue
    name=$(basename "$file")
    [[ $name != libcublas* || $toolkit_has_cublas == no ]] || continue
    ln -sf "$file" "$links/lib/$name"
    ln -sf "$file" "$links/lib/${name%%.so*}.so"
  done
  for file in "$site"/nvidia/{nccl,cudnn}/include/*; do
    [[ -e $file ]] && ln -sf "$file" "$links/include/$(basename "$file")"
  done
  if ! compgen -G "$cuda_root/targets/*/include/cublasLt.h" >/dev/null && [[ ! -e $cuda_root/include/cublasLt.h ]]; then
    for file in "$site"/nvidia/{cu13,cublas}/include/cublas*.h; do
      [[ -e $file ]] && ln -sf "$file" "$links/include/$(basename "$file")"
    done
    export CPATH=$links/include${CPATH:+:$CPATH}
  fi
}
link_nvidia
# Not for PyTorch, which ships its own libraries.
library_path=$build/packed:$links/lib:$cuda_root/lib64:$cuda_root/targets/$(uname -m)-linux/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
with_libraries() { LD_LIBRARY_PATH=$library_path "$@"; }
export -f with_libraries
export library_path

plugin=${TESSERA_CUDA_PLUGIN:-$build/bin/libtessera_cuda.so}
export TESSERA_CUDA_PLUGIN=$plugin TESSERA_TEST_CUDA_PLUGIN=$plugin
export TESSERA_TEST_SOURCES=$root TESSERA_TEST_BUILD=$build  # of tests that were built elsewhere

# --- steps ---------------------------------------------------------------------------------------

failed=0
part=
reserved=0  # seconds reserved for later parts

note() {  # note NAME RESULT SECONDS LOG WHY
  printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$part" "$@" >>"$work/steps.tsv"
  printf '   %-52s %-8s %4s s  %s\n' "$1" "$2" "$3" "$5"
}

# skip NAME WHY
skip() { note "$1" skipped 0 - "$2"; }

# step NAME SECONDS COMMAND...: runs a command with a time limit and logs its output.
step() {
  local name=$1 most=$2 start=$SECONDS log rc
  shift 2
  log=$part-$(tr -c 'a-zA-Z0-9\n' - <<<"$name").log
  local left=$((deadline - SECONDS - reserved))
  [[ $most -le $left ]] || most=$left
  if [[ $most -lt 10 ]]; then
    skip "$name" "no time was left"
    return 1
  fi
  step_end=$((EPOCHSECONDS + most)) timeout --kill-after=10 "$most" "$@" </dev/null >"$work/logs/$log" 2>&1
  rc=$?
  case $rc in
    0) note "$name" ok $((SECONDS - start)) "$log" "" ;;
    124 | 137) failed=1; note "$name" timeout $((SECONDS - start)) "$log" "stopped after $most s" ;;
    *) failed=1; note "$name" failed $((SECONDS - start)) "$log" "exit code $rc" ;;
  esac
  return "$rc"
}

# has TARGET: succeeds if the build defines it.
has() { ninja -C "$build" -t query "$1" >/dev/null 2>&1; }
# program PATH: succeeds if it was built; else notes it as skipped.
program() {
  [[ -x $build/$1 ]] && return 0
  skip "$(basename "$1")" "not built"
  return 1
}

write_report() {
  [[ -n $gpu ]] || return 0
  python3 tools/bench/gpu_report.py "$work" --commit "$commit" --report "${out:-$root/docs/gpu}" \
    ${out:+--earlier "$root/docs/gpu" --logs "$out/logs.tar.gz"} </dev/null
}

configure() {
  cmake --preset release -B "$build" -DTESSERA_BUILD_BENCH=ON -DTESSERA_WERROR=OFF "-DCMAKE_PREFIX_PATH=$links" \
    "-DCMAKE_CUDA_COMPILER=$(command -v nvcc)" -DCMAKE_POLICY_VERSION_MINIMUM=3.5
}
compile() { with_libraries ninja -C "$build" -k 0 -j "$jobs" "$@"; }
# check_tests TARGET [doctest options]: line-buffered, so that the log of a hanging test is complete.
check_tests() {
  local test=$1
  shift
  with_libraries stdbuf -oL "$build/$test" --duration=true "$@"
}
# within SECONDS COMMAND...: limits a command to this time and to the end of the step, because the outer
# `timeout` does not reach the process group of a nested one.
within() {
  # shellcheck disable=SC2154  # of step()
  local most=$1 left=$((step_end - EPOCHSECONDS - 6))
  shift
  [[ $most -le $left ]] || most=$left
  [[ $most -gt 0 ]] || { echo "no time was left"; return 124; }
  timeout --kill-after=5 "$most" "$@"
}
# gpu_test_files: files of kernels_test with GPU tests, slowest first.
gpu_test_files() {
  local slow='(attention|matmul|norm)_test[.]cpp$'
  grep -lE 'for_(each|gpu)_context' tests/kernels/*_test.cpp | sort |
    awk -F/ -v slow="$slow" '$NF ~ "^" slow { print $NF; next } { later = later $NF "\n" } END { printf "%s", later }'
}
# test_one FILE: runs one file's tests in a separate process, because an error may make the device unusable
# for the rest of the process.
test_one() {
  local log=$work/logs/kernels-$1.log rc
  # shellcheck disable=SC2016
  within 60 bash -c 'check_tests tests/kernels/kernels_test "--source-file=*/$0"' "$1" >"$log" 2>&1
  rc=$?
  {
    flock 9
    echo "== kernels: $1"
    cat "$log"
    echo "== kernels: $1: exit code $rc"
  } 9>"$work/test_one.lock"
  return "$rc"
}
# shellcheck disable=SC2016
test_all() { printf '%s\n' "$@" | xargs -P 4 -I FILE bash -c 'test_one "$0"' FILE; }
export -f configure compile check_tests within test_one test_all
export build links jobs

# bash_step NAME SECONDS FUNCTION ARGUMENT...: a step that calls a function of this file.
bash_step() {
  local name=$1 most=$2
  shift 2
  # shellcheck disable=SC2016  # expanded by the inner shell
  step "$name" "$most" bash -c 'set -uo pipefail; "$@"' bash "$@"
}

part_build() {
  bash_step "configure" 120 configure || return
  local targets=(tessera tessera_cuda kernels_test golden_test cuda_backend_test tessera_kernels_bench) target
  for target in tessera_nccl nccl_gpu_test tessera_cuda_fiber; do has "$target" && targets+=("$target"); done
  bash_step "program, CUDA backend, GPU tests" "$limit" compile "${targets[@]}"
  # Built separately, since it may not compile with the installed cuDNN.
  if has tessera_cudnn; then
    bash_step "attention by cuDNN" 600 compile tessera_cudnn || rm -f "$build/bin/libtessera_cudnn.so"  # of an earlier build
  else
    skip "attention by cuDNN" "no cuDNN, NVRTC or cudnn-frontend was found (tools/setup.sh --cuda)"
  fi
}

# Files of the build that the other parts need.
packed_files=(bin/tessera bin/libtessera_{cuda,cudnn,nccl}.so tests/kernels/{kernels_test,cuda_backend_test} tests/e2e/golden_test
  tests/comm/nccl_gpu_test tests/support/fiber/libtessera_cuda_fiber.so tools/bench/tessera_kernels_bench)
# Libraries that a machine has with its C++ compiler, or with the NVIDIA driver and CUDA.
everywhere='/(ld-linux|lib(c|m|dl|rt|pthread|gcc_s|stdc[+][+]|gomp|cuda|cublas|cublasLt|cudnn|nccl|nvrtc|OpenCL)[.]so)'

part_pack() {
  local start=$SECONDS log=pack.log rc
  (set -e; pack) >"$work/logs/$log" 2>&1  # in a condition, set -e would have no effect
  rc=$?
  if [[ $rc -eq 0 ]]; then
    note "$build.tar.gz" ok $((SECONDS - start)) "$log" "$(du -h "$build.tar.gz" | cut -f1)"
  else
    failed=1
    note "$build.tar.gz" failed $((SECONDS - start)) "$log" "$(tail -1 "$work/logs/$log")"
  fi
}
pack() {
  local folder stage file library libraries
  folder=$(realpath --relative-to="$root" "$build")
  [[ $folder != ../* ]] || { echo "the build folder must be inside the sources"; return 1; }
  stage=$(mktemp -d)
  # shellcheck disable=SC2064  # expand now
  trap "rm -rf '$stage'" EXIT
  chmod 755 "$stage"
  mkdir -p "$stage/packed"
  for file in "${packed_files[@]}"; do
    # Plugins are built where their libraries are found.
    [[ -e $build/$file || $file != */libtessera_* ]] || continue
    mkdir -p "$(dirname "$stage/$file")"
    strip -o "$stage/$file" "$build/$file"
    libraries=$(ldd "$build/$file")
    while read -r library; do
      [[ $library =~ $everywhere ]] || cp -L "$library" "$stage/packed/"
    done < <(awk '$3 ~ "^/" { print $3 }' <<<"$libraries")
  done
  tar czf "$build.tar.gz" -C "$stage" --transform "s,^[.],$folder," .
}

part_test() {
  local files
  if program tests/kernels/cuda_backend_test; then
    bash_step "the GPU opens" 60 check_tests tests/kernels/cuda_backend_test
  fi
  if program bin/tessera; then
    bash_step "doctor" 60 with_libraries "$build/bin/tessera" doctor
  fi
  if program tests/kernels/kernels_test; then
    mapfile -t files < <(gpu_test_files)
    TESSERA_TEST_CUDA_ONLY=1 bash_step "kernels on the GPU" 150 test_all "${files[@]}"
  fi
  if program tests/e2e/golden_test; then
    bash_step "training steps against the reference" 90 check_tests tests/e2e/golden_test
  fi
  if program bin/tessera && [[ -z $quick ]]; then
    step "families and settings against the CPU" 120 python3 tools/bench/gpu_models.py "$build" --library-path "$library_path" \
      --json "$work/models.json"
  fi
  if [[ -e $build/bin/libtessera_cudnn.so && -x $build/tests/kernels/kernels_test ]]; then
    # The tests above use cuDNN where possible; these use tessera's own attention.
    TESSERA_TEST_CUDA_ONLY=1 TESSERA_ATTENTION=own bash_step "own attention on the GPU" 60 \
      check_tests tests/kernels/kernels_test '--source-file=*/attention_test.cpp'
  fi
}

part_nccl() {
  if [[ -x $build/tests/comm/nccl_gpu_test ]]; then
    bash_step "collectives over NCCL" 120 check_tests tests/comm/nccl_gpu_test
  else
    skip "collectives over NCCL" "nccl_gpu_test was not built: see the log of configure for NCCL"
  fi
  program bin/tessera || return
  local most=$((deadline - SECONDS - reserved))  # golden_ranks.py gets less, so that no run is cut short
  [[ $most -le 150 ]] || most=150
  local arguments=(--gpus "$(nvidia-smi -L | grep -c GPU)" --json "$work/ranks.json" --seconds 40 --limit "$((most > 15 ? most - 5 : 10))")
  [[ -z $quick ]] || arguments+=(--set gpt2-odd --worlds 1 3 --precision fp32)
  [[ -e $build/bin/libtessera_nccl.so ]] || arguments+=(--backends staged)
  bash_step "runs of one and more ranks" "$most" with_libraries python3 tools/bench/golden_ranks.py "$build" "${arguments[@]}"
}

part_bench() {
  if program tools/bench/tessera_kernels_bench; then
    bash_step "each kernel" 120 with_libraries "$build/tools/bench/tessera_kernels_bench" --device cuda ${quick:+--quick} \
      --json "$work/kernels.jsonl"
    if [[ -e $build/bin/libtessera_cudnn.so ]]; then
      TESSERA_ATTENTION=own bash_step "own attention" 40 with_libraries "$build/tools/bench/tessera_kernels_bench" --device cuda \
        ${quick:+--quick} --only attention --json "$work/own-attention.jsonl"
    fi
  fi
  local torch=()
  if ! timeout 60 python3 -c 'import torch' 2>/dev/null; then
    skip "PyTorch" "python3 can't import it"
    torch=(--no-torch)
  elif [[ -z $quick ]]; then
    step "roofs by PyTorch" 60 python3 tools/bench/gpt2_torch.py --roofs && grep '^{' "$work"/logs/bench-roofs*.log >"$work/roofs.json"
  fi
  program bin/tessera || return
  local seconds=$((deadline - SECONDS - reserved - 10)) arguments=()
  read -r -a arguments <<<"--sizes $sizes"
  [[ -z $quick ]] || arguments=(--sizes tiny --seq 8 --rounds 1 --steps 2 --warmup 1 --no-compile --no-climb)
  [[ $seconds -gt 5 ]] || seconds=5
  step "GPT-2 steps" $((seconds + 10)) python3 tools/bench/gpt2_gpu.py "$build" "${arguments[@]}" "${torch[@]}" --seconds "$seconds" \
    --library-path "$library_path" --json "$work/gpt2.json"
}

# sanitize_one TOOL FILE: runs one file's tests.
sanitize_one() {
  echo "== $1: $2"
  # shellcheck disable=SC2154  # exported below
  TESSERA_TEST_CUDA_ONLY=1 TESSERA_ATTENTION=own with_libraries within 75 stdbuf -oL "$sanitizer" --tool "$1" --error-exitcode 9 \
    --print-limit 20 "$build/tests/kernels/kernels_test" --duration=true --source-file="*/$2" >"$work/logs/sanitize-$1-$2.log" 2>&1
  local rc=$?
  echo "== $1: $2: exit code $rc"
  [[ $rc -ne 0 ]] || touch "$work/clean-$1"
  if [[ $rc -eq 124 || $rc -eq 137 ]]; then
    tail -3 "$work/logs/sanitize-$1-$2.log"  # shows the slow or hanging test
    # racecheck slows kernels down by 100 and more: without a finding, its time limit is no failure.
    [[ $1 != racecheck ]] || grep -qE '^========= +(Error|Warning|Race)' "$work/logs/sanitize-$1-$2.log" || rc=0
  elif [[ $rc -ne 0 ]]; then
    grep -E '^=========|TEST CASE|ERROR' "$work/logs/sanitize-$1-$2.log" | head -30
  fi
  return "$rc"
}
sanitize_all() {
  local tool=$1
  shift
  # shellcheck disable=SC2016
  printf '%s\n' "$@" | xargs -P $# -I FILE bash -c 'sanitize_one "$0" "$1"' "$tool" FILE && [[ -e $work/clean-$tool ]]
}
export -f sanitize_one sanitize_all
export work

part_sanitize() {
  local files tool
  for sanitizer in "$(command -v compute-sanitizer)" "$cuda_root"/{bin,compute-sanitizer,extras/compute-sanitizer}/compute-sanitizer ""; do
    [[ ! -x $sanitizer ]] || break
  done
  [[ -n $sanitizer ]] || { skip "compute-sanitizer" "not installed"; return; }
  program tests/kernels/kernels_test || return
  mapfile -t files < <(gpu_test_files)
  export sanitizer
  for tool in memcheck racecheck initcheck; do
    bash_step "$tool" 80 sanitize_all "$tool" "${files[@]}"
  done
}

suite_passed=
part_suite() {
  local rc=0
  bash_step "all targets" 400 compile || rc=$?
  # Skip the tests after a timeout: unlike a compile error, an incomplete build makes no test fail.
  if [[ $rc -eq 124 || $rc -eq 137 ]]; then
    skip "every test" "not all of it was built"
    return
  fi
  # shellcheck disable=SC2016
  if step "every test" 300 bash -c 'with_libraries ctest --test-dir "$build" -j "$jobs" --timeout 120 --output-on-failure --no-tests=error'; then
    suite_passed=yes
  elif [[ -s $build/Testing/Temporary/LastTestsFailed.log ]]; then
    # shellcheck disable=SC2016
    step "failed tests, without the GPU" 90 bash -c \
      'CUDA_VISIBLE_DEVICES= TESSERA_TEST_CUDA_PLUGIN= TESSERA_CUDA_PLUGIN= with_libraries ctest --test-dir "$build" -j "$jobs" --timeout 60 --rerun-failed'
  fi
}

# Prints failures and skipped steps at the end.
summary() {
  awk -F '\t' '
    $3 == "ok" { passed++; next }
    $3 == "skipped" { left_out++ }
    $3 != "skipped" { bad++ }
    { lines = lines sprintf("   %s, %s: %s: %s\n", $1, $2, $3, $6) }
    END { printf "== %d steps passed, %d failed, %d were left out\n%s", passed, bad, left_out, lines }' "$work/steps.tsv"
  if wanted suite; then
    if [[ -n $suite_passed ]]; then
      echo "   the suite passed"
    else
      echo "   the suite failed or was not completed, which counts as a failure"
    fi
  fi
}

python3 tools/bench/gpu_report.py "$work" --environment "$cuda_root" --commit "$commit" </dev/null >"$work/logs/environment.log" 2>&1 &
environment=$!

# Reserves time for later parts, but takes none from the build, which they need.
order=(build pack test bench nccl sanitize suite)
declare -A keeps=([test]=60 [bench]=200 [nccl]=60 [sanitize]=60 [suite]=250)
for i in "${!order[@]}"; do
  part=${order[$i]}
  wanted "$part" || continue
  reserved=0
  if [[ $part != build && $part != pack ]]; then
    for later in "${order[@]:i+1}"; do
      ! wanted "$later" || reserved=$((reserved + keeps[$later]))
    done
    most=$(((deadline - SECONDS) * 2 / 3))
    [[ $most -gt 0 ]] || most=0
    [[ $reserved -le $most ]] || reserved=$most
  fi
  echo "== $part"
  if [[ $part == build || $part == pack || $part == suite || -e $plugin ]]; then
    "part_$part"
  else
    failed=1
    skip "all of $part" "the CUDA backend was not built"
  fi
  write_report
done
wait "$environment"
write_report
if wanted suite && [[ -z $suite_passed ]]; then failed=1; fi
summary
if [[ -n $gpu ]]; then echo "report: $(cat "$work/report" 2>/dev/null)"; fi
exit "$failed"
