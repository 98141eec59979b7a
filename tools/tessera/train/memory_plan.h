#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "comm/communicator.h"
#include "core/base/context.h"
#include "core/base/system_memory.h"
#include "models/arch.h"
#include "tools/tessera/config/config.h"
#include "tools/tessera/report/advice.h"

namespace tessera::tools {

/// Bytes by MemoryCategory.
using MemoryByCategory = std::array<std::int64_t, kMemoryCategories>;

/// Device, ranks and data that a plan assumes.
struct PlanOptions {
  ContextOptions context{};        ///< device, threads and CPU level of each rank
  std::string backend = "shm";     ///< of the communicator
  int local_world_size = 1;        ///< ranks per host, for shard.mode hybrid
  bool evaluates = true;           ///< there is validation data
  std::int64_t prompt_tokens = 0;  ///< of train.sample_prompt; 0: no samples
  std::int64_t first_step = 0;     ///< step that the run resumes from
};

/// A rank's use of memory, and what it sends per step.
struct RankPlan {
  std::int64_t peak = 0;       ///< most bytes in use at once
  std::int64_t offloaded = 0;  ///< most bytes in use at once in host memory, for shard.offload
  MemoryByCategory at_peak{};  ///< in use then; adds up to `peak`
  MemoryByCategory most{};     ///< peak of each category
  std::string reached_at;      ///< "backward h.3, linear": part of the step, and the operation
  double flops = 0;            ///< of matrix products and attention in a step
  comm::Traffic traffic;       ///< bytes sent in a step, with the micro-batches of a whole batch
  std::int64_t host_peak = 0;  ///< of a rank on a GPU: most bytes of host memory in use at once
  /// Most scratch memory of each library at a time, beside `peak`; a library chooses it on the GPU.
  std::map<std::string, std::int64_t> libraries;

  /// Largest of `libraries`; 0 on the CPU.
  std::int64_t library_bytes() const {
    std::int64_t most = 0;
    for (const auto& [name, bytes] : libraries) most = std::max(most, bytes);
    return most;
  }
};

/// Plans a rank by running training on the meta device: loading, a few steps, an evaluation, a
/// sample, and the staging of a save, as the run would. The plan is exact: it is the peak that the
/// memory ledger of the run shows, if that makes two steps or more and finds no NaN, and on a GPU
/// with tessera's own attention. Beside it, a GPU holds the scratch memory of `libraries`, the CUDA
/// context, NCCL's buffers, and gaps between blocks of its memory pool.
/// @throws what the run would throw for its arguments
RankPlan plan_rank(const Config& config, const models::Arch& model, int rank, int world_size,
                   const PlanOptions& options);

/// The most bytes of each category.
MemoryByCategory category_peaks(const MemoryLedger& ledger);

/// "parameters 137.5 KiB, gradients 137.5 KiB, ..."
std::string describe(const MemoryByCategory& bytes);

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
