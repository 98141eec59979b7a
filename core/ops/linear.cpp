#include "core/ops/linear.h"

#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/activation.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace tessera::ops {
namespace {

using autograd::SavedTensor;

struct Widths {
  std::int64_t in, out;
};

/// Checks a layer's weight and bias. @param prefix  prefix of their names: "fc_"
Widths check_layer(std::string_view operation, std::string_view prefix, const Tensor& weight,
                   const Tensor& bias, DType dtype, bool out_in) {
  const std::string weight_name = fmt::format("{}weight", prefix);
  check_dims(operation, weight_name, weight, 2, out_in ? "[out, in]" : "[in, out]");
  check_dtype(operation, weight_name, weight, dtype);
  check_contiguous(operation, weight_name, weight);
  const Widths widths{weight.dim(out_in ? 1 : 0), weight.dim(out_in ? 0 : 1)};
  if (bias.defined()) {
    check_dense(operation, fmt::format("{}bias", prefix), bias, dtype, {widths.out});
  }
  return widths;
}

void check_input(std::string_view operation, const Tensor& x, std::string_view weight_name,
                 const Tensor& weight, std::int64_t in, bool out_in) {
  require(x.shape().back() == in,
          "{}: the last dim of x must be {}, as {} is {} ({}); got x of shape {}", operation, in,
          weight_name, weight.shape(), out_in ? "[out, in]" : "[in, out]", x.shape());
}

Shape with_last(Shape shape, std::int64_t size) {
  shape[shape.size() - 1] = size;
  return shape;
}

/// y = x W [+ b] [+ residual].
kernels::Matmul layer_product(const TensorView& x, const Tensor& weight, const Tensor& bias,
                              const TensorView& y, bool out_in, const Tensor& residual = {}) {
  kernels::Matmul args{x, weight.view(), y, false, out_in};
  if (bias.defined()) args.bias = bias.view();
  if (residual.defined()) args.residual = as_rows(residual.view());
  return args;
}

void check_residual(std::string_view operation, const Tensor& residual, DType dtype,
                    const Shape& shape) {
  if (residual.defined()) check_dense(operation, "residual", residual, dtype, shape);
}

void input_gradient(Context& context, const TensorView& grad_y, const Tensor& weight, bool out_in,
                    const GradientView& to) {
  kernels::matmul(context, {grad_y, weight.view(), to.view, false, !out_in, to.accumulate});
}

/// Gradients of a layer's weight and bias.
/// @param x  returns the layer's input; called on demand
/// @param sums  of grad_y over its rows, if they are known
template <typename F>
void parameter_gradients(Context& context, const F& x, const TensorView& grad_y, bool out_in,
                         const GradientView& weight, const GradientView& bias,
                         const Tensor& sums = {}) {
  if (weight) {
    const Tensor kept = x();
    const TensorView in = as_rows(kept.view());
    kernels::matmul(context, {out_in ? grad_y : in, out_in ? in : grad_y, weight.view, true, false,
                              weight.accumulate});
  }
  if (bias && sums.defined())
    kernels::cast(context, sums.view(), bias);
  else if (bias)
    kernels::sum_rows(context, grad_y, bias);
}

struct SavedTerm {
  SavedTensor h, b;
  std::int64_t first;
};

void check_term(const LowRankTerm& term, const Tensor& x, std::int64_t out) {
  check_dims("linear", "b of a low-rank term", term.b, 2, "[out, rank]");
  const Shape rows = with_last(x.shape(), term.b.dim(1));
  check_dense("linear", "h of a low-rank term", term.h, x.dtype(), rows);
  check_dense("linear", "b of a low-rank term", term.b, x.dtype(), term.b.shape());
  require(term.first >= 0 && term.first <= out - term.b.dim(0),
          "linear: a low-rank term for columns {} to {} of {}", term.first,
          term.first + term.b.dim(0) - 1, out);
}

/// The columns of y [..., out] that a term is added to, as [rows, columns].
TensorView columns_of(const TensorView& y, const LowRankTerm& term) {
  return as_rows(y).narrow(1, term.first, term.b.dim(0));
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
              const std::vector<LowRankTerm>& terms, const Tensor& residual) {
  constexpr auto kName = "linear";
  const auto& context = common_context(kName, {&x, &weight, &bias, &residual});
  const bool out_in = layout == WeightLayout::OutIn;
  check_rows(kName, "x", x);
  const auto [in, out] = check_layer(kName, "", weight, bias, x.dtype(), out_in);
  check_input(kName, x, "weight", weight, in, out_in);

  for (const LowRankTerm& term : terms) check_term(term, x, out);
  const Shape shape = with_last(x.shape(), out);
  check_residual(kName, residual, x.dtype(), shape);

  std::vector<Tensor> inputs{x, weight, bias, residual};
  for (const LowRankTerm& term : terms) inputs.insert(inputs.end(), {term.h, term.b});
  Tensor y = autograd::result(context, shape, x.dtype(), kName, inputs,
                              [x, weight, bias, terms, residual, out_in](const TensorView& to) {
                                Context& ctx = *x.context();
                                kernels::matmul(ctx, layer_product(as_rows(x.view()), weight, bias,
                                                                   as_rows(to), out_in, residual));
                                for (const LowRankTerm& term : terms)
                                  kernels::matmul(ctx, {as_rows(term.h.view()), term.b.view(),
                                                        columns_of(to, term), false, true, true});
                              });

  const auto wants = [&](const Tensor& t) { return autograd::needs_grad({&t}); };
  if (std::any_of(inputs.begin(), inputs.end(), wants)) {
    // The gradient of weight needs x, and that of x needs weight.
    SavedTensor saved_x, saved_weight;
    if (wants(weight)) saved_x = SavedTensor(x);
    if (wants(x)) saved_weight = SavedTensor(weight);
    std::vector<SavedTerm> saved_terms;
    for (const LowRankTerm& term : terms)
      saved_terms.push_back({SavedTensor(term.h), SavedTensor(term.b), term.first});
    const auto backward = [saved_x, saved_weight, saved_terms, out_in](
                              const Tensor& grad_y, autograd::InputGradients& into) {
      Context& ctx = *grad_y.context();
      const TensorView grad = as_rows(grad_y.view());
      if (const GradientView grad_x = as_rows(into.target(0)))
        input_gradient(ctx, grad, saved_weight.get(kName), out_in, grad_x);
      const GradientView grad_weight = into.weight_target(1), grad_bias = into.weight_target(2);
      parameter_gradients(
          ctx, [&] { return saved_x.get(kName); }, grad, out_in, grad_weight, grad_bias,
          into.gradient_sums());
      into.pass(3, grad_y);
      int input = 4;
      for (const SavedTerm& term : saved_terms) {
        const LowRankTerm kept{term.h.get(kName), term.b.get(kName), term.first};
        const TensorView grad_part = columns_of(grad_y.view(), kept);
        if (const GradientView grad_h = as_rows(into.target(input++)))
          kernels::matmul(ctx,
                          {grad_part, kept.b.view(), grad_h.view, false, false, grad_h.accumulate});
        if (const GradientView grad_b = into.weight_target(input++))
          kernels::matmul(ctx, {grad_part, as_rows(kept.h.view()), grad_b.view, true, false,
                                grad_b.accumulate});
      }
    };
    autograd::record(kName, y, inputs, backward);
    if (wants(bias)) autograd::want_gradient_sums(y);
  }
  return y;
}

Tensor gated_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
                    Gate gate, const Tensor& residual) {
  constexpr auto kName = "gated_linear";
  const auto kind = gate == Gate::Silu ? kernels::GatedKind::SwiGlu : kernels::GatedKind::GeGlu;
  const auto& context = common_context(kName, {&x, &weight, &bias, &residual});
  const bool out_in = layout == WeightLayout::OutIn;
  check_rows(kName, "x", x);
  const auto sizes = check_layer(kName, "", weight, bias, x.dtype(), out_in);
  const std::int64_t in = sizes.in, out = sizes.out;
  require(x.shape().back() == 2 * in,
          "{}: the last dim of x must be {}, gate and up of the {} inputs of weight {}; got x of "
          "shape {}",
          kName, 2 * in, in, weight.shape(), x.shape());
  // The gated product of x, computed in forward and again in backward.
  const auto gated = [in, kind](const Tensor& packed) {
    Tensor y = Tensor::empty(packed.context(), with_last(packed.shape(), in), packed.dtype(),
                             MemoryCategory::Activations, "gated");
    const TensorView rows = as_rows(packed.view());
    kernels::gated_forward(*packed.context(), {rows.narrow(1, 0, in), rows.narrow(1, in, in),
                                               as_rows(y.view()), kind});
    return y;
  };

  const Shape shape = with_last(x.shape(), out);
  check_residual(kName, residual, x.dtype(), shape);
  Tensor y = autograd::result(context, shape, x.dtype(), kName, {x, weight, bias, residual},
                              [x, weight, bias, residual, gated, out_in](const TensorView& to) {
                                const Tensor h = gated(x);
                                kernels::matmul(*x.context(),
                                                layer_product(as_rows(h.view()), weight, bias,
                                                              as_rows(to), out_in, residual));
                              });

  if (autograd::needs_grad({&x, &weight, &bias, &residual})) {
    const auto backward = [saved_x = SavedTensor(x), saved_weight = SavedTensor(weight), gated,
                           out_in, in, kind](const Tensor& grad_y, autograd::InputGradients& into) {
      Context& ctx = *grad_y.context();
      const TensorView grad = as_rows(grad_y.view());
      const Tensor& kept = saved_x.get(kName);
      const GradientView grad_weight = into.weight_target(1), grad_bias = into.weight_target(2);
      parameter_gradients(
          ctx, [&] { return gated(kept); }, grad, out_in, grad_weight, grad_bias,
          into.gradient_sums());
      into.pass(3, grad_y);
      const GradientView grad_x = as_rows(into.target(0));
      if (!grad_x) return;
      const Tensor grad_gated =
          Tensor::empty(kept.context(), with_last(kept.shape(), in), kept.dtype(),
                        MemoryCategory::Activations, "gated_linear.grad");
      const TensorView grad_rows = as_rows(grad_gated.view()), rows = as_rows(kept.view());
      input_gradient(ctx, grad, saved_weight.get(kName), out_in, {grad_rows, false, true});
      const auto half = [&](std::int64_t begin) {
        return GradientView{grad_x.view.narrow(1, begin, in), grad_x.accumulate, true};
      };
      kernels::gated_backward(
          ctx, {rows.narrow(1, 0, in), rows.narrow(1, in, in), grad_rows, half(0), half(in), kind});
    };
    autograd::record(kName, y, {x, weight, bias, residual}, backward);
    if (autograd::needs_grad({&bias})) autograd::want_gradient_sums(y);
  }
  return y;
}

Tensor gelu_mlp(const Tensor& x, const Tensor& fc_weight, const Tensor& fc_bias,
                const Tensor& proj_weight, const Tensor& proj_bias, WeightLayout layout,
                const Tensor& residual) {
  constexpr auto kName = "gelu_mlp";
  const auto& context =
      common_context(kName, {&x, &fc_weight, &fc_bias, &proj_weight, &proj_bias, &residual});
  const bool out_in = layout == WeightLayout::OutIn;
  check_rows(kName, "x", x);
  const Widths fc_widths = check_layer(kName, "fc_", fc_weight, fc_bias, x.dtype(), out_in);
  const std::int64_t in = fc_widths.in, hidden = fc_widths.out;
  check_input(kName, x, "fc_weight", fc_weight, in, out_in);
  const auto [proj_in, out] =
      check_layer(kName, "proj_", proj_weight, proj_bias, x.dtype(), out_in);
  require(proj_in == hidden, "{}: fc_weight {} gives {} values, proj_weight {} takes {}", kName,
          fc_weight.shape(), hidden, proj_weight.shape(), proj_in);

  const Shape shape = with_last(x.shape(), out);
  check_residual(kName, residual, x.dtype(), shape);

  const bool grad_reaches_fc = autograd::needs_grad({&x, &fc_weight, &fc_bias});
  const auto hidden_values = [&](std::string_view owner) {
    return Tensor::empty(context, with_last(x.shape(), hidden), x.dtype(),
                         MemoryCategory::Activations, owner);
  };
  Tensor pre, activated = hidden_values("gelu_mlp.gelu");
  if (grad_reaches_fc) pre = hidden_values("gelu_mlp.fc");
  kernels::Matmul fc =
      layer_product(as_rows(x.view()), fc_weight, fc_bias, as_rows(activated.view()), out_in);
  fc.epilogue = kernels::Epilogue::Gelu;
  if (pre.defined()) fc.pre = as_rows(pre.view());
  kernels::matmul(*context, fc);
  Tensor y = autograd::result(
      context, shape, x.dtype(), kName, {activated, proj_weight, proj_bias, residual},
      [activated, proj_weight, proj_bias, residual, out_in](const TensorView& to) {
        kernels::matmul(*activated.context(),
                        layer_product(as_rows(activated.view()), proj_weight, proj_bias,
                                      as_rows(to), out_in, residual));
      });

  if (grad_reaches_fc || autograd::needs_grad({&proj_weight, &proj_bias, &residual})) {
    SavedTensor saved_x, saved_fc, saved_pre, saved_activated, saved_proj;
    if (fc_weight.requires_grad()) saved_x = SavedTensor(x);
    if (x.requires_grad()) saved_fc = SavedTensor(fc_weight);
    if (grad_reaches_fc) saved_pre = SavedTensor(pre), saved_proj = SavedTensor(proj_weight);
    if (pre.defined())
      autograd::recompute_if_cheap(activated, "gelu_mlp.gelu", {pre},
                                   [](std::span<const Tensor> in, const TensorView& to) {
                                     kernels::gelu_forward(*in[0].context(), {in[0].view(), to});
                                   });
    if (proj_weight.requires_grad()) saved_activated = SavedTensor(activated);
    // Saved tensors are freed after their last use, to make room for gradients.
    auto backward = [saved_x, saved_fc, saved_pre, saved_activated, saved_proj, out_in](
                        const Tensor& grad_y, autograd::InputGradients& into) mutable {
      Context& ctx = *grad_y.context();
      const TensorView grad = as_rows(grad_y.view());
      const GradientView grad_weight = into.weight_target(3), grad_bias = into.weight_target(4);
      parameter_gradients(
          ctx, [&] { return saved_activated.get(kName); }, grad, out_in, grad_weight, grad_bias,
          into.gradient_sums());
      saved_activated = {};
      into.pass(5, grad_y);
      if (!saved_pre.defined()) return;

      const Tensor& kept = saved_pre.get(kName);
      const Tensor grad_pre = Tensor::empty(kept.context(), kept.shape(), kept.dtype(),
                                            MemoryCategory::Activations, "gelu_mlp.grad");
      const TensorView grad_hidden = as_rows(grad_pre.view());
      kernels::matmul(ctx, {.a = grad,
                            .b = saved_proj.get(kName).view(),
                            .c = grad_hidden,
                            .transpose_b = !out_in,
                            .epilogue = kernels::Epilogue::GeluGradient,
                            .pre = as_rows(kept.view())});
      saved_pre = {};
      if (const GradientView grad_x = as_rows(into.target(0)))
        input_gradient(ctx, grad_hidden, saved_fc.get(kName), out_in, grad_x);
      const GradientView fc_weight_to = into.weight_target(1), fc_bias_to = into.weight_target(2);
      parameter_gradients(
          ctx, [&] { return saved_x.get(kName); }, grad_hidden, out_in, fc_weight_to, fc_bias_to);
    };
    autograd::record(kName, y, {x, fc_weight, fc_bias, proj_weight, proj_bias, residual},
                     std::move(backward));
    if (autograd::needs_grad({&proj_bias})) autograd::want_gradient_sums(y);
  }
  return y;
}

}  // namespace tessera::ops
