#include "kernels/dropout.h"

#include "kernels/checks.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(dropout, Dropout)

void dropout(Context& context, const Dropout& args) {
  if (!args.y) return;
  constexpr auto kName = "dropout";
  check_computing_dtype(kName, "x", args.x);
  check_dense(kName, "x", context, args.x, args.x.dtype, args.x.shape);
  check_dense(kName, "y", context, args.y.view, args.x.dtype, args.x.shape);
  require(args.p >= 0.0F && args.p < 1.0F, "dropout: p must be in [0, 1), got {}", args.p);
  TESSERA_DISPATCH(dropout, context, args);
}

}  // namespace tessera::kernels
