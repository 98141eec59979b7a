#include "kernels/scratch.h"

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/bit_hash.h"
#include "kernels/cuda/launch/column_sums.h"
#include "kernels/cuda/launch/embedding.h"
#include "kernels/cuda/launch/norm.h"
#include "kernels/cuda/launch/sums.h"
#include "kernels/dispatch.h"
#include "kernels/elementwise_args.h"
#include "kernels/embedding.h"
#include "kernels/matmul.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {
namespace {

std::int64_t accumulator_bytes(DType dtype) {
  return static_cast<std::int64_t>(dtype_size(accumulator_dtype(dtype)));
}

bool is_aligned(const void* data, std::uintptr_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
}

// As kPack in kernels/cuda/device/number.h.
int pack_of(DType dtype) {
  const int bytes = static_cast<int>(dtype_size(dtype));
  return bytes > 4 ? 1 : 16 / bytes;
}

// @param packs  16 bytes of columns can be loaded at a time
std::size_t column_sums_bytes(std::int64_t rows, std::int64_t columns, bool packs, int sums,
                              DType dtype) {
  const ColumnSumsShape shape(rows, columns, packs ? pack_of(dtype) : 1);
  return static_cast<std::size_t>(shape.partials() * sums * columns * accumulator_bytes(dtype));
}

// @param grad_y  [B, T, C]
std::size_t token_gradient_bytes(const TensorView& grad_y, std::int64_t vocab_size) {
  const std::int64_t width = grad_y.shape[2];
  if (width == 0) return 0;
  const TokenGradientScratch scratch(grad_y.shape[0] * grad_y.shape[1], vocab_size, width,
                                     accumulator_bytes(grad_y.dtype));
  return static_cast<std::size_t>(scratch.bytes);
}

}  // namespace

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const AttentionBackward& args) {
  return static_cast<std::size_t>(args.log_sum_exp.numel() * accumulator_bytes(args.q.dtype));
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const EmbeddingBackward& args) {
  if (!args.grad_token_weight) return 0;
  return token_gradient_bytes(args.grad_y, args.grad_token_weight.view.shape[0]);
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const EmbeddingBackwardRows& args) {
  return token_gradient_bytes(args.grad_y, args.vocab_size);
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const Matmul& args) {
  const DType dtype = args.c.dtype;
  if (!args.bias.defined() ||
      (args.bias.dtype == dtype && is_aligned(args.bias.data, kEpilogueAlignment)))
    return 0;
  return static_cast<std::size_t>(args.bias.numel()) * dtype_size(dtype);
}

std::size_t scratch_bytes(const DeviceLimits& gpu, const NormBackward& args) {
  const bool parameters = args.grad_weight || args.grad_bias;
  const DType dtype = args.x.dtype;
  const std::int64_t rows = args.x.shape[0], width = args.x.shape[1];
  const int sums = args.mean.defined() ? 2 : 1;  // of the weight, and of a layer norm's bias
  const bool whole_packs = width % pack_of(dtype) == 0;
  const bool sums_pack = whole_packs && is_aligned(args.x.data) && is_aligned(args.grad_y.data);
  const bool input_packs = whole_packs && is_aligned(args.grad_x.view.data);
  const std::size_t summing_input =
      args.grad_x_sums ? column_sums_bytes(rows, width, input_packs, 1, dtype) : 0;
  if (args.grad_x && parameters && rows > 0 && pack_of(dtype) > 1 && sums_pack &&
      is_aligned(args.weight.data) && is_aligned(args.grad_x.view.data)) {
    const auto bytes = static_cast<std::size_t>(accumulator_bytes(dtype));
    for (const bool input_sums : {true, false}) {
      if (input_sums && !args.grad_x_sums) continue;
      const NormGradientsShape shape(width, pack_of(dtype), sums, input_sums,
                                     args.grad_x.accumulate, bytes, gpu);
      if (shape.packs == 0) continue;
      const std::size_t fused =
          shape.blocks(rows, gpu) * static_cast<std::size_t>(shape.block_sums) * bytes;
      return input_sums ? fused : std::max(fused, summing_input);
    }
  }
  return std::max(parameters ? column_sums_bytes(rows, width, sums_pack, sums, dtype) : 0,
                  summing_input);
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const BitHash& args) {
  return SumShape::scratch_bytes(static_cast<std::int64_t>(args.x.bytes()) / 8);
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const SumOfSquares& args) {
  return SumShape::scratch_bytes(args.x.numel());
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const SumRows& args) {
  const std::int64_t rows = args.in.shape[0], columns = args.in.shape[1];
  const int pack = pack_of(args.in.dtype);
  const bool packs = is_aligned(args.in.data) && columns % pack == 0 &&
                     (rows <= 1 || args.in.strides[0] % pack == 0);
  return column_sums_bytes(rows, columns, packs, 1, args.in.dtype);
}

std::size_t scratch_bytes(const DeviceLimits& /*gpu*/, const Total& args) {
  return SumShape::scratch_bytes(args.in.numel());
}

void plan_scratch(Context& context, const char* kernel, std::size_t bytes) {
  if (bytes > 0) const Workspace booked(context, bytes, kernel);
}

}  // namespace tessera::kernels::cuda
