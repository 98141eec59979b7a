// Naive matrix products for the fibers; on a GPU a library computes them.
#include "kernels/matmul.h"

#include "core/base/context.h"
#include "core/base/dtype.h"
#include "kernels/cuda/export.h"
#include "kernels/scratch.h"
#include "kernels/workspace.h"

namespace tessera::kernels::cuda {

void matmul(Context& context, const Matmul& args) {
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
