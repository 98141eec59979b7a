#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "io/pump/chunk.h"

namespace tessera::io {

/// An axis of a PyTorch DeviceMesh, with the place of one rank on it and of one tensor along it.
struct MeshAxis {
  std::int64_t size = 1, coordinate = 0;
  std::optional<int> dim = {};    ///< the tensor's dim that the axis shards; empty: replicated
  std::int64_t split_factor = 1;  ///< parts into which later axes have split the dim before
};

/// Box of a DTensor that a rank holds. Each axis cuts the rank's part of its dim into parts of
/// ceil(n / size) elements, of which the last ones are smaller or empty. Axes that shard one dim
/// cut it from first to last, except that an axis with a split factor (_StridedShard, as FSDP
/// after tensor parallelism) follows the later axes of that product.
/// @param where  named in errors
/// @throws CorruptCheckpoint on a coordinate or dim out of range; Unsupported on a split factor
///         that is no product of sizes of later axes
Box local_box(const Shape& shape, std::span<const MeshAxis> axes, const std::string& where);

}  // namespace tessera::io
