#include "core/optim/optimizer.h"

#include <algorithm>

namespace tessera::optim {

bool Optimizer::has_state(std::size_t, const ParameterSlot&) const { return true; }

Shape Optimizer::state_shape(std::size_t i, const Shape& parameter) const {
  const std::int64_t block = state_kind(i).block;
  if (block == 1) return parameter;
  return {(numel(parameter) + block - 1) / block};
}

StatePlaces::StatePlaces(const Optimizer& optimizer, std::size_t i, const ShardLayout& layout,
                         std::int64_t segment_begin, std::int64_t segment_size) {
  const auto has = [&](const ParameterSlot& slot) { return optimizer.has_state(i, slot); };
  const bool all = std::ranges::all_of(layout.slots(), has);
  constexpr std::int64_t kAlignment = ShardLayout::kAlignment;
  for (const SlotRange& range : layout.ranges(segment_begin, segment_begin + segment_size)) {
    if (all) {
      first.push_back(range.offset);
    } else if (has(layout.slots()[static_cast<std::size_t>(range.slot)])) {
      first.push_back(size);
      size += (range.end - range.begin + kAlignment - 1) / kAlignment * kAlignment;
    } else {
      first.push_back(-1);
    }
  }
  if (all) size = segment_size;
}

}  // namespace tessera::optim
