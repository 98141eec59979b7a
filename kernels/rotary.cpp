#include "kernels/rotary.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(rotary, Rotary)
void rotary(Context& context, const Rotary& args) {
  if (!args.y || args.x.numel() == 0) return;
  TESSERA_DISPATCH(rotary, context, args);
}

}  // namespace tessera::kernels
