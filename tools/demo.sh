#!/usr/bin/env bash
# Demonstrates tessera in about two minutes of training on two cores:
#   tools/demo.sh          trains a small GPT on this repository's own text
#   tools/demo.sh FILE     trains it on FILE (any text)
# Overwrites runs/demo and runs/demo-model.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  exit 0
fi
if [[ $# -gt 1 || ( $# -eq 1 && ! -r "$1" ) ]]; then
  echo "usage: tools/demo.sh [FILE]; FILE must be a readable text" >&2
  exit 2
fi

bold=$'\033[1m' plain=$'\033[0m' terminal=1
if [[ ! -t 1 ]]; then terminal=0; fi
if [[ $terminal == 0 || -n "${NO_COLOR:-}" ]]; then bold= plain=; fi
step() { printf '\n%s== %s%s\n' "$bold" "$1" "$plain"; }
say() { printf '   %s\n' "$@"; }

# command_line WORD...: prints a command with quotes.
command_line() {
  local word line=
  for word in "$@"; do
    if [[ $word == *[!A-Za-z0-9_./=,:@+-]* ]]; then word="'$word'"; fi
    line+=" $word"
  done
  printf '   $%s\n' "$line"
}
show() { command_line "$@"; "$@"; }

# Build progress: one live line on a terminal, else a line per 20%.
progress() {
  local line shown=0
  while IFS= read -r line; do
    printf '%s\n' "$line" >>build/demo.log
    [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
    if [[ $terminal == 1 ]]; then
      printf '\r   compiling %d of %d ' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    elif ((5 * (BASH_REMATCH[1] - shown) >= BASH_REMATCH[2])); then
      shown=${BASH_REMATCH[1]}
      printf '   compiling %d of %d\n' "$shown" "${BASH_REMATCH[2]}"
    fi
  done
  if [[ $terminal == 1 ]]; then printf '\r\033[K'; fi
}

step "1. Build"
tools/setup.sh
mkdir -p build
cuda=OFF
if [[ -e /dev/nvidiactl ]]; then cuda=ON; fi
cmake --preset release -DTESSERA_BUILD_TESTS=OFF -DTESSERA_CUDA=$cuda -B build/demo >build/demo.log 2>&1 || { cat build/demo.log >&2; exit 1; }
say "a few minutes the first time; log in build/demo.log"
cmake --build build/demo --target tessera -j "$(nproc)" 2>&1 | progress || { tail -n 30 build/demo.log >&2; exit 1; }
tessera=build/demo/bin/tessera
say "built $tessera ($($tessera --version))"

run=runs/demo model=runs/demo-model
rm -rf "$run" "$model"
mkdir -p runs
prompt="/// @return"
if [[ $# -eq 1 ]]; then
  text=$1
  prompt="The "
else
  text=runs/demo-text.txt
  git ls-files -z '*.md' '*.h' '*.cpp' '*.sh' '*.py' 2>/dev/null | xargs -0r cat >"$text"
  # Outside of a git checkout: find the files on disk.
  [[ -s $text ]] || find core kernels models comm io tools tests README.md -name '*.[hc]*' -o -name '*.md' |
    sort | xargs cat >"$text"
fi
say "text: $text, $(wc -c <"$text") bytes"

train=("$tessera" train --nproc 2 --data.train "$text" --model.n_layer 4 --model.n_head 4
  --model.n_embd 128 --model.seq_len 128 --train.global_batch 12 --train.steps 1000
  --train.eval_every 250 --train.eval_batches 8 --train.log_every 100
  --optim.lr 2e-3 --optim.warmup_steps 50
  --checkpoint.every 100 --checkpoint.keep 2 --run.out "$run")

step "2. Train on two ranks, each with half of the weights, gradients and optimizer state"
say "A byte-level GPT. Every 100 steps each rank writes its own shard." \
    "After 250 steps all ranks are killed (SIGKILL), as in a crash."
command_line "${train[@]}"
setsid "${train[@]}" &
pid=$!
disown  # else bash reports that it was killed
trap 'kill -KILL -- -$pid 2>/dev/null || true' EXIT
while kill -0 "$pid" 2>/dev/null; do
  steps=$(wc -l 2>/dev/null <"$run/metrics.jsonl" || echo 0)
  if [[ $steps -ge 250 ]]; then
    kill -KILL -- "-$pid"
    break
  fi
  sleep 0.1
done
while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
trap - EXIT
say "killed after $(grep -c '"loss"' "$run/metrics.jsonl") steps; committed checkpoints:"
show "$tessera" checkpoint list "$run"

step "3. The same command again: it resumes from the newest committed checkpoint"
show "${train[@]}"
lines=$(grep -c '"loss"' "$run/metrics.jsonl")
say "metrics.jsonl has $lines steps, without gaps or duplicates." \
    "Loss curve: $run/loss.svg"

step "4. Verify every weight against its checksum"
newest=$(ls -d "$run"/checkpoints/step-* | tail -n 1)
show "$tessera" checkpoint verify "$newest"

step "5. Consolidate the two shards into a model for other tools"
show "$tessera" consolidate "$run" "$model"
ls -l "$model" | sed 's/^/   /'

step "6. Measure and sample the consolidated model"
say "This loss is over the first 64 rows of the text; the validation loss above is over its last tenth."
show "$tessera" eval "$model" --data "$text" --max-rows 64
show "$tessera" generate "$model" --prompt "$prompt" --max-new-tokens 300 --temperature 0.7

step "Done. What to try next"
say "$tessera train --help                            every key, with its default" \
    "$tessera checkpoint inspect $run --json          a checkpoint's content and digest" \
    "${train[*]:0:2} ... --nproc 1 --train.steps 2000    continue on another number of ranks" \
    "$tessera train --model.init_from $model --data.train FILE --run.out runs/tuned" \
    "tools/demo.sh FILE                                the same on your own text"
