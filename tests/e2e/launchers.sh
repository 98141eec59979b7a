# shellcheck shell=bash
# Functions that start ranks in the environment of other launchers. Where a page has a rank for each
# GPU of a host, these start one for each host, all on this one.

# all_ranks NUMBER VARIABLE=VALUE... COMMAND...: @ stands for the rank.
all_ranks() {
  local number=$1 rank code=0 ids=()
  shift
  for ((rank = 0; rank < number; rank++)); do
    env "${@//@/$rank}" &
    ids+=($!)
  done
  for rank in "${ids[@]}"; do wait "$rank" || code=$?; done
  return $code
}

# torchrun --nnodes N --nproc-per-node gpu ... --no-python COMMAND...
torchrun() {
  local hosts
  while [[ $1 != --no-python ]]; do
    case $1 in
      --nnodes) hosts=$2 ;;
      --nproc-per-node) [[ $2 == gpu ]] ;;
    esac
    shift 2
  done
  # After a failure the counts of restarts differ between hosts.
  all_ranks "$hosts" RANK=@ WORLD_SIZE="$hosts" LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
    MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" TORCHELASTIC_RUN_ID=gpt2 \
    TORCHELASTIC_RESTART_COUNT=@ "${@:2}"
}

# srun COMMAND... on $SLURM_NNODES hosts
srun() {
  all_ranks "$SLURM_NNODES" SLURM_PROCID=@ SLURM_NTASKS="$SLURM_NNODES" SLURM_LOCALID=0 \
    SLURM_JOB_ID="$port" SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES="$SLURM_NNODES" \
    SLURM_STEP_TASKS_PER_NODE="1(x$SLURM_NNODES)" "$@"
}

# openssl rand -hex N, which may not be installed
openssl() { od -An -N"$3" -tx1 /dev/urandom | tr -d ' \n'; }

port=$((20000 + $$ % 9000))
export port
export -f all_ranks torchrun srun openssl
