#include "core/ops/embedding.h"

#include "core/autograd/autograd.h"
#include "core/ops/checks.h"
#include "kernels/embedding.h"

namespace tessera::ops {
namespace {

// On other devices a token outside the vocabulary gives a row of NaNs.
void check_tokens(const Tensor& tokens, std::int64_t vocab_size) {
  if (tokens.device().type != DeviceType::CPU) return;
  const auto* values = tokens.data<std::int32_t>();
  const std::int64_t columns = tokens.dim(1);
  for (std::int64_t i = 0; i < tokens.numel(); ++i)
    require(values[i] >= 0 && values[i] < vocab_size,
            "embedding: token {} at row {}, column {} is outside the vocabulary of {}", values[i],
            i / columns, i % columns, vocab_size);
}

}  // namespace

Tensor embedding(const Tensor& tokens, const Tensor& token_weight, const Tensor& position_weight,
                 std::int64_t first_position) {
  const auto& context = common_context("embedding", {&tokens, &token_weight, &position_weight});
  check_dims("embedding", "tokens", tokens, 2, "[B, T]");
  check_dtype("embedding", "tokens", tokens, DType::I32);
  check_contiguous("embedding", "tokens", tokens);
  check_dims("embedding", "token_weight", token_weight, 2, "[V, C]");
  check_computes("embedding", "token_weight", token_weight);
  check_contiguous("embedding", "token_weight", token_weight);
  const std::int64_t columns = tokens.dim(1);
  const std::int64_t channels = token_weight.dim(1);
  require(first_position >= 0, "embedding: first_position must not be negative, got {}",
          first_position);
  if (position_weight.defined()) {
    check_dims("embedding", "position_weight", position_weight, 2, "[P, C]");
    check_dense("embedding", "position_weight", position_weight, token_weight.dtype(),
                {position_weight.dim(0), channels});
    require(columns <= position_weight.dim(0) && first_position <= position_weight.dim(0) - columns,
            "embedding: positions {} to {} requested, position_weight has {}; shorten the sequence",
            first_position, first_position + columns - 1, position_weight.dim(0));
  }
  check_tokens(tokens, token_weight.dim(0));

  Tensor y = Tensor::empty(context, {tokens.dim(0), columns, channels}, token_weight.dtype(),
                           MemoryCategory::Activations, "embedding");
  const TensorView positions = position_weight.defined() ? position_weight.view() : TensorView{};
  const kernels::EmbeddingForward args{tokens.view(), token_weight.view(), positions,
                                       first_position, y.view()};
  kernels::embedding_forward(*context, args);

  if (autograd::needs_grad({&token_weight, &position_weight})) {
    const auto backward = [saved = autograd::SavedTensor(tokens), first_position,
                           vocab_size = token_weight.dim(0)](const Tensor& grad_y,
                                                             autograd::InputGradients& into) {
      Context& on = *grad_y.context();
      const TensorView ids = saved.get("embedding").view();
      const autograd::RowGradient to = into.row_target(0, ids.numel());
      if (to)
        kernels::embedding_backward_rows(on, {ids, grad_y.view(), vocab_size, to.rows, to.indices});
      kernels::embedding_backward(on,
                                  {ids, grad_y.view(), to ? GradientView() : into.weight_target(0),
                                   into.weight_target(1), first_position});
    };
    autograd::record("embedding", y, {token_weight, position_weight}, backward);
  }
  return y;
}

}  // namespace tessera::ops
