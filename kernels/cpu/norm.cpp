#include "kernels/norm.h"

#include "kernels/cpu/column_sums.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

// RMS norm is layer norm with a mean and a bias of zero.
enum class Norm { kLayer, kRms };

// Rows are processed by functions of plain pointers, because compilers may not vectorize a sum over
// data that a closure points to.
template <Norm norm, typename T, typename A>
void forward_row(const T* x, const T* weight, A offset, const T* bias, A eps, T* y, A& mean,
                 A& rstd, std::int64_t width) {
  A center = 0;
  if constexpr (norm == Norm::kLayer)
    center = vector_sum<A>(width, [=]<typename V>(std::type_identity<V>,
                                                  std::int64_t c) { return load_as<V>(x + c); }) /
             static_cast<A>(width);
  // In a second pass, because mean(x^2) - mean(x)^2 would cancel.
  const A squares = vector_sum<A>(width, [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    const V centered = load_as<V>(x + c) - center;
    return centered * centered;
  });
  const A scale = A(1) / std::sqrt(squares / static_cast<A>(width) + eps);
  for_vectors<A>(width, [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    V value = (load_as<V>(weight + c) + offset) * ((load_as<V>(x + c) - center) * scale);
    if constexpr (norm == Norm::kLayer) value += load_as<V>(bias + c);
    store_as(y + c, value);
  });
  mean = center;
  rstd = scale;
}

template <typename T>
void add_row(const T* x, const T* residual, T* sum, std::int64_t width) {
  using A = Accumulator<T>;
  for_vectors<A>(width, [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    store_as(sum + c, load_as<V>(x + c) + load_as<V>(residual + c));
  });
}

template <Norm norm, typename T>
void forward(Context& context, const NormForward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* weight = static_cast<const T*>(args.weight.data);
  const auto* bias = static_cast<const T*>(args.bias.data);
  const auto* residual = static_cast<const T*>(args.residual.data);
  auto* sum = static_cast<T*>(args.sum.data);
  auto* y = static_cast<T*>(args.y.data);
  auto* means = static_cast<A*>(args.mean.data);
  auto* rstds = static_cast<A*>(args.rstd.data);
  const std::int64_t width = args.x.shape[1];
  const A eps = static_cast<A>(args.eps), offset = static_cast<A>(args.offset);
  for_rows(context, args.x.shape[0], width, [=](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row) {
      const std::int64_t first = row * width;
      const T* in = x + first;
      if (residual != nullptr) {
        add_row(in, residual + first, sum + first, width);
        in = sum + first;
      }
      A mean, rstd;
      forward_row<norm>(in, weight, offset, bias, eps, y + first, mean, rstd, width);
      if (means != nullptr) means[row] = mean;
      if (rstds != nullptr) rstds[row] = rstd;
    }
  });
}

// With n = (x - mean) rstd and g = weight grad_y:
// grad_x = rstd (g - mean(g) - n mean(g n)), means over the row; without mean(g) for RMS norm.
template <Norm norm, bool kAccumulate, typename T, typename A>
void input_gradient_of_row(const T* x, const T* weight, A offset, const T* grad_y, A mean, A rstd,
                           T* grad_x, std::int64_t width) {
  const auto g_at = [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    return (load_as<V>(weight + c) + offset) * load_as<V>(grad_y + c);
  };
  const auto n_at = [=]<typename V>(std::type_identity<V>, std::int64_t c) {
    return (load_as<V>(x + c) - mean) * rstd;
  };
  A mean_g = 0;
  if constexpr (norm == Norm::kLayer) mean_g = vector_sum<A>(width, g_at) / static_cast<A>(width);
  const A mean_gn =
      vector_sum<A>(width,
                    [=](auto type, std::int64_t c) { return g_at(type, c) * n_at(type, c); }) /
      static_cast<A>(width);
  for_vectors<A>(width, [=]<typename V>(std::type_identity<V> type, std::int64_t c) {
    V grad = rstd * (g_at(type, c) - mean_g - n_at(type, c) * mean_gn);
    if constexpr (kAccumulate) grad += load_as<V>(grad_x + c);
    store_as(grad_x + c, grad);
  });
}

template <Norm norm, typename T, bool kAccumulate>
void input_gradient(Context& context, const NormBackward& args) {
  using A = Accumulator<T>;
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* weight = static_cast<const T*>(args.weight.data);
  const auto* means = static_cast<const A*>(args.mean.data);
  const auto* rstds = static_cast<const A*>(args.rstd.data);
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad_x = static_cast<T*>(args.grad_x.view.data);
  const std::int64_t width = args.x.shape[1];
  const A offset = static_cast<A>(args.offset);
  for_rows(context, args.x.shape[0], width, [=](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row) {
      const std::int64_t first = row * width;
      const A mean = norm == Norm::kLayer ? means[row] : A(0);
      input_gradient_of_row<norm, kAccumulate>(x + first, weight, offset, grad_y + first, mean,
                                               rstds[row], grad_x + first, width);
    }
  });
}

template <Norm norm, typename T>
void parameter_gradients(Context& context, const NormBackward& args) {
  using A = Accumulator<T>;
  constexpr int kSums = norm == Norm::kLayer ? 2 : 1;
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
  column_sums<A, kSums>(
      context, args.x.shape[0], width,
      [=]<typename V>(std::int64_t r, std::int64_t c, V* sums) {
        const V g = load_as<V>(grad_y + r * width + c);
        const A mean = norm == Norm::kLayer ? means[r] : A(0);
        sums[0] += g * ((load_as<V>(x + r * width + c) - mean) * rstds[r]);
        if constexpr (norm == Norm::kLayer) sums[1] += g;
      },
      [&](std::int64_t c, const A* sums) {
        finish(args.grad_weight, c, sums[0]);
        if constexpr (norm == Norm::kLayer) finish(args.grad_bias, c, sums[1]);
      });
}

// The sum of each column of grad_x, in the order of sum_rows.
template <typename T>
void input_gradient_sums(Context& context, const NormBackward& args) {
  using A = Accumulator<T>;
  const auto* grad_x = static_cast<const T*>(args.grad_x.view.data);
  const std::int64_t width = args.x.shape[1];
  auto* out = static_cast<A*>(args.grad_x_sums.view.data);
  const bool accumulate = args.grad_x_sums.accumulate;
  column_sums<A, 1>(
      context, args.x.shape[0], width,
      [=]<typename V>(std::int64_t r, std::int64_t c, V* sums) {
        sums[0] += load_as<V>(grad_x + r * width + c);
      },
      [=](std::int64_t c, const A* sums) { out[c] = accumulate ? out[c] + sums[0] : sums[0]; });
}

template <Norm norm>
void run_forward(Context& context, const NormForward& args) {
  visit_dtype(args.x.dtype,
              [&]<typename T>(std::type_identity<T>) { forward<norm, T>(context, args); });
}

template <Norm norm>
void run_backward(Context& context, const NormBackward& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) {
    if (args.grad_x) {
      visit_flag(args.grad_x.accumulate,
                 [&](auto accumulate) { input_gradient<norm, T, accumulate()>(context, args); });
    }
    if (args.grad_weight || args.grad_bias) parameter_gradients<norm, T>(context, args);
    if (args.grad_x_sums) input_gradient_sums<T>(context, args);
  });
}

}  // namespace

void layer_norm_forward(Context& context, const NormForward& args) {
  run_forward<Norm::kLayer>(context, args);
}

void layer_norm_backward(Context& context, const NormBackward& args) {
  run_backward<Norm::kLayer>(context, args);
}

void rms_norm_forward(Context& context, const NormForward& args) {
  run_forward<Norm::kRms>(context, args);
}

void rms_norm_backward(Context& context, const NormBackward& args) {
  run_backward<Norm::kRms>(context, args);
}

TESSERA_CPU_END
