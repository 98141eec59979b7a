#include "comm/sharding/finite_check.h"

#include <algorithm>
#include <cmath>

#include "kernels/elementwise.h"
#include "kernels/optimizer.h"

namespace tessera::comm {
namespace {

// Index of a flat element within a shape: "[5, 100]".
std::string place(std::int64_t element, const Shape& shape) {
  std::string text = "]";
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    text = fmt::format("{}{}{}", element % shape[dim], text == "]" ? "" : ", ", text);
    element /= shape[dim];
  }
  return "[" + text;
}

std::string word(float value) {
  if (std::isnan(value)) return "nan";  // regardless of its sign
  return value > 0 ? "inf" : "-inf";
}

// @param begin  position of the first of `values` in the parameter
void look(const Tensor& values, const std::string& name, const Shape& shape, std::int64_t begin,
          std::vector<NonFinite>& found) {
  Context& context = *values.context();
  Tensor floats = values;
  if (values.dtype() != DType::F32) {
    floats = Tensor::empty(values.context(), values.shape(), DType::F32, MemoryCategory::Workspace,
                           "finite check");
    kernels::cast(context, values.view(), {floats.view(), false, true});
  }
  // Squares of finite float32 values do not overflow in float64.
  if (std::isfinite(kernels::sum_of_squares(context, floats.view()))) return;
  const auto bad = [](float x) { return !std::isfinite(x); };
  const std::vector<float> all = floats.to_vector<float>();
  const auto first = std::find_if(all.begin(), all.end(), bad);
  if (first == all.end()) return;
  found.push_back({name, std::count_if(first, all.end(), bad), values.numel(),
                   place(begin + (first - all.begin()), shape), word(*first)});
}

}  // namespace

std::vector<NonFinite> non_finite_gradients(const FlatUnit& unit) {
  std::vector<NonFinite> found;
  for (auto p = unit.parameters().rbegin(); p != unit.parameters().rend(); ++p) {
    const Tensor& tensor = (*p)->tensor;
    if (tensor.grad().defined()) look(tensor.grad(), (*p)->name, tensor.shape(), 0, found);
  }
  return found;
}

std::vector<NonFinite> non_finite_sums(const ShardedModel& model) {
  std::vector<NonFinite> found;
  for (const auto& unit : model.units()) {
    if (!unit->is_trainable()) continue;
    const std::int64_t begin = unit->segment_begin();
    for (const SlotRange& range : unit->layout().ranges(begin, begin + unit->segment_size())) {
      const ParameterSlot& slot = unit->layout().slots()[static_cast<std::size_t>(range.slot)];
      const Tensor part = unit->gradient().alias({range.end - range.begin}, {1}, range.offset);
      look(part, slot.name, slot.shape, range.begin, found);
    }
  }
  return found;
}

std::vector<NonFinite> non_finite_weights(ShardedModel& model) {
  std::vector<NonFinite> found;
  for (const ShardedModel::Piece& piece : model.held_pieces()) {
    look(piece.master, piece.parameter->name, piece.parameter->tensor.shape(), piece.begin, found);
  }
  return found;
}

}  // namespace tessera::comm
