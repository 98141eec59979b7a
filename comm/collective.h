#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/communicator.h"
#include "comm/subgroup.h"
#include "core/base/dtype.h"

namespace tessera::comm {

enum class CollectiveKind : std::uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  Broadcast,
  Barrier
};
/// "all_gather", "reduce_scatter", ...
std::string_view collective_name(CollectiveKind kind);

/// Checked arguments of a collective. `sequence` is set when it is queued.
struct Collective {
  CollectiveKind kind = CollectiveKind::Barrier;
  DType dtype = DType::U8;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  std::int64_t count = 0;    ///< elements of the whole buffer (of `in` for reduce_scatter)
  const void* in = nullptr;  ///< reduce_scatter only
  void* out = nullptr;       ///< the buffer, or reduce_scatter's result
  std::uint64_t sequence = 0;
  std::string label = {};
  std::chrono::milliseconds deadline{0};  ///< zero: the communicator's default
  Device device = {};                     ///< that holds the buffers
  SubgroupPtr group = {};                 ///< set when it is queued; null: all ranks

  std::size_t bytes() const { return static_cast<std::size_t>(count) * dtype_size(dtype); }
  /// "all_gather#12 (h.3)", "all_gather#12 (h.3, shard group of ranks 2, 3)"
  std::string describe() const;
};

/// Fingerprint of a collective, compared across ranks before data moves. Sent as raw bytes between
/// processes of one build.
struct Signature {
  std::uint64_t sequence = 0;
  std::int64_t count = 0;
  std::int32_t root = 0;  ///< rank of the world
  std::uint8_t kind = 0;
  std::uint8_t dtype = 0;
  std::uint8_t op = 0;
  std::uint8_t reserved = 0;
  std::array<char, 40> label{};  ///< the label's first bytes, padded with zeros

  Signature() = default;
  explicit Signature(const Collective& collective);
  friend bool operator==(const Signature&, const Signature&) = default;
  /// "all_gather#12 (h.3) f32[1024]"
  std::string describe() const;
};

/// Compares the signatures of a group's ranks and blames the minority; in a tie, the ranks that agree
/// with the lowest rank count as right. Every rank computes the same result.
/// @return the error to throw; nothing if all agree
std::optional<CommError> find_mismatch(std::span<const Signature> by_rank,
                                       const Subgroup* group = nullptr);

/// "rank 2" or "ranks 1, 3"
std::string rank_list(std::span<const int> ranks);
/// "0.2 s", "30 s"
std::string format_seconds(std::chrono::milliseconds duration);

}  // namespace tessera::comm
