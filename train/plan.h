#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "comm/planned.h"
#include "core/base/context.h"
#include "core/base/memory.h"
#include "train/ranks.h"

namespace tessera::train {

/// Bytes by MemoryCategory.
using MemoryByCategory = std::array<std::int64_t, kMemoryCategories>;

struct PlanOptions {
  ContextOptions context{};     ///< planned device, threads and CPU level of the rank
  std::string backend = "shm";  ///< of the communicator: "nccl", "shm", "tcp" or "single"
  int rank = 0;
  int world_size = 1;
  comm::Links links{};  ///< for a Trace in the program
};

/// Memory that a program needs on one rank.
struct MemoryPlan {
  std::int64_t peak = 0;       ///< most bytes in use at once
  MemoryByCategory at_peak{};  ///< in use then; adds up to `peak`
  MemoryByCategory most{};     ///< peak of each category
  std::string workspace;       ///< peaks of operations; see workspace_peaks()
  std::string reached_at;      ///< "backward h.3, linear": part of the step, and the operation
  std::int64_t host_peak = 0;  ///< of a rank on a GPU: most bytes of host memory in use at once
  double flops = 0;            ///< of matrix products and attention
  /// Most scratch memory of each library at a time, beside `peak`; a library chooses it on the GPU.
  std::map<std::string, std::int64_t> libraries;

  /// Largest of `libraries`; 0 on the CPU.
  std::int64_t library_bytes() const;
};

/// Plans a rank by running `program` on the meta device, which has shapes but no memory, poses as
/// the planned device, and books the same bytes. Tensors have no values there: losses are 0,
/// collectives and exchanges only count, and Checkpoints loads and saves nothing. A few steps are
/// enough; the first one learns the order of units.
///
///   const auto plan = train::plan({.context = {.device = {DeviceType::CUDA, 0}}, .backend = "nccl",
///                                  .world_size = 4096}, [](train::Rank& rank) { train(rank, 2); });
MemoryPlan plan(const PlanOptions& options, const std::function<void(Rank&)>& program);

/// Peaks of scratch memory by operation: "attention_backward 2048, matmul 512".
std::string workspace_peaks(const MemoryLedger& ledger);
/// The most bytes of each category.
MemoryByCategory category_peaks(const MemoryLedger& ledger);
/// "parameters 137.5 KiB, gradients 137.5 KiB, ..."
std::string describe(const MemoryByCategory& bytes);
/// "1.2 GiB, reached at backward h.3, linear: parameters 0.3 GiB, ..."
std::string describe(const MemoryPlan& plan);

}  // namespace tessera::train
