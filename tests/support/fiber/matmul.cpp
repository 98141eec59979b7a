// Naive matrix products for the fibers; on a GPU a library computes them.
#include "kernels/matmul.h"

#include <array>

#include "core/base/context.h"
#include "core/base/device_backend.h"
#include "core/base/dtype.h"
#include "core/base/product_tuning.h"
#include "kernels/cuda/export.h"
#include "kernels/scratch.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {
namespace {

// The library has two kernels: it names the one first that sums in double, and the other is faster.
bool sums_in_double(Context& context, const Matmul& args) {
  const std::array<TunedProduct, 2> kernels{{{"00"}, {"01"}}};
  ProductTuning& tuning = context.backend().product_tuning();
  const std::string name = fmt::format("{} {}{}", args.c.shape, args.transpose_a ? 'T' : 'N',
                                       args.transpose_b ? 'T' : 'N');
  const TunedProduct* const tuned = tuning.find(
      name, [&](const TunedProduct& x) { return x.algorithm == "00" || x.algorithm == "01"; });
  const bool in_double = tuned == nullptr || tuned->algorithm == "00";
  if (!args.accumulate && tuning.is_to_time(name))
    tuning.add(name, fastest(kernels, [](std::size_t i) { return i == 0 ? 2.5 : 1.25; }));
  return in_double;
}

}  // namespace

void matmul(Context& context, const Matmul& args) {
  const bool in_double = sums_in_double(context, args);
  const Workspace scratch(context, scratch_bytes(context.limits(), args), "matmul");
  visit_floating(args.a.dtype, "matmul", [&]<typename T>(std::type_identity<T>) {
    visit_floating(args.c.dtype, "matmul", [&]<typename C>(std::type_identity<C>) {
      using A = Accumulator<T>;
      const auto at = [](const TensorView& x, std::int64_t i, std::int64_t j) {
        return static_cast<A>(static_cast<const T*>(x.data)[i * x.strides[0] + j]);
      };
      const std::int64_t depth = args.a.shape[args.transpose_a ? 0 : 1];
      for (std::int64_t i = 0; i < args.c.shape[0]; ++i) {
        for (std::int64_t j = 0; j < args.c.shape[1]; ++j) {
          double sum = 0;
          for (std::int64_t k = 0; k < depth; ++k) {
            const A a = args.transpose_a ? at(args.a, k, i) : at(args.a, i, k);
            const A b = args.transpose_b ? at(args.b, j, k) : at(args.b, k, j);
            sum += static_cast<double>(a) * static_cast<double>(b);
            if (!in_double) sum = static_cast<double>(static_cast<A>(sum));
          }
          C& c = static_cast<C*>(args.c.data)[i * args.c.strides[0] + j];
          if (args.bias.defined())
            sum += static_cast<double>(static_cast<A>(static_cast<const T*>(args.bias.data)[j]));
          const auto add = [&](const C& value) {
            sum += static_cast<double>(static_cast<Accumulator<C>>(value));
          };
          if (args.accumulate) add(c);
          if (args.residual.defined())
            add(static_cast<const C*>(args.residual.data)[i * args.residual.strides[0] + j]);
          c = C(static_cast<Accumulator<C>>(sum));
        }
      }
    });
  });
}

TESSERA_CUDA_KERNEL(matmul, Matmul)

}  // namespace tessera::kernels::cuda
