#include "core/optim/muon.h"

#include <algorithm>
#include <cmath>

#include "core/base/rng.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "kernels/optimizer.h"

namespace tessera::optim {
namespace {

constexpr int kSteps = 5;
// Coefficients of a x + b x^3 + c x^5, which brings singular values near 1.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

Tensor scratch(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype) {
  return Tensor::empty(context, shape, dtype, MemoryCategory::Workspace, "muon");
}

struct Orthogonal {
  Tensor matrix;
  double scale = 1;  ///< of `matrix`
};

/// U V^T, nearly, for m = U S V^T.
/// @param m  [r, c] f32 or bf16, the dtype in which this computes
Orthogonal orthogonalized(const Tensor& m) {
  const std::shared_ptr<Context>& context = m.context();
  const std::int64_t rows = m.dim(0), columns = m.dim(1), side = std::min(rows, columns);
  Tensor wide = m;
  if (m.dtype() != DType::F32) {
    wide = scratch(context, m.shape(), DType::F32);
    kernels::cast(*context, m.view(), {wide.view(), false, true});
  }
  const Tensor sum = scratch(context, {1}, DType::F64);
  kernels::sum_of_squares(*context, {wide.view(), sum.view()});
  const Tensor x = scratch(context, m.shape(), m.dtype());
  kernels::normalize(*context, {wide.view(), sum.view(), x.view()});
  wide = {};

  const Tensor gram = scratch(context, {side, side}, m.dtype()),
               square = scratch(context, {side, side}, m.dtype()),
               product = scratch(context, m.shape(), m.dtype());
  const auto multiply = [&](const Tensor& a, const Tensor& b, const Tensor& c, bool transpose_a,
                            bool transpose_b) {
    kernels::matmul(*context, {a.view(), b.view(), c.view(), transpose_a, transpose_b});
  };
  const auto add = [&](const Tensor& to, const Tensor& from, double factor) {
    kernels::cast(*context, from.view(), {to.view(), true, true}, factor);
  };
  // With X = scale * x and G = X X^T, a step is X = a X + (b G + c G G) X. The factors that
  // products don't have are kept in `scale`.
  double scale = 1;
  for (int i = 0; i < kSteps; ++i) {
    const double squared = scale * scale;
    const bool is_tall = rows > columns;
    multiply(x, x, gram, is_tall, !is_tall);
    multiply(gram, gram, square, false, false);
    add(gram, square, kC * squared / kB);
    if (is_tall)
      multiply(x, gram, product, false, false);
    else
      multiply(gram, x, product, false, false);
    add(x, product, kB * squared / kA);
    scale *= kA;
  }
  return {x, scale};
}

}  // namespace

Muon::Muon(const MuonOptions& options) : options_(options), adamw_(options.adamw) {
  require(options.momentum >= 0 && options.momentum < 1, "muon: momentum must be in [0, 1), got {}",
          options.momentum);
}

std::vector<std::string> Muon::state_names() const {
  std::vector<std::string> names{"momentum_buffer"};
  for (std::string& name : adamw_.state_names()) names.push_back(std::move(name));
  return names;
}

bool Muon::has_state(std::size_t i, const ParameterSlot& slot) const {
  return slot.is_matrix == (i == 0);
}

void Muon::update(const Segment& segment, const UpdateOptions& options) const {
  require(segment.state.size() == 3, "muon: expected 3 state tensors, got {}",
          segment.state.size());
  require(segment.param.context() == segment.grad.context() &&
              segment.param.context() == options.factor.context(),
          "muon: param, grad and factor must be of one context");
  update_others(segment, options);
  if (std::ranges::any_of(segment.layout.slots(), &ParameterSlot::is_matrix))
    update_matrices(segment, options);
}

void Muon::update_others(const Segment& segment, const UpdateOptions& options) const {
  const std::int64_t n = segment.param.numel();
  const auto ranges = segment.layout.ranges(segment.first, segment.first + n);
  const StatePlaces places(*this, 1, segment.layout, segment.first, n);
  for (std::size_t i = 0; i < ranges.size();) {
    const std::size_t first = i;
    while (i < ranges.size() && places.first[i] >= 0) ++i;
    if (i == first) {
      ++i;
      continue;
    }
    // Neighbours in the segment are neighbours in the state.
    const std::int64_t begin = ranges[first].offset;
    const std::int64_t length =
        ranges[i - 1].offset + ranges[i - 1].end - ranges[i - 1].begin - begin;
    const auto part = [&](const Tensor& t, std::int64_t at) { return t.alias({length}, {1}, at); };
    adamw_.update({.layout = segment.layout,
                   .first = segment.first + begin,
                   .param = part(segment.param, begin),
                   .grad = part(segment.grad, begin),
                   .state = {part(segment.state[1], places.first[first]),
                             part(segment.state[2], places.first[first])},
                   .copy = segment.copy.defined() ? part(segment.copy, begin) : Tensor()},
                  options);
  }
}

void Muon::update_matrices(const Segment& segment, const UpdateOptions& options) const {
  const ShardLayout& layout = segment.layout;
  const std::shared_ptr<Context>& context = segment.param.context();
  const std::int64_t n = segment.param.numel();
  const auto ranges = layout.ranges(segment.first, segment.first + n);
  const StatePlaces places(*this, 0, layout, segment.first, n);

  const Tensor whole = scratch(context, {layout.padded_size()}, segment.compute);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (places.first[i] < 0) continue;
    const std::int64_t length = ranges[i].end - ranges[i].begin;
    const auto part = [&](const Tensor& t, std::int64_t at) { return t.alias({length}, {1}, at); };
    kernels::muon_momentum(*context, {part(segment.grad, ranges[i].offset).view(),
                                      part(segment.state[0], places.first[i]).view(),
                                      part(whole, segment.first + ranges[i].offset).view(),
                                      options.factor.view(), options_.momentum});
  }
  if (segment.gather) segment.gather(whole);

  const bool is_half = segment.param.dtype() == DType::BF16;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (places.first[i] < 0) continue;
    const SlotRange& range = ranges[i];
    const ParameterSlot& slot = layout.slots()[static_cast<std::size_t>(range.slot)];
    const std::int64_t rows = slot.shape[0], columns = slot.shape[1];
    const Orthogonal update =
        orthogonalized(whole.alias({rows, columns}, {columns, 1}, slot.offset));
    const std::int64_t length = range.end - range.begin;
    const auto part = [&](const Tensor& t, std::int64_t at) { return t.alias({length}, {1}, at); };
    const double lr = options.lr * static_cast<double>(slot.lr_scale);
    const double shape_scale = 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)));
    kernels::weight_update(
        *context,
        {.param = part(segment.param, range.offset).view(),
         .update = part(update.matrix, range.begin).view(),
         .factor = options.factor.view(),
         .copy = segment.copy.defined() ? part(segment.copy, range.offset).view() : TensorView{},
         .lr = lr,
         .weight_decay = slot.decay ? options_.adamw.weight_decay : 0.0,
         .rate = lr * shape_scale * update.scale,
         .decay = options_.adamw.decay,
         .stochastic = is_half,
         .rng = is_half ? context->rng_step() : nullptr,
         .step = options.step,
         .place = hash_text(slot.name),
         .first_element = static_cast<std::uint64_t>(range.begin)});
  }
}

}  // namespace tessera::optim
