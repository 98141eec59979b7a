#include "kernels/embedding.h"

#include "kernels/dispatch.h"

namespace tessera::kernels {

TESSERA_KERNEL(embedding_forward, EmbeddingForward)
TESSERA_KERNEL_IF(embedding_backward, EmbeddingBackward,
                  args.grad_token_weight || args.grad_position_weight)
TESSERA_KERNEL(embedding_backward_rows, EmbeddingBackwardRows)

}  // namespace tessera::kernels
