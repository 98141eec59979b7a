#include "core/base/shard_layout.h"

#include <algorithm>
#include <set>

namespace tessera {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

ShardLayout::ShardLayout(std::string unit, const std::vector<Parameter>& parameters, int world_size)
    : unit_(std::move(unit)), world_size_(world_size) {
  require(world_size >= 1, "unit {}: world size must be at least 1, got {}", unit_, world_size);
  std::set<std::string> seen;
  std::int64_t offset = 0;
  for (const Parameter& parameter : parameters) {
    require(seen.insert(parameter.name).second, "unit {}: parameter {} appears twice", unit_,
            parameter.name);
    const std::int64_t count = numel(parameter.shape);
    slots_.push_back({parameter.name, parameter.shape, offset, count, parameter.decay,
                      parameter.lr_scale, parameter.is_matrix});
    parameter_count_ += count;
    offset = round_up(offset + count, kAlignment);
  }
  segment_size_ = round_up((offset + world_size - 1) / world_size, kAlignment);
}

std::vector<SlotRange> ShardLayout::ranges(std::int64_t begin, std::int64_t end) const {
  std::vector<SlotRange> result;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const ParameterSlot& slot = slots_[i];
    const std::int64_t first = std::max(begin, slot.offset);
    const std::int64_t last = std::min(end, slot.offset + slot.numel);
    if (first >= last) continue;
    result.push_back({static_cast<int>(i), first - slot.offset, last - slot.offset, first - begin});
  }
  return result;
}

std::vector<SlotRange> ShardLayout::ranges_of_rank(int rank) const {
  require(rank >= 0 && rank < world_size_, "unit {}: rank {} is out of range for world size {}",
          unit_, rank, world_size_);
  return ranges(rank * segment_size_, (rank + 1) * segment_size_);
}

}  // namespace tessera
