#include "kernels/unary.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(unary, Unary)

void unary(Context& context, const Unary& args) {
  if (!args.y || args.x.numel() == 0) return;
  Unary moved = args;
  // A copy without arithmetic keeps the bits of integers.
  if (args.x.dtype == DType::I32) moved.x.dtype = moved.y.view.dtype = DType::F32;
  if (args.x.dtype == DType::I64) moved.x.dtype = moved.y.view.dtype = DType::F64;
  TESSERA_DISPATCH(unary, context, moved);
}

}  // namespace tessera::kernels
