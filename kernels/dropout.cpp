#include "kernels/dropout.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(dropout, Dropout)
void dropout(Context& context, const Dropout& args) {
  if (!args.y) return;
  TESSERA_DISPATCH(dropout, context, args);
}

}  // namespace tessera::kernels
