#pragma once

#include "core/base/context.h"
#include "kernels/cuda/column_sums.h"
#include "kernels/cuda/device/mma.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/unroll.h"
#include "kernels/cuda/launch/norm.h"

// All gradients of a norm, with x and grad_y read once: moves 6 bytes per bf16 element, while a
// kernel for grad_x and another for the parameters would move 10. With
//   n = (x - mean) rstd  and  g = weight grad_y,  means over the row,
//   grad_x      = rstd (g - mean(g) - n mean(g n)),  without mean(g) for RMS norm
//   grad_weight = sum of n grad_y over the rows,  grad_bias = sum of grad_y,
// and, if wanted, the sums of grad_x over the rows. Memory-bound.
// Persistent blocks, sums in registers and a second pass over the blocks' sums, as in NVIDIA's Apex
// and Transformer Engine. Asynchronous copies bring rows to shared memory without using registers.
//
// Needs rows of whole packs that begin at multiples of 16 bytes, up to 16384 elements of bf16 or
// 8192 of f32 (three quarters of it with the sums of grad_x), because the sums of longer rows would
// not fit into registers. No atomics: the order
// of every sum depends only on the sizes and on how many blocks the device runs at once.
namespace tessera::kernels::cuda {

/// RMS norm is layer norm with a mean and a bias of zero.
enum class Norm { kLayer, kRms };

/// Number of parameters: weight and, in layer norm, bias.
template <Norm norm>
inline constexpr int kParameters = norm == Norm::kLayer ? 2 : 1;

template <typename T>
struct NormBackwardArguments {
  const T* x;
  const T* weight;
  const Compute<T>* means;
  const Compute<T>* rstds;
  const T* grad_y;
  T* grad_x;
  std::int64_t rows, width;
  Compute<T> offset;  ///< added to the weight
  bool accumulate;    ///< adds to grad_x
};

/// Rows copied to shared memory. A thread reads only packs that it copied itself, so no barrier is
/// needed. The k-th packs of all threads lie side by side, which avoids bank conflicts.
template <typename T>
struct StagedRows {
  static constexpr int N = kPack<T>;
  SharedArray<T> data;
  int pack_stride, operand_stride, stage_stride;

  __device__ __forceinline__ StagedRows(const SharedArray<T>& memory, int operands, int packs)
      : data(memory),
        pack_stride(static_cast<int>(blockDim.x) * N),
        operand_stride(packs * pack_stride),
        stage_stride(operands * operand_stride) {}
  /// @param operand  0: x, 1: grad_y, 2: the old grad_x
  __device__ __forceinline__ int place(int stage, int operand, int k) const {
    return stage * stage_stride + operand * operand_stride + k * pack_stride +
           static_cast<int>(threadIdx.x) * N;
  }
  __device__ __forceinline__ void copy(int stage, int operand, int k, const T* from) const {
    copy_async(data.from(place(stage, operand, k)), from, false);
  }
  __device__ __forceinline__ Pack<T, N> pack(int stage, int operand, int k) const {
    return data.template load<N>(place(stage, operand, k));
  }
};

/// Sums two values over a team, `team_warps` consecutive warps; all of its threads get both sums.
/// @param scratch  2 elements per warp; needs a barrier between an earlier read of it and this call
template <typename A>
__device__ __forceinline__ Pack<A, 2> team_sums(Pack<A, 2> value, const SharedArray<A>& scratch,
                                                int team_warps) {
  for (int i = 0; i < 2; ++i) value[i] = warp_reduce(value[i], Sum{});
  if (team_warps == 1) return value;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  if (thread % kWarpSize == 0) scratch.template store<2>(2 * warp, value);
  __syncthreads();
  const int first = warp / team_warps * team_warps;
  Pack<A, 2> sum = scratch.template load<2>(2 * first);
  for (int w = first + 1; w < first + team_warps; ++w) {
    const Pack<A, 2> part = scratch.template load<2>(2 * w);
    for (int i = 0; i < 2; ++i) sum[i] += part[i];
  }
  return sum;
}

/// Adds the sums of a block's teams, stored as [teams, columns], in the order of teams.
template <typename A>
__device__ __forceinline__ void store_block_sums(const SharedArray<A>& kept, int teams,
                                                 const PartialColumnSums<A>& partial) {
  __syncthreads();
  const auto columns = static_cast<int>(partial.columns);
  for (int c = static_cast<int>(threadIdx.x); c < columns; c += static_cast<int>(blockDim.x)) {
    A sum = 0;
    for (int team = 0; team < teams; ++team) sum += kept[team * columns + c];
    partial(static_cast<std::int64_t>(blockIdx.x), c, sum);
  }
}

/// @tparam kInputSums  also sums grad_x over the rows
template <Norm norm, typename T, bool kInputSums>
__global__ void __launch_bounds__(NormGradientsShape::kMostThreads)
    norm_gradients_kernel(const NormBackwardArguments<T> args, int team_warps, int packs,
                          PartialColumnSums<Compute<T>> partial) {
  using A = Compute<T>;
  using Shape = NormGradientsShape;
  constexpr int N = kPack<T>, kPart = kPack<A>;
  constexpr int kSums = kParameters<norm> + (kInputSums ? 1 : 0);
  constexpr int kMostPacks = Shape::most_packs(kInputSums);
  const int threads = static_cast<int>(blockDim.x), team_threads = team_warps * kWarpSize;
  const int teams = threads / team_threads;
  const int team = static_cast<int>(threadIdx.x) / team_threads;
  const int member = static_cast<int>(threadIdx.x) % team_threads;
  const int operands = args.accumulate ? 3 : 2, width = static_cast<int>(args.width);

  // The sums reuse the memory of the rows.
  SharedMemory memory;
  const auto scratch = memory.take<A>(2 * 2 * Shape::kMostWarps);
  const SharedArray<T> staged = memory.take<T>(threads * packs * N * operands * Shape::kStages);
  const StagedRows<T> rows(staged, operands, packs);

  // Calls f(k, column) for the member's packs of a row.
  const auto for_packs = [&](const auto& f) {
    TESSERA_UNROLL
    for (int k = 0; k < kMostPacks; ++k) {
      const int column = (k * team_threads + member) * N;
      if (column < width) f(k, column);
    }
  };
  const auto begin_copies = [&](std::int64_t row, int stage) {
    if (row < args.rows) {
      for_packs([&](int k, int column) {
        const std::int64_t at = row * width + column;
        rows.copy(stage, 0, k, args.x + at);
        rows.copy(stage, 1, k, args.grad_y + at);
        if (args.accumulate) rows.copy(stage, 2, k, args.grad_x + at);
      });
    }
    commit_copies();
  };
  const auto mean_of = [&](std::int64_t row) {
    return norm == Norm::kLayer && row < args.rows ? args.means[row] : A(0);
  };
  const auto rstd_of = [&](std::int64_t row) { return row < args.rows ? args.rstds[row] : A(0); };

  A sums[kSums][kMostPacks][N] = {};

  const std::int64_t step = std::int64_t{gridDim.x} * teams;
  std::int64_t first = std::int64_t{blockIdx.x} * teams;  // row of the block's first team
  begin_copies(first + team, 0);
  begin_copies(first + team + step, 1);
  A next_mean = mean_of(first + team), next_rstd = rstd_of(first + team);
  for (int stage = 0; first < args.rows; first += step, stage ^= 1) {
    const std::int64_t row = first + team;
    const bool has_row = row < args.rows;  // the same in the whole team
    const A mean = next_mean, rstd = next_rstd, center = -mean * rstd;
    // f32 has the time to subtract the mean first, which is exact near it.
    constexpr bool kExact = norm == Norm::kLayer && std::is_same_v<T, A>;
    const auto normalized = [&](A x) { return kExact ? (x - mean) * rstd : x * rstd + center; };
    next_mean = mean_of(row + step);
    next_rstd = rstd_of(row + step);
    wait_copies<Shape::kStages - 1>();

    Pack<A, 2> means{};  // of g and of g n
    if (has_row) {
      for_packs([&](int k, int column) {
        const Pack<T, N> x = rows.pack(stage, 0, k), grad_y = rows.pack(stage, 1, k);
        const Pack<T, N> weight = load_pack<N>(args.weight + column);
        for (int i = 0; i < N; ++i) {
          const A upstream = widen(grad_y[i]), factor = widen(weight[i]) + args.offset;
          const A term = upstream * normalized(widen(x[i]));
          means[0] += factor * upstream;
          means[1] += factor * term;
          sums[0][k][i] += term;
          if constexpr (norm == Norm::kLayer) sums[1][k][i] += upstream;
        }
      });
    }
    means = team_sums(means, scratch.from(stage * 2 * Shape::kMostWarps), team_warps);
    // Unless exact, grad_x = rstd g + slope x + shift.
    const A mean_g = norm == Norm::kLayer ? means[0] / static_cast<A>(width) : A(0);
    const A mean_gn = means[1] / static_cast<A>(width);
    const A slope = -rstd * rstd * mean_gn, shift = -rstd * (mean_gn * center + mean_g);

    if (has_row) {
      for_packs([&](int k, int column) {
        const Pack<T, N> x = rows.pack(stage, 0, k), grad_y = rows.pack(stage, 1, k);
        const Pack<T, N> weight = load_pack<N>(args.weight + column);
        Pack<T, N> old{};
        if (args.accumulate) old = rows.pack(stage, 2, k);
        A out[N];
        for (int i = 0; i < N; ++i) {
          const A g = (widen(weight[i]) + args.offset) * widen(grad_y[i]);
          out[i] = kExact ? rstd * (g - mean_g - normalized(widen(x[i])) * mean_gn)
                          : g * rstd + (widen(x[i]) * slope + shift);
          if (args.accumulate) out[i] += widen(old[i]);
          if constexpr (kInputSums) sums[kSums - 1][k][i] += out[i];
        }
        store_pack<N>(args.grad_x + row * width + column, narrow_pack<T>(out));
      });
    }
    begin_copies(row + 2 * step, stage);
  }

  __syncthreads();  // the last rows have been read
  const SharedArray<A> kept(reinterpret_cast<A*>(staged.data()));
  for_packs([&](int k, int column) {
    for (int s = 0; s < kSums; ++s) {
      for (int i = 0; i < N; i += kPart) {
        Pack<A, kPart> part;
        for (int j = 0; j < kPart; ++j) part[j] = sums[s][k][i + j];
        kept.template store<kPart>((team * kSums + s) * width + column + i, part);
      }
    }
  });
  store_block_sums(kept, teams, partial);
}

/// Uses scratch memory for the sums of each block.
/// @param packs  all rows, and the weight, begin at multiples of 16 bytes
/// @param store  of the gradients of the parameters, and of the sums of grad_x if kInputSums
/// @return false, with nothing queued, if !packs or the rows are too long for the kernel or device
template <Norm norm, typename T, bool kInputSums>
bool launch_norm_gradients(Context& context, const char* name, bool packs,
                           const NormBackwardArguments<T>& args,
                           const StoreColumnSums<Compute<T>>& store) {
  using A = Compute<T>;
  using Shape = NormGradientsShape;
  if (!packs) return false;
  const DeviceLimits gpu = context.limits();
  const Shape shape(args.width, kPack<T>, kParameters<norm>, kInputSums, args.accumulate, sizeof(A),
                    gpu);
  if (shape.packs == 0) return false;
  const unsigned blocks = shape.blocks(args.rows, gpu);
  const auto elements = static_cast<std::size_t>(blocks * shape.block_sums);
  const Workspace scratch(context, elements * sizeof(A), name);
  const PartialColumnSums<A> partial{static_cast<A*>(scratch.data()), shape.block_sums};
  launch(context, name, norm_gradients_kernel<norm, T, kInputSums>,
         LaunchShape{.grid = blocks,
                     .block = static_cast<unsigned>(shape.threads),
                     .shared_bytes = shape.shared_bytes},
         args, shape.team_warps, shape.packs, partial);
  launch_sum_of_partials(context, name, blocks, partial, store);
  return true;
}

}  // namespace tessera::kernels::cuda
