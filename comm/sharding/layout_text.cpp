#include "comm/sharding/layout_text.h"

#include <fmt/format.h>

#include "core/base/rng.h"

namespace tessera::comm {
namespace {

std::string parameters_of(const FlatUnit& unit) {
  std::string text;
  for (std::size_t i = 0; i < unit.parameters().size(); ++i) {
    const ParameterSlot& slot = unit.layout().slots()[i];
    text += fmt::format("{} {} at {}", slot.name, slot.shape.str(), slot.offset);
    text += fmt::format(" {}{}{}{}\n", dtype_name(unit.parameters()[i]->tensor.dtype()),
                        slot.decay ? " decays" : "", unit.is_trainable() ? "" : " frozen",
                        slot.lr_scale == 1.0F ? "" : fmt::format(" lr x {}", slot.lr_scale));
  }
  return text;
}

}  // namespace

std::string layout_text(const ShardedModel& model) {
  std::string text = fmt::format("units = {}\n", model.units().size());
  for (const auto& unit : model.units()) {
    const ShardLayout& layout = unit->layout();
    text += fmt::format(
        "unit {} = {} parameters of {} elements in a buffer of {}, {} weights, hash {:016x}\n",
        unit->name(), layout.slots().size(), layout.parameter_count(), layout.padded_size(),
        dtype_name(unit->master().dtype()), hash_text(parameters_of(*unit)));
  }
  return text;
}

}  // namespace tessera::comm
