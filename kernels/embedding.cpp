#include "kernels/embedding.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL(embedding_forward, EmbeddingForward)

TESSERA_CPU_KERNEL(embedding_backward, EmbeddingBackward)
void embedding_backward(Context& context, const EmbeddingBackward& args) {
  if (!args.grad_token_weight && !args.grad_position_weight) return;
  TESSERA_DISPATCH(embedding_backward, context, args);
}

}  // namespace tessera::kernels
