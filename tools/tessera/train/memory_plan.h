#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "comm/communicator.h"
#include "comm/planned.h"
#include "core/base/context.h"
#include "core/base/kernel_rates.h"
#include "core/base/system_memory.h"
#include "models/arch.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/report/advice.h"
#include "train/plan.h"

namespace tessera::tools {

/// Device, ranks and data that a plan assumes.
struct PlanOptions {
  ContextOptions context{};            ///< device, threads and CPU level of each rank
  std::string backend = "shm";         ///< of the communicator
  int local_world_size = 1;            ///< ranks per host, for shard.mode hybrid
  bool evaluates = true;               ///< there is validation data
  bool packed = false;                 ///< rows hold several documents
  std::int64_t prompt_tokens = 0;      ///< of train.sample_prompt; 0: no samples
  std::int64_t first_step = 0;         ///< step that the run resumes from
  const KernelRates* rates = nullptr;  ///< to plan the time of a step; null: not planned
  comm::Links links{};                 ///< for the time of collectives
};

/// Time of a training step on a rank, kernels and collectives overlapping as in the program. Not in it: copies
/// between host and device, CPU work beside a GPU's, and saves.
struct StepTime {
  struct Kernel {
    double calls = 0, seconds = 0;
    KernelWork work;
  };
  double seconds = 0;
  double waits = 0;  ///< part in which kernels wait for collectives
  std::map<std::string, Kernel> kernels;
};

/// A rank's use of memory, and what it sends per step.
struct RankPlan : train::MemoryPlan {  // flops: of a step
  std::int64_t offloaded = 0;  ///< most bytes in use at once in host memory, for shard.offload
  comm::Traffic traffic;       ///< bytes sent in a step, with the micro-batches of a whole batch
  StepTime time;               ///< with PlanOptions::rates, also of a whole batch
  std::int64_t tokens = 0;     ///< of a step, on all ranks
  std::string timeline;        ///< Chrome trace of such a step, of at most three micro-batches
};

/// Plans a rank by running training on the meta device: loading, a few steps, an evaluation, a
/// sample, and the staging of a save, as the run would. The plan is exact: it is the peak that the
/// memory ledger of the run shows, if that makes two steps or more and finds no NaN, and on a GPU
/// with tessera's own attention. Beside it, a GPU holds the scratch memory of `libraries`, the CUDA
/// context, NCCL's buffers, and gaps between blocks of its memory pool.
/// @throws what the run would throw for its arguments
RankPlan plan_rank(const Config& config, const models::Arch& model, int rank, int world_size,
                   const PlanOptions& options);

/// Planned use of a host's or GPU's memory, and its size.
struct MemoryNeed {
  RankPlan plan{};
  int ranks = 1;        ///< number of ranks that share the memory
  SystemMemory memory;  ///< zeros if unknown; then nothing is checked
  std::string there;    ///< for messages: "this host has", "cuda:0 has"
};

/// Compares the plan with the memory before anything is allocated.
/// @param advice  called for the message of an error
/// @param refuse  throw if the plan exceeds the total memory; else warn
/// @return a warning if the plan exceeds the available memory; else empty
/// @throws OutOfMemory with the plan by category, and the advice
std::string check_memory(const MemoryNeed& need, const std::function<MemoryAdvice()>& advice,
                         bool refuse);

}  // namespace tessera::tools
