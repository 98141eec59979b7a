#include "core/ops/experts.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/activation.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/experts.h"
#include "kernels/grouped_matmul.h"

namespace tessera::ops {
namespace {

using autograd::InputGradients;
using autograd::SavedTensor;

// Other devices would have to wait for a check.
void check_experts(const Tensor& experts, std::int64_t count) {
  if (experts.device().type != DeviceType::CPU) return;
  const std::int32_t* const values = experts.data<std::int32_t>();
  for (std::int64_t i = 0; i < experts.numel(); ++i)
    require(values[i] >= 0 && values[i] < count,
            "group_by_expert: expert {} at element {} is not in [0, {})", values[i], i, count);
}

std::vector<TensorView> views_of(const std::vector<SavedTensor>& weights) {
  std::vector<TensorView> views;
  for (const SavedTensor& weight : weights) views.push_back(weight.get("expert_mlps").view());
  return views;
}

// Gate and up of rows [M, 2 H].
TensorView packed_half(const TensorView& rows, int index) {
  const std::int64_t width = rows.shape[1] / 2;
  return rows.narrow(1, index * width, width);
}

}  // namespace

Tensor top_k(const Tensor& x, std::int64_t k) {
  constexpr std::string_view kName = "top_k";
  const auto& context = common_context(kName, {&x});
  check_dims(kName, "x", x, 2, "[N, E]");
  check_rows(kName, "x", x);
  require(k >= 1 && k <= x.dim(1), "{}: k must be in 1..{}, the columns of x, got {}", kName,
          x.dim(1), k);
  Tensor index =
      Tensor::empty(context, {x.dim(0), k}, DType::I32, MemoryCategory::Activations, kName);
  kernels::top_k(*context, {x.view(), index.view()});
  return index;
}

Grouping group_by_expert(const Tensor& experts, std::int64_t count, DType count_dtype) {
  constexpr std::string_view kName = "group_by_expert";
  const auto& context = common_context(kName, {&experts});
  check_dims(kName, "experts", experts, 2, "[N, k]");
  check_dtype(kName, "experts", experts, DType::I32);
  check_contiguous(kName, "experts", experts);
  require(count >= 1 && count <= kernels::kMostGroups, "{}: takes 1 to {} experts, got {}", kName,
          kernels::kMostGroups, count);
  require(count_dtype == DType::F32 || count_dtype == DType::F64,
          "{}: counts are f32 or f64, got {}", kName, count_dtype);
  const std::int64_t pairs = experts.numel();
  require(pairs < (std::int64_t{1} << 31), "{}: {} pairs are more than 2^31 - 1", kName, pairs);
  check_experts(experts, count);
  const auto list = [&](std::int64_t size, DType dtype) {
    return Tensor::empty(context, {size}, dtype, MemoryCategory::Activations, kName);
  };
  Grouping result{list(pairs, DType::I32), list(pairs, DType::I32), list(count + 1, DType::I32),
                  list(count, count_dtype)};
  kernels::group_pairs(*context, {experts.view(), result.order.view(), result.place.view(),
                                  result.offsets.view(), result.counts.view()});
  return result;
}

Tensor spread_rows(const Tensor& x, const Grouping& grouping) {
  constexpr std::string_view kName = "spread_rows";
  const auto& context = common_context(kName, {&x, &grouping.order});
  check_dims(kName, "x", x, 2, "[N, C]");
  check_rows(kName, "x", x);
  const std::int64_t pairs = grouping.order.numel();
  require(x.dim(0) > 0 && pairs % x.dim(0) == 0, "{}: {} pairs are no multiple of {} tokens", kName,
          pairs, x.dim(0));
  Tensor y =
      Tensor::empty(context, {pairs, x.dim(1)}, x.dtype(), MemoryCategory::Activations, kName);
  kernels::spread_rows(
      *context,
      {.x = x.view(), .order = grouping.order.view(), .y = GradientView{y.view(), false, true}});

  if (autograd::needs_grad({&x})) {
    const auto backward = [place = SavedTensor(grouping.place)](const Tensor& grad_y,
                                                                InputGradients& into) {
      kernels::collect_rows(
          *grad_y.context(),
          {.x = grad_y.view(), .place = place.get("spread_rows").view(), .y = into.target(0)});
    };
    autograd::record(kName, y, {x}, backward);
  }
  return y;
}

Tensor collect_rows(const Tensor& rows, const Tensor& weights, const Grouping& grouping) {
  constexpr std::string_view kName = "collect_rows";
  const auto& context = common_context(kName, {&rows, &weights, &grouping.place});
  check_dims(kName, "rows", rows, 2, "[M, C]");
  check_rows(kName, "rows", rows);
  check_dims(kName, "weights", weights, 2, "[N, k]");
  check_dense(kName, "weights", weights, kernels::accumulator_dtype(rows.dtype()), weights.shape());
  require(weights.numel() == rows.dim(0) && grouping.place.numel() == rows.dim(0),
          "{}: rows {}, weights {} and a grouping of {} pairs don't match", kName, rows.shape(),
          weights.shape(), grouping.place.numel());
  Tensor y = Tensor::empty(context, {weights.dim(0), rows.dim(1)}, rows.dtype(),
                           MemoryCategory::Activations, kName);
  kernels::collect_rows(
      *context, {rows.view(), grouping.place.view(), weights.view(), {y.view(), false, true}});

  if (autograd::needs_grad({&rows, &weights})) {
    const auto backward = [saved_rows = SavedTensor(rows), saved_weights = SavedTensor(weights),
                           order = SavedTensor(grouping.order),
                           place = SavedTensor(grouping.place)](const Tensor& grad_y,
                                                                InputGradients& into) {
      Context& ctx = *grad_y.context();
      if (const GradientView to = into.target(1))
        kernels::row_products(ctx, {grad_y.view(), saved_rows.get("collect_rows").view(),
                                    place.get("collect_rows").view(), to});
      if (const GradientView to = into.target(0))
        kernels::spread_rows(ctx, {grad_y.view(), order.get("collect_rows").view(),
                                   saved_weights.get("collect_rows").view(), to});
    };
    autograd::record(kName, y, {rows, weights}, backward);
  }
  return y;
}

Tensor expert_mlps(const Tensor& x, const Grouping& grouping, std::int64_t first,
                   const std::vector<Tensor>& up, const std::vector<Tensor>& down, Gate gate,
                   const Tensor& hidden, const Tensor& before) {
  constexpr std::string_view kName = "expert_mlps";
  const auto& context = common_context(kName, {&x, &grouping.offsets, &hidden, &before});
  check_dims(kName, "x", x, 2, "[M, C]");
  check_rows(kName, "x", x);
  const std::int64_t rows = x.dim(0), width = x.dim(1);
  const std::int64_t all = grouping.offsets.numel() - 1, count = std::ssize(up);
  check_dims(kName, "hidden", hidden, 2, "[M, 2 H]");
  const std::int64_t inner = hidden.dim(1) / 2;
  check_dense(kName, "hidden", hidden, x.dtype(), {rows, 2 * inner});
  check_dense(kName, "before", before, x.dtype(), x.shape());
  require(grouping.order.numel() == rows, "{}: x has {} rows, the grouping {} pairs", kName, rows,
          grouping.order.numel());
  require(count >= 1 && std::ssize(down) == count && first >= 0 && first + count <= all,
          "{}: {} and {} weights from expert {} on, of {} experts", kName, count, down.size(),
          first, all);
  std::vector<Tensor> inputs{x, before};
  for (const Tensor& weight : up) {
    check_dense(kName, "up", weight, x.dtype(), {2 * inner, width});
    inputs.push_back(weight);
  }
  for (const Tensor& weight : down) {
    check_dense(kName, "down", weight, x.dtype(), {width, inner});
    inputs.push_back(weight);
  }
  const auto saved = [](const std::vector<Tensor>& weights) {
    return std::vector<SavedTensor>(weights.begin(), weights.end());
  };
  const auto kind = gate == Gate::Silu ? kernels::GatedKind::SwiGlu : kernels::GatedKind::GeGlu;
  // Rows that no expert of this run writes are zero.
  const auto buffer = [rows, is_part = count < all](const std::shared_ptr<Context>& owner,
                                                    std::int64_t columns, DType dtype,
                                                    std::string_view name) {
    Tensor empty = Tensor::empty(owner, {rows, columns}, dtype, MemoryCategory::Activations, name);
    if (is_part) kernels::fill(*owner, empty.view(), 0.0);
    return empty;
  };
  // The gated product, computed in forward and again in backward.
  const auto gated = [buffer, kind, inner](const Tensor& packed) {
    Tensor y = buffer(packed.context(), inner, packed.dtype(), "expert_mlps.gated");
    kernels::gated_forward(*packed.context(), {packed_half(packed.view(), 0),
                                               packed_half(packed.view(), 1), y.view(), kind});
    return y;
  };
  // Products of `in` and the weights of this run's experts.
  const auto multiply = [first, count](Context& ctx, const TensorView& in,
                                       const TensorView& offsets,
                                       const std::vector<TensorView>& weights, bool transposed,
                                       const GradientView& to) {
    kernels::grouped_matmul(ctx, {in, offsets, weights.data(), first, count, to, transposed});
  };

  const std::vector<SavedTensor> saved_up = saved(up), saved_down = saved(down);
  const TensorView offsets = grouping.offsets.view();
  multiply(*context, x.view(), offsets, views_of(saved_up), true, {hidden.view(), false, true});
  Tensor y = before.alias(before.shape(), before.strides(), 0);
  multiply(*context, gated(hidden).view(), offsets, views_of(saved_down), true,
           {y.view(), false, true});

  if (!context->grad_enabled()) return y;
  const auto backward = [=, saved_x = SavedTensor(x), saved_hidden = SavedTensor(hidden),
                         saved_offsets = SavedTensor(grouping.offsets)](const Tensor& grad_y,
                                                                        InputGradients& into) {
    Context& ctx = *grad_y.context();
    into.pass(1, grad_y);
    const TensorView groups = saved_offsets.get(kName).view();
    const Tensor& packed = saved_hidden.get(kName);
    const auto weight_gradients = [&](const TensorView& grad, const TensorView& in,
                                      std::int64_t input) {
      std::vector<GradientView> to;
      bool any = false;
      for (std::int64_t i = 0; i < count; ++i) {
        to.push_back(into.weight_target(static_cast<int>(input + i)));
        any = any || to.back();
      }
      if (any) kernels::grouped_gradient(ctx, {grad, in, groups, to.data(), first, count});
    };
    weight_gradients(grad_y.view(), gated(packed).view(), 2 + count);

    const Tensor grad_packed =
        buffer(packed.context(), 2 * inner, packed.dtype(), "expert_mlps.grad");
    {
      const Tensor grad_gated = buffer(packed.context(), inner, packed.dtype(), "expert_mlps.grad");
      multiply(ctx, grad_y.view(), groups, views_of(saved_down), false,
               {grad_gated.view(), false, true});
      kernels::gated_backward(ctx, {packed_half(packed.view(), 0),
                                    packed_half(packed.view(), 1),
                                    grad_gated.view(),
                                    {packed_half(grad_packed.view(), 0), false, true},
                                    {packed_half(grad_packed.view(), 1), false, true},
                                    kind});
    }
    weight_gradients(grad_packed.view(), saved_x.get(kName).view(), 2);
    GradientView to = into.target(0);
    if (to && !to.accumulate && count < all) {
      kernels::fill(ctx, to.view, 0.0);
      to.accumulate = true;
    }
    if (to) multiply(ctx, grad_packed.view(), groups, views_of(saved_up), false, to);
  };
  autograd::record(kName, y, inputs, backward);
  return y;
}

}  // namespace tessera::ops
