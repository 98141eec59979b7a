#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/launch/norm.h"
#include "kernels/norm.h"

// A row is worked on by a team: a warp, or for long rows a block. Rows that fit are kept in
// registers, so that they are read from memory once; the others are read once for each pass over
// them, and come from a cache if they fit there. Forward and the gradient of x are bound by the
// bytes that they move; the gradients of the parameters read x and grad_y once more.
namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = NormShape::kThreads;

/// A place in a team, and the row of the team.
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
  T* y;
  Compute<T>* means;
  Compute<T>* rstds;
  std::int64_t rows, width;
  Compute<T> eps;
};

template <typename T, int N, int kKept, int kTeam>
__global__ void __launch_bounds__(kThreads, 2)
    layer_norm_forward_kernel(const ForwardArguments<T> args) {
  using A = Compute<T>;
  const Team<kTeam> team;
  if (team.row >= args.rows) return;  // whole teams
  const Row<T, N, kKept> x(team, args.x, args.width);

  A sum = 0;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> pack = x.pack(k, column);
    for (int i = 0; i < N; ++i) sum += widen(pack[i]);
  });
  const A mean = team.sum(sum) / static_cast<A>(args.width);
  // A second pass: the difference of two sums of squares would cancel.
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
    const Pack<T, N> bias = load_pack<N>(args.bias + column);
    Pack<T, N> out;
    for (int i = 0; i < N; ++i)
      out[i] = narrow<T>(widen(weight[i]) * ((widen(pack[i]) - mean) * rstd) + widen(bias[i]));
    store_pack<N>(y + column, out);
  });
  if (team.member == 0) {
    if (args.means != nullptr) args.means[team.row] = mean;
    if (args.rstds != nullptr) args.rstds[team.row] = rstd;
  }
}

template <typename T>
struct BackwardArguments {
  const T* x;
  const T* weight;
  const Compute<T>* means;
  const Compute<T>* rstds;
  const T* grad_y;
  T* grad_x;
  std::int64_t rows, width;
  bool accumulate;
};

// With n = (x - mean) rstd and g = weight grad_y:
// grad_x = rstd (g - mean(g) - n mean(g n)), means over the row.
template <typename T, int N, int kKept, int kTeam>
__global__ void __launch_bounds__(kThreads, 2)
    layer_norm_input_gradient_kernel(const BackwardArguments<T> args) {
  using A = Compute<T>;
  const Team<kTeam> team;
  if (team.row >= args.rows) return;
  const Row<T, N, kKept> x(team, args.x, args.width), grad_y(team, args.grad_y, args.width);
  const A mean = args.means[team.row], rstd = args.rstds[team.row];

  A sum_g = 0, sum_gn = 0;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> in = x.pack(k, column), upstream = grad_y.pack(k, column);
    const Pack<T, N> weight = load_pack<N>(args.weight + column);
    for (int i = 0; i < N; ++i) {
      const A g = widen(weight[i]) * widen(upstream[i]);
      sum_g += g;
      sum_gn += g * ((widen(in[i]) - mean) * rstd);
    }
  });
  const A mean_g = team.sum(sum_g) / static_cast<A>(args.width);
  const A mean_gn = team.sum(sum_gn) / static_cast<A>(args.width);

  T* const grad_x = args.grad_x + team.row * args.width;
  team.template for_packs<N, kKept>(args.width, [&](int k, std::int64_t column) {
    const Pack<T, N> in = x.pack(k, column), upstream = grad_y.pack(k, column);
    const Pack<T, N> weight = load_pack<N>(args.weight + column);
    Pack<T, N> out{};
    if (args.accumulate) out = load_pack<N>(grad_x + column);
    for (int i = 0; i < N; ++i) {
      const A g = widen(weight[i]) * widen(upstream[i]);
      const A n = (widen(in[i]) - mean) * rstd;
      const A grad = rstd * (g - mean_g - n * mean_gn);
      out[i] = narrow<T>(args.accumulate ? grad + widen(out[i]) : grad);
    }
    store_pack<N>(grad_x + column, out);
  });
}

template <typename T>
struct ParameterGradientTerm {
  const T* x;
  const T* grad_y;
  const Compute<T>* means;
  const Compute<T>* rstds;
  std::int64_t width;

  template <int N>
  __device__ __forceinline__ void operator()(std::int64_t row, std::int64_t column,
                                             Compute<T> (&sums)[2][N],
                                             std::integral_constant<int, N>) const {
    const std::int64_t first = row * width + column;
    const Pack<T, N> in = load_pack<N>(x + first), upstream = load_pack<N>(grad_y + first);
    const Compute<T> mean = means[row], rstd = rstds[row];
    for (int k = 0; k < N; ++k) {
      const Compute<T> g = widen(upstream[k]);
      sums[0][k] += g * ((widen(in[k]) - mean) * rstd);
      sums[1][k] += g;
    }
  }
};

template <int pack, int kept, int team>
struct Choice {};

/// Calls f(Choice<...>, shape) with what suits rows of `width` elements.
/// @param packs  all rows begin at multiples of 16 bytes
template <typename T, typename F>
void choose(std::int64_t width, bool packs, const F& f) {
  constexpr int kWide = kPack<T>, kWarp = kWarpSize, kBlock = kThreads;
  constexpr int kFew = NormShape::kFewPacks, kMany = NormShape::kManyPacks;
  const NormShape shape(width, packs ? kWide : 1);
  if (!packs)
    shape.block ? f(Choice<1, 0, kBlock>{}, shape) : f(Choice<1, 0, kWarp>{}, shape);
  else if (shape.block)
    shape.kept == 0 ? f(Choice<kWide, 0, kBlock>{}, shape)
                    : f(Choice<kWide, kFew, kBlock>{}, shape);
  else
    shape.kept == kFew ? f(Choice<kWide, kFew, kWarp>{}, shape)
                       : f(Choice<kWide, kMany, kWarp>{}, shape);
}

template <typename A>
LaunchShape launch_shape(const NormShape& shape, std::int64_t rows) {
  return {.grid = shape.blocks(rows),
          .block = kThreads,
          .shared_bytes = shape.block ? SharedMemory::shared_bytes<A>(kThreads / kWarpSize) : 0};
}

template <typename T>
void forward(Context& context, const LayerNormForward& args) {
  using A = Compute<T>;
  const ForwardArguments<T> arguments{.x = static_cast<const T*>(args.x.data),
                                      .weight = static_cast<const T*>(args.weight.data),
                                      .bias = static_cast<const T*>(args.bias.data),
                                      .y = static_cast<T*>(args.y.data),
                                      .means = static_cast<A*>(args.mean.data),
                                      .rstds = static_cast<A*>(args.rstd.data),
                                      .rows = args.x.shape[0],
                                      .width = args.x.shape[1],
                                      .eps = static_cast<A>(args.eps)};
  const bool packs = arguments.width % kPack<T> == 0 && is_aligned(arguments.x) &&
                     is_aligned(arguments.weight) && is_aligned(arguments.bias) &&
                     is_aligned(arguments.y);
  choose<T>(arguments.width, packs,
            [&]<int N, int kKept, int kTeam>(Choice<N, kKept, kTeam>, const NormShape& shape) {
              launch(context, "layer_norm_forward", layer_norm_forward_kernel<T, N, kKept, kTeam>,
                     launch_shape<A>(shape, arguments.rows), arguments);
            });
}

template <typename T>
void input_gradient(Context& context, const LayerNormBackward& args) {
  using A = Compute<T>;
  const BackwardArguments<T> arguments{.x = static_cast<const T*>(args.x.data),
                                       .weight = static_cast<const T*>(args.weight.data),
                                       .means = static_cast<const A*>(args.mean.data),
                                       .rstds = static_cast<const A*>(args.rstd.data),
                                       .grad_y = static_cast<const T*>(args.grad_y.data),
                                       .grad_x = static_cast<T*>(args.grad_x.view.data),
                                       .rows = args.x.shape[0],
                                       .width = args.x.shape[1],
                                       .accumulate = args.grad_x.accumulate};
  const bool packs = arguments.width % kPack<T> == 0 && is_aligned(arguments.x) &&
                     is_aligned(arguments.weight) && is_aligned(arguments.grad_y) &&
                     is_aligned(arguments.grad_x);
  choose<T>(arguments.width, packs,
            [&]<int N, int kKept, int kTeam>(Choice<N, kKept, kTeam>, const NormShape& shape) {
              launch(context, "layer_norm_backward",
                     layer_norm_input_gradient_kernel<T, N, kKept, kTeam>,
                     launch_shape<A>(shape, arguments.rows), arguments);
            });
}

template <typename T>
void parameter_gradients(Context& context, const LayerNormBackward& args) {
  using A = Compute<T>;
  const std::int64_t rows = args.x.shape[0], width = args.x.shape[1];
  const ParameterGradientTerm<T> term{
      static_cast<const T*>(args.x.data), static_cast<const T*>(args.grad_y.data),
      static_cast<const A*>(args.mean.data), static_cast<const A*>(args.rstd.data), width};
  const auto target = [](const GradientView& grad) {
    return grad ? static_cast<A*>(grad.view.data) : nullptr;
  };
  const StoreColumnSums<A, 2> store{{target(args.grad_weight), target(args.grad_bias)},
                                    {args.grad_weight.accumulate, args.grad_bias.accumulate}};
  if (width % kPack<T> == 0 && is_aligned(term.x) && is_aligned(term.grad_y))
    launch_column_sums<A, 2, kPack<T>>(context, "layer_norm_backward", rows, width, term, store);
  else
    launch_column_sums<A, 2, 1>(context, "layer_norm_backward", rows, width, term, store);
}

}  // namespace

void layer_norm_forward(Context& context, const LayerNormForward& args) {
  if (args.x.shape[0] == 0) return;
  visit_floating(args.x.dtype, "layer_norm_forward",
                 [&]<typename T>(std::type_identity<T>) { forward<T>(context, args); });
}

void layer_norm_backward(Context& context, const LayerNormBackward& args) {
  visit_floating(args.x.dtype, "layer_norm_backward", [&]<typename T>(std::type_identity<T>) {
    if (args.grad_x && args.x.shape[0] > 0) input_gradient<T>(context, args);
    if (args.grad_weight || args.grad_bias) parameter_gradients<T>(context, args);
  });
}

TESSERA_CUDA_KERNEL(layer_norm_forward, LayerNormForward)
TESSERA_CUDA_KERNEL(layer_norm_backward, LayerNormBackward)

}  // namespace tessera::kernels::cuda
