#include "kernels/gather.h"

#include <limits>

#include "kernels/cpu/strided.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

template <typename T>
void run(Context& context, const Gather& args) {
  const auto* x = static_cast<const T*>(args.x.data);
  const auto* index = static_cast<const std::int32_t*>(args.index.data);
  auto* y = static_cast<T*>(args.y.data);
  const std::int64_t size = args.x.shape[args.dim], step = args.x.strides[args.dim];
  TensorView lines = args.x;  // x without dim, which the index replaces
  lines.shape = args.index.shape;
  lines.strides[args.dim] = 0;
  const StridedLoop loop = strided_loop({&lines, &args.index, &args.y});
  const auto piece = [=, &loop](const std::int64_t* offsets, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t at = index[offsets[1] + i * loop.stride(1)];
      T* const to = y + offsets[2] + i * loop.stride(2);
      if (at >= 0 && at < size)
        *to = x[offsets[0] + i * loop.stride(0) + at * step];
      else
        store(to, std::numeric_limits<Accumulator<T>>::quiet_NaN());
    }
  };
  for_pieces<3>(context, loop, 1, piece);
}

template <typename T>
void run(Context& context, const ScatterAdd& args) {
  const auto* y = static_cast<const T*>(args.y.data);
  const auto* index = static_cast<const std::int32_t*>(args.index.data);
  auto* x = static_cast<Accumulator<T>*>(args.x.data);
  const int dim = args.dim;
  const std::int64_t size = args.x.shape[dim], step = args.x.strides[dim];
  const std::int64_t count = args.index.shape[dim];
  const std::int64_t index_step = args.index.strides[dim], y_step = args.y.strides[dim];
  // Lines along dim share no element of x.
  TensorView x_lines = args.x;
  x_lines.shape = args.index.shape;
  x_lines = first_along(x_lines, dim);
  const TensorView index_lines = first_along(args.index, dim), y_lines = first_along(args.y, dim);
  const StridedLoop loop = strided_loop({&x_lines, &index_lines, &y_lines});
  const auto piece = [=, &loop](const std::int64_t* offsets, std::int64_t width) {
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int32_t* const at_line = index + offsets[1] + j * index_step;
      const T* const from = y + offsets[2] + j * y_step;
      for (std::int64_t i = 0; i < width; ++i) {
        const std::int64_t at = at_line[i * loop.stride(1)];
        if (at >= 0 && at < size)
          x[offsets[0] + i * loop.stride(0) + at * step] += load(from + i * loop.stride(2));
      }
    }
  };
  for_pieces<3, 64>(context, loop, count, piece);
}

}  // namespace

void gather(Context& context, const Gather& args) {
  visit_dtype(args.x.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

void scatter_add(Context& context, const ScatterAdd& args) {
  visit_dtype(args.y.dtype, [&]<typename T>(std::type_identity<T>) { run<T>(context, args); });
}

TESSERA_CPU_END
