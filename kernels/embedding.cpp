#include "kernels/embedding.h"

#include "kernels/checks.h"

namespace tessera::kernels {
namespace {

// Host tokens only; on a device the kernel itself has to refuse them.
void check_tokens(std::string_view kernel, const Context& context, const TensorView& tokens,
                  std::int64_t vocab_size) {
  if (context.device().type != DeviceType::CPU) return;
  const auto* values = static_cast<const std::int32_t*>(tokens.data);
  const std::int64_t columns = tokens.shape[1];
  for (std::int64_t i = 0; i < tokens.numel(); ++i) {
    require(values[i] >= 0 && values[i] < vocab_size,
            "{}: token {} at row {}, column {} is outside the vocabulary of {}", kernel, values[i],
            i / columns, i % columns, vocab_size);
  }
}

void check_positions(std::string_view kernel, std::int64_t first, std::int64_t count,
                     std::int64_t available) {
  require(first >= 0 && count <= available && first <= available - count,
          "{}: positions {} to {} asked for, but there are {} position rows", kernel, first,
          first + count - 1, available);
}

}  // namespace

TESSERA_CPU_KERNEL(embedding_forward, EmbeddingForward)
TESSERA_CPU_KERNEL(embedding_backward, EmbeddingBackward)

void embedding_forward(Context& context, const EmbeddingForward& args) {
  constexpr auto kName = "embedding_forward";
  const TensorView& weight = args.token_weight;
  check_dims(kName, "tokens", args.tokens, 2);
  check_dims(kName, "token_weight", weight, 2);
  check_computing_dtype(kName, "token_weight", weight);
  const std::int64_t rows = args.tokens.shape[0], columns = args.tokens.shape[1];
  const std::int64_t width = weight.shape[1];
  check_dense(kName, "tokens", context, args.tokens, DType::I32, args.tokens.shape);
  check_dense(kName, "token_weight", context, weight, weight.dtype, weight.shape);
  check_dense(kName, "y", context, args.y, weight.dtype, {rows, columns, width});
  if (args.position_weight.defined()) {
    check_dims(kName, "position_weight", args.position_weight, 2);
    const std::int64_t available = args.position_weight.shape[0];
    check_dense(kName, "position_weight", context, args.position_weight, weight.dtype,
                {available, width});
    check_positions(kName, args.first_position, columns, available);
  }
  check_tokens(kName, context, args.tokens, weight.shape[0]);
  TESSERA_DISPATCH(embedding_forward, context, args);
}

void embedding_backward(Context& context, const EmbeddingBackward& args) {
  constexpr auto kName = "embedding_backward";
  if (!args.grad_token_weight && !args.grad_position_weight) return;
  check_dims(kName, "tokens", args.tokens, 2);
  check_dims(kName, "grad_y", args.grad_y, 3);
  check_computing_dtype(kName, "grad_y", args.grad_y);
  const std::int64_t rows = args.tokens.shape[0], columns = args.tokens.shape[1];
  const std::int64_t width = args.grad_y.shape[2];
  const DType grad_dtype = accumulator_dtype(args.grad_y.dtype);
  check_dense(kName, "tokens", context, args.tokens, DType::I32, args.tokens.shape);
  check_dense(kName, "grad_y", context, args.grad_y, args.grad_y.dtype, {rows, columns, width});
  if (args.grad_token_weight) {
    const TensorView& grad = args.grad_token_weight.view;
    check_dims(kName, "grad_token_weight", grad, 2);
    check_dense(kName, "grad_token_weight", context, grad, grad_dtype, {grad.shape[0], width});
    check_tokens(kName, context, args.tokens, grad.shape[0]);
  }
  if (args.grad_position_weight) {
    const TensorView& grad = args.grad_position_weight.view;
    check_dims(kName, "grad_position_weight", grad, 2);
    check_dense(kName, "grad_position_weight", context, grad, grad_dtype, {grad.shape[0], width});
    check_positions(kName, args.first_position, columns, grad.shape[0]);
  }
  TESSERA_DISPATCH(embedding_backward, context, args);
}

}  // namespace tessera::kernels
