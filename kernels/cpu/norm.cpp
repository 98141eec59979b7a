#include "kernels/norm.h"

#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

// Rows are worked on in functions of plain pointers: read through a closure, a sum may be left
// scalar by the compiler.
template <typename T, typename A>
void forward_row(const T* x, const T* weight, const T* bias, A eps, T* y, A& mean, A& rstd,
                 std::int64_t width) {
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t c = 0; c < width; ++c) sum += load(x + c);
  const A center = sum / static_cast<A>(width);
  // A second pass: the difference of two sums of squares would cancel.
  A squares = 0;
#pragma omp simd reduction(+ : squares)
  for (std::int64_t c = 0; c < width; ++c) {
    const A centered = load(x + c) - center;
    squares += centered * centered;
  }
  const A scale = A(1) / std::sqrt(squares / static_cast<A>(width) + eps);
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c)
    store(y + c, load(weight + c) * ((load(x + c) - center) * scale) + load(bias + c));
  mean = center;
  rstd = scale;
}

template <typename T>
void forward(Context& context, const LayerNormForward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* weight = static_cast<const T*>(args.weight.data);
  const auto* bias = static_cast<const T*>(args.bias.data);
  auto* y = static_cast<T*>(args.y.data);
  auto* means = static_cast<A*>(args.mean.data);
  auto* rstds = static_cast<A*>(args.rstd.data);
  const std::int64_t width = args.x.shape[1];
  const A eps = static_cast<A>(args.eps);
  for_rows(context, args.x.shape[0], width, [=](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row) {
      A mean, rstd;
      forward_row(x + row * width, weight, bias, eps, y + row * width, mean, rstd, width);
      if (means != nullptr) means[row] = mean;
      if (rstds != nullptr) rstds[row] = rstd;
    }
  });
}

// With n = (x - mean) rstd and g = weight grad_y:
// grad_x = rstd (g - mean(g) - n mean(g n)), means over the row.
template <bool kAccumulate, typename T, typename A>
void input_gradient_of_row(const T* x, const T* weight, const T* grad_y, A mean, A rstd, T* grad_x,
                           std::int64_t width) {
  A sum_g = 0, sum_gn = 0;
#pragma omp simd reduction(+ : sum_g, sum_gn)
  for (std::int64_t c = 0; c < width; ++c) {
    const A g = load(weight + c) * load(grad_y + c);
    sum_g += g;
    sum_gn += g * ((load(x + c) - mean) * rstd);
  }
  const A mean_g = sum_g / static_cast<A>(width), mean_gn = sum_gn / static_cast<A>(width);
#pragma omp simd
  for (std::int64_t c = 0; c < width; ++c) {
    const A g = load(weight + c) * load(grad_y + c);
    const A n = (load(x + c) - mean) * rstd;
    A grad = rstd * (g - mean_g - n * mean_gn);
    if constexpr (kAccumulate) grad += load(grad_x + c);
    store(grad_x + c, grad);
  }
}

template <typename T, bool kAccumulate>
void input_gradient(Context& context, const LayerNormBackward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* weight = static_cast<const T*>(args.weight.data);
  const auto* means = static_cast<const A*>(args.mean.data);
  const auto* rstds = static_cast<const A*>(args.rstd.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad_x = static_cast<T*>(args.grad_x.view.data);
  const std::int64_t width = args.x.shape[1];
  for_rows(context, args.x.shape[0], width, [=](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row) {
      const std::int64_t first = row * width;
      input_gradient_of_row<kAccumulate>(x + first, weight, grad_y + first, means[row], rstds[row],
                                         grad_x + first, width);
    }
  });
}

template <typename T>
void parameter_gradients(Context& context, const LayerNormBackward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* means = static_cast<const A*>(args.mean.data);
  const auto* rstds = static_cast<const A*>(args.rstd.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  const std::int64_t width = args.x.shape[1];
  const auto finish = [](const GradientView& grad, std::int64_t c, A sum) {
    if (!grad) return;
    A* out = static_cast<A*>(grad.view.data) + c;
    *out = grad.accumulate ? *out + sum : sum;
  };
  column_sums<A, 2>(
      context, args.x.shape[0], width,
      [=](std::int64_t r, std::int64_t c, A* sums) {
        const A g = load(grad_y + r * width + c);
        sums[0] += g * ((load(x + r * width + c) - means[r]) * rstds[r]);
        sums[1] += g;
      },
      [&](std::int64_t c, const A* sums) {
        finish(args.grad_weight, c, sums[0]);
        finish(args.grad_bias, c, sums[1]);
      });
}

}  // namespace

void layer_norm_forward(Context& context, const LayerNormForward& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { forward<T>(context, args); });
}

void layer_norm_backward(Context& context, const LayerNormBackward& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    if (args.grad_x) {
      visit_flag(args.grad_x.accumulate,
                 [&](auto accumulate) { input_gradient<T, accumulate()>(context, args); });
    }
    if (args.grad_weight || args.grad_bias) parameter_gradients<T>(context, args);
  });
}

TESSERA_CPU_END
