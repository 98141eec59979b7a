#include "kernels/attention.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_CPU_KERNEL(attention_forward, AttentionForward)
void attention_forward(Context& context, const AttentionForward& args) {
  if (args.q.numel() == 0) return;
  TESSERA_DISPATCH(attention_forward, context, args);
}

TESSERA_CPU_KERNEL(attention_backward, AttentionBackward)
void attention_backward(Context& context, const AttentionBackward& args) {
  if (args.k.numel() == 0) return;
  TESSERA_DISPATCH(attention_backward, context, args);
}

}  // namespace tessera::kernels
