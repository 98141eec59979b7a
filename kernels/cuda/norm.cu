#include <cmath>
#include <initializer_list>

#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/norm.h"
#include "kernels/cuda/norm_gradients.h"
#include "kernels/norm.h"

// A team of threads owns a row: a warp, or a block for long rows. Rows that fit into registers are
// read once; longer ones are read in each pass. Memory-bound. With a residual, forward moves 4 rows
// instead of the 5 of an addition and a norm. If all gradients are needed, one kernel computes them
// (norm_gradients.h); if it can't, one kernel computes grad_x, another those of the parameters,
// and a third sums grad_x.
namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = NormShape::kThreads;

/// A thread's number in its team, and the row of the team.
template <int kTeam>
struct Team {
  static_assert(kTeam == kWarpSize || kTeam == kThreads);
  const int member = static_cast<int>(threadIdx.x) % kTeam;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / kTeam) + threadIdx.x / kTeam;

  template <typename A>
  __device__ __forceinline__ A sum(A value) const {
    if constexpr (kTeam == kWarpSize) {
      return warp_reduce(value, Sum{});
    } else {
      SharedMemory memory;
      return block_reduce(value, memory.take<A>(kThreads / kWarpSize), A(0), Sum{});
    }
  }

  /// Calls f(k, column) for the member's packs of N columns. With kKept > 0 the k are constants
  /// once the loop is unrolled, and the row has at most kKept packs for each member.
  template <int N, int kKept, typename F>
  __device__ __forceinline__ void for_packs(std::int64_t width, const F& f) const {
    if constexpr (kKept > 0) {
      for (int k = 0; k < kKept; ++k) {
        const std::int64_t column = (k * kTeam + member) * N;
        if (column < width) f(k, column);
      }
    } else {
      for (std::int64_t column = std::int64_t{member} * N; column < width; column += kTeam * N)
        f(0, column);
    }
  }
};

/// A row, in packs, kept in registers if kKept > 0.
template <typename T, int N, int kKept>
struct Row {
  const T* from;
  Pack<T, N> kept[kKept > 0 ? kKept : 1];

  template <int kTeam>
  __device__ __forceinline__ Row(const Team<kTeam>& team, const T* data, std::int64_t width)
      : from(data + team.row * width), kept{} {
    if constexpr (kKept > 0)
      team.template for_packs<N, kKept>(
          width, [&](int k, std::int64_t column) { kept[k] = load_pack<N>(from + column); });
  }
  /// The row x + residual, which is also written to `sum`; a member reads back its own packs only.
  template <int kTeam>
  __device__ __forceinline__ Row(const Team<kTeam>& team, const T* x, const T* residual, T* sum,
                                 std::int64_t width)
      : from(sum + team.row * width), kept{} {
    const std::int64_t first = team.row * width;
    team.template for_packs<N, kKept>(width, [&](int k, std::int64_t column) {
      const Pack<T, N> left = load_pack<N>(x + first + column);
      const Pack<T, N> right = load_pack<N>(residual + first + column);
      Compute<T> values[N];
      for (int i = 0; i < N; ++i) values[i] = widen(left[i]) + widen(right[i]);
      const Pack<T, N> out = narrow_pack<T>(values);
      store_pack<N>(sum + first + column, out);
      if constexpr (kKept > 0) kept[k] = out;
    });
  }
  __device__ __forceinline__ Pack<T, N> pack(int k, std::int64_t column) const {
    if constexpr (kKept > 0) return kept[k];
    return load_pack<N>(from + column);
  }
};

template <typename T>
struct ForwardArguments {
  const T* x;
  const T* weight;
  const T* bias;
  const T* residual;
  T* sum;
  T* y;
  Compute<T>* means;
  Compute<T>* rstds;
  std::int64_t rows, width;
  Compute<T> eps, offset;
};

template <Norm norm, typename T, int N, int kKept, int kTeam>
__global__ void __launch_bounds__(kThreads, 2) norm_forward_kernel(const ForwardArguments<T> args) {
  using A = Compute<T>;
  using In = Row<T, N, kKept>;
  const Team<kTeam> team;
  if (team.row >= args.rows) return;  // the same in the whole team
  const In x = args.residual != nullptr ? In(team, args.x, args.residual, args.sum, args.width)
                                        : In(team, args.x, args.width);

  A mean = 0;
  if constexpr (norm == Norm::kLayer) {
    A sum = 0;
    team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
      const Pack<T, N> pack = x.pack(k, column);
      for (int i = 0; i < N; ++i) sum += widen(pack[i]);
    });
    mean = team.sum(sum) / static_cast<A>(args.width);
  }
  // In a second pass, because mean(x^2) - mean(x)^2 would cancel.
  A squares = 0;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> pack = x.pack(k, column);
    for (int i = 0; i < N; ++i) {
      const A centered = widen(pack[i]) - mean;
      squares += centered * centered;
    }
  });
  const A rstd = A(1) / std::sqrt(team.sum(squares) / static_cast<A>(args.width) + args.eps);

  T* const y = args.y + team.row * args.width;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> pack = x.pack(k, column);
    const Pack<T, N> weight = load_pack<N>(args.weight + column);
    Pack<T, N> bias{};
    if constexpr (norm == Norm::kLayer) bias = load_pack<N>(args.bias + column);
    A out[N];
    for (int i = 0; i < N; ++i) {
      out[i] = (widen(weight[i]) + args.offset) * ((widen(pack[i]) - mean) * rstd);
      if constexpr (norm == Norm::kLayer) out[i] += widen(bias[i]);
    }
    store_pack<N>(y + column, narrow_pack<T>(out));
  });
  if (team.member == 0) {
    if (args.means != nullptr) args.means[team.row] = mean;
    if (args.rstds != nullptr) args.rstds[team.row] = rstd;
  }
}

// Computes only grad_x, by the formula in norm_gradients.h. With kManyPacks, x and grad_y take more
// than half of the registers, so one block runs per multiprocessor.
template <Norm norm, typename T, int N, int kKept, int kTeam>
__global__ void __launch_bounds__(kThreads, kKept == NormShape::kManyPacks ? 1 : 2)
    norm_input_gradient_kernel(const NormBackwardArguments<T> args) {
  using A = Compute<T>;
  const Team<kTeam> team;
  if (team.row >= args.rows) return;
  const Row<T, N, kKept> x(team, args.x, args.width), grad_y(team, args.grad_y, args.width);
  const A mean = norm == Norm::kLayer ? args.means[team.row] : A(0);
  const A rstd = args.rstds[team.row];

  A sum_g = 0, sum_gn = 0;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> in = x.pack(k, column), upstream = grad_y.pack(k, column);
    const Pack<T, N> weight = load_pack<N>(args.weight + column);
    for (int i = 0; i < N; ++i) {
      const A g = (widen(weight[i]) + args.offset) * widen(upstream[i]);
      sum_g += g;
      sum_gn += g * ((widen(in[i]) - mean) * rstd);
    }
  });
  A mean_g = 0;
  if constexpr (norm == Norm::kLayer) mean_g = team.sum(sum_g) / static_cast<A>(args.width);
  const A mean_gn = team.sum(sum_gn) / static_cast<A>(args.width);

  T* const grad_x = args.grad_x + team.row * args.width;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> in = x.pack(k, column), upstream = grad_y.pack(k, column);
    const Pack<T, N> weight = load_pack<N>(args.weight + column);
    Pack<T, N> out{};
    if (args.accumulate) out = load_pack<N>(grad_x + column);
    for (int i = 0; i < N; ++i) {
      const A g = (widen(weight[i]) + args.offset) * widen(upstream[i]);
      const A n = (widen(in[i]) - mean) * rstd;
      const A grad = rstd * (g - mean_g - n * mean_gn);
      out[i] = narrow<T>(args.accumulate ? grad + widen(out[i]) : grad);
    }
    store_pack<N>(grad_x + column, out);
  });
}

template <Norm norm, typename T>
struct ParameterGradientTerm {
  const T* x;
  const T* grad_y;
  const Compute<T>* means;
  const Compute<T>* rstds;
  std::int64_t width;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t row, std::int64_t column,
                                             Compute<T> (&sums)[kParameters<norm>][N],
                                             std::integral_constant<int, N>) const {
    const std::int64_t first = row * width + column;
    const Pack<T, N> in = load_pack<N>(x + first), upstream = load_pack<N>(grad_y + first);
    const Compute<T> mean = norm == Norm::kLayer ? means[row] : Compute<T>(0), rstd = rstds[row];
    for (int k = 0; k < N; ++k) {
      const Compute<T> g = widen(upstream[k]);
      sums[0][k] += g * ((widen(in[k]) - mean) * rstd);
      if constexpr (norm == Norm::kLayer) sums[1][k] += g;
    }
  }
};

template <int pack, int kept, int team>
struct Choice {};

/// Calls f(Choice<...>, shape) with the variant for rows of `width` elements. Unaligned rows and
/// f64 need not be fast and have one variant only, because each variant takes time to compile.
/// @param packs  all rows begin at multiples of 16 bytes
template <typename T, typename F>
void choose(std::int64_t width, bool packs, const F& f) {
  constexpr int kWide = kPack<T>, kWarp = kWarpSize, kBlock = kThreads;
  constexpr int kFew = NormShape::kFewPacks, kMany = NormShape::kManyPacks;
  if constexpr (kWide > 1) {
    if (packs) {
      const NormShape shape(width, kWide);
      if (shape.block)
        shape.kept == 0 ? f(Choice<kWide, 0, kBlock>{}, shape)
                        : f(Choice<kWide, kFew, kBlock>{}, shape);
      else
        shape.kept == kFew ? f(Choice<kWide, kFew, kWarp>{}, shape)
                           : f(Choice<kWide, kMany, kWarp>{}, shape);
      return;
    }
  }
  f(Choice<1, 0, kWarp>{}, NormShape(width, 1));
}

template <typename A>
LaunchShape launch_shape(const NormShape& shape, std::int64_t rows) {
  return {.grid = shape.blocks(rows),
          .block = kThreads,
          .shared_bytes = shape.block ? SharedMemory::shared_bytes<A>(kThreads / kWarpSize) : 0};
}

/// Whether rows of all operands can be moved in packs; absent ones are null.
template <typename T, typename... Operands>
bool takes_packs(std::int64_t width, const Operands*... operands) {
  return width % kPack<T> == 0 && is_aligned(operands...);
}

template <Norm norm, typename T>
void forward(Context& context, const char* name, const NormForward& args) {
  using A = Compute<T>;
  const ForwardArguments<T> arguments{.x = static_cast<const T*>(args.x.data),
                                      .weight = static_cast<const T*>(args.weight.data),
                                      .bias = static_cast<const T*>(args.bias.data),
                                      .residual = static_cast<const T*>(args.residual.data),
                                      .sum = static_cast<T*>(args.sum.data),
                                      .y = static_cast<T*>(args.y.data),
                                      .means = static_cast<A*>(args.mean.data),
                                      .rstds = static_cast<A*>(args.rstd.data),
                                      .rows = args.x.shape[0],
                                      .width = args.x.shape[1],
                                      .eps = static_cast<A>(args.eps),
                                      .offset = static_cast<A>(args.offset)};
  const bool packs = takes_packs<T>(arguments.width, arguments.x, arguments.weight, arguments.bias,
                                    arguments.residual, arguments.sum, arguments.y);
  choose<T>(arguments.width, packs,
            [&]<int N, int kKept, int kTeam>(Choice<N, kKept, kTeam>, const NormShape& shape) {
              launch(context, name, norm_forward_kernel<norm, T, N, kKept, kTeam>,
                     launch_shape<A>(shape, arguments.rows), arguments);
            });
}

template <typename T>
NormBackwardArguments<T> backward_arguments(const NormBackward& args) {
  using A = Compute<T>;
  return {.x = static_cast<const T*>(args.x.data),
          .weight = static_cast<const T*>(args.weight.data),
          .means = static_cast<const A*>(args.mean.data),
          .rstds = static_cast<const A*>(args.rstd.data),
          .grad_y = static_cast<const T*>(args.grad_y.data),
          .grad_x = static_cast<T*>(args.grad_x.view.data),
          .rows = args.x.shape[0],
          .width = args.x.shape[1],
          .offset = static_cast<A>(args.offset),
          .accumulate = args.grad_x.accumulate};
}

template <Norm norm, typename T>
void input_gradient(Context& context, const char* name, const NormBackwardArguments<T>& args,
                    bool packs) {
  choose<T>(args.width, packs,
            [&]<int N, int kKept, int kTeam>(Choice<N, kKept, kTeam>, const NormShape& shape) {
              launch(context, name, norm_input_gradient_kernel<norm, T, N, kKept, kTeam>,
                     launch_shape<Compute<T>>(shape, args.rows), args);
            });
}

/// Stores into gradients of `width` elements each, of which some may be absent.
template <typename T>
StoreColumnSums<Compute<T>> store_sums(std::int64_t width,
                                       std::initializer_list<const GradientView*> gradients) {
  StoreColumnSums<Compute<T>> store{.columns = width};
  int k = 0;
  for (const GradientView* grad : gradients) {
    store.to[k] = *grad ? static_cast<Compute<T>*>(grad->view.data) : nullptr;
    store.accumulate[k++] = grad->accumulate;
  }
  return store;
}

/// All gradients at once, with or without the sums of grad_x.
/// @return false, with nothing queued, if one kernel can't
template <Norm norm, typename T, bool kInputSums>
bool all_gradients(Context& context, const char* name, bool packs, const NormBackward& args,
                   const NormBackwardArguments<T>& arguments) {
  if constexpr ((kPack<T>) > 1) {
    const GradientView &weight = args.grad_weight, &bias = args.grad_bias, &sums = args.grad_x_sums;
    const auto store = norm == Norm::kLayer
                           ? store_sums<T>(arguments.width, {&weight, &bias, &sums})
                           : store_sums<T>(arguments.width, {&weight, &sums});
    return launch_norm_gradients<norm, T, kInputSums>(context, name, packs, arguments, store);
  }
  return false;
}

template <Norm norm, typename T>
void parameter_gradients(Context& context, const char* name, const NormBackward& args,
                         const NormBackwardArguments<T>& arguments) {
  const ParameterGradientTerm<norm, T> term{arguments.x, arguments.grad_y, arguments.means,
                                            arguments.rstds, arguments.width};
  const auto store = store_sums<T>(arguments.width, {&args.grad_weight, &args.grad_bias});
  visit_pack<T>(takes_packs<T>(arguments.width, arguments.x, arguments.grad_y),
                [&]<int N>(std::integral_constant<int, N>) {
                  launch_column_sums<Compute<T>, kParameters<norm>, N>(context, name,
                                                                       arguments.rows, term, store);
                });
}

template <typename T>
void input_gradient_sums(Context& context, const char* name, const NormBackward& args) {
  const std::int64_t width = args.x.shape[1];
  const SumRowsTerm<T> term{static_cast<const T*>(args.grad_x.view.data), width};
  const auto store = store_sums<T>(width, {&args.grad_x_sums});
  visit_pack<T>(takes_packs<T>(width, term.in), [&]<int N>(std::integral_constant<int, N>) {
    launch_column_sums<Compute<T>, 1, N>(context, name, args.x.shape[0], term, store);
  });
}

template <Norm norm, typename T>
void backward(Context& context, const char* name, const NormBackward& args) {
  const NormBackwardArguments<T> arguments = backward_arguments<T>(args);
  const bool input = args.grad_x && arguments.rows > 0;
  const bool parameters = args.grad_weight || args.grad_bias;
  const bool packs = takes_packs<T>(arguments.width, arguments.x, arguments.weight,
                                    arguments.grad_y, arguments.grad_x);
  if (input && parameters && args.grad_x_sums &&
      all_gradients<norm, T, true>(context, name, packs, args, arguments))
    return;
  if (!input || !parameters ||
      !all_gradients<norm, T, false>(context, name, packs, args, arguments)) {
    if (input) input_gradient<norm, T>(context, name, arguments, packs);
    if (parameters) parameter_gradients<norm, T>(context, name, args, arguments);
  }
  if (args.grad_x_sums) input_gradient_sums<T>(context, name, args);
}

template <Norm norm>
void run_forward(Context& context, const char* name, const NormForward& args) {
  if (args.x.shape[0] == 0) return;
  visit_floating(args.x.dtype, name,
                 [&]<typename T>(std::type_identity<T>) { forward<norm, T>(context, name, args); });
}

template <Norm norm>
void run_backward(Context& context, const char* name, const NormBackward& args) {
  visit_floating(args.x.dtype, name, [&]<typename T>(std::type_identity<T>) {
    backward<norm, T>(context, name, args);
  });
}

}  // namespace

void layer_norm_forward(Context& context, const NormForward& args) {
  run_forward<Norm::kLayer>(context, "layer_norm_forward", args);
}

void layer_norm_backward(Context& context, const NormBackward& args) {
  run_backward<Norm::kLayer>(context, "layer_norm_backward", args);
}

void rms_norm_forward(Context& context, const NormForward& args) {
  run_forward<Norm::kRms>(context, "rms_norm_forward", args);
}

void rms_norm_backward(Context& context, const NormBackward& args) {
  run_backward<Norm::kRms>(context, "rms_norm_backward", args);
}

TESSERA_CUDA_KERNEL(layer_norm_forward, NormForward)
TESSERA_CUDA_KERNEL(layer_norm_backward, NormBackward)
TESSERA_CUDA_KERNEL(rms_norm_forward, NormForward)
TESSERA_CUDA_KERNEL(rms_norm_backward, NormBackward)

}  // namespace tessera::kernels::cuda
