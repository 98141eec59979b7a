#include "kernels/embedding.h"

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/cpu/visit.h"

TESSERA_CPU_BEGIN
namespace {

template <typename T, bool kPositions>
void forward(Context& context, const EmbeddingForward& args) {
  const auto* tokens = static_cast<const std::int32_t*>(args.tokens.data);
  const auto* token_weight = static_cast<const T*>(args.token_weight.data);
  const auto* position_weight = static_cast<const T*>(args.position_weight.data);
  auto* y = static_cast<T*>(args.y.data);
  const std::int64_t columns = args.tokens.shape[1];
  const std::int64_t width = args.y.shape[2];
  const std::int64_t first_position = args.first_position;
  for_rows(context, args.tokens.numel(), width, [=](std::int64_t row, std::int64_t end) {
    for (; row < end; ++row) {
      const T* token = token_weight + tokens[row] * width;
      T* out = y + row * width;
      if constexpr (kPositions) {
        const T* position = position_weight + (first_position + row % columns) * width;
#pragma omp simd
        for (std::int64_t c = 0; c < width; ++c)
          store(out + c, load(token + c) + load(position + c));
      } else {
#pragma omp simd
        for (std::int64_t c = 0; c < width; ++c) out[c] = token[c];
      }
    }
  });
}

// A thread owns blocks of columns and adds all positions in order, so that no two threads write to
// one element and the order of every sum is fixed.
// @param tokens  by position; row 0 of the gradient is first_token
template <typename T>
void token_gradient(Context& context, const std::int32_t* tokens, std::int64_t first_token,
                    const TensorView& grad_y_view, const GradientView& to) {
  using A = Accumulator<T>;
  constexpr std::int64_t kBlock = 16;
  const auto* grad_y = static_cast<const T*>(grad_y_view.data);
  auto* grad = static_cast<A*>(to.view.data);
  const std::int64_t positions = grad_y_view.shape[0] * grad_y_view.shape[1];
  const std::int64_t width = grad_y_view.shape[2], rows = to.view.shape[0];
  if (!to.accumulate) {
    for_elements(context, to.view.numel(), [=](std::int64_t begin, std::int64_t end) {
#pragma omp simd
      for (std::int64_t i = begin; i < end; ++i) grad[i] = A(0);
    });
  }
  for_rows(context, (width + kBlock - 1) / kBlock, positions * kBlock,
           [=](std::int64_t begin, std::int64_t end) {
             const std::int64_t first = begin * kBlock;
             const std::int64_t last = std::min(width, end * kBlock);
             for (std::int64_t i = 0; i < positions; ++i) {
               const std::int64_t row = tokens[i] - first_token;
               if (row < 0 || row >= rows) continue;
               A* out = grad + row * width;
               const T* in = grad_y + i * width;
#pragma omp simd
               for (std::int64_t c = first; c < last; ++c) out[c] += load(in + c);
             }
           });
}

template <typename T>
void position_gradient(Context& context, const EmbeddingBackward& args) {
  using A = Accumulator<T>;
  const auto* grad_y = static_cast<const T*>(args.grad_y.data);
  auto* grad = static_cast<A*>(args.grad_position_weight.view.data);
  const bool accumulate = args.grad_position_weight.accumulate;
  const std::int64_t rows = args.tokens.shape[0], columns = args.tokens.shape[1];
  const std::int64_t width = args.grad_y.shape[2];
  const std::int64_t first = args.first_position;
  for_rows(context, args.grad_position_weight.view.shape[0], (rows + 1) * width,
           [=](std::int64_t position, std::int64_t end) {
             for (; position < end; ++position) {
               A* out = grad + position * width;
               if (!accumulate) {
#pragma omp simd
                 for (std::int64_t c = 0; c < width; ++c) out[c] = A(0);
               }
               const std::int64_t t = position - first;
               if (t < 0 || t >= columns) continue;
               for (std::int64_t b = 0; b < rows; ++b) {
                 const T* in = grad_y + (b * columns + t) * width;
#pragma omp simd
                 for (std::int64_t c = 0; c < width; ++c) out[c] += load(in + c);
               }
             }
           });
}

}  // namespace

void embedding_forward(Context& context, const EmbeddingForward& args) {
  visit_dtype(args.y.dtype, [&]<typename T>(std::type_identity<T>) {
    visit_flag(args.position_weight.defined(),
               [&](auto positions) { forward<T, positions()>(context, args); });
  });
}

void embedding_backward(Context& context, const EmbeddingBackward& args) {
  visit_dtype(args.grad_y.dtype, [&]<typename T>(std::type_identity<T>) {
    if (args.grad_token_weight)
      token_gradient<T>(context, static_cast<const std::int32_t*>(args.tokens.data),
                        args.first_token, args.grad_y, args.grad_token_weight);
    if (args.grad_position_weight) position_gradient<T>(context, args);
  });
}

void embedding_backward_rows(Context& context, const EmbeddingBackwardRows& args) {
  const auto* tokens = static_cast<const std::int32_t*>(args.tokens.data);
  auto* ids = static_cast<std::int32_t*>(args.ids.data);
  const std::int64_t positions = args.tokens.numel();
  // First each position's row, which is the first position of the same token. Quadratic, but needs
  // no memory.
  for_rows(context, positions, positions, [=](std::int64_t i, std::int64_t end) {
    for (; i < end; ++i) {
      std::int32_t row = 0;
      while (tokens[row] != tokens[i]) ++row;
      ids[i] = row;
    }
  });
  visit_dtype(args.grad_y.dtype, [&]<typename T>(std::type_identity<T>) {
    token_gradient<T>(context, ids, 0, args.grad_y, {args.rows, false, true});
  });
  for (std::int64_t i = 0; i < args.ids.numel(); ++i)
    ids[i] = i < positions && ids[i] == i ? tokens[i] : -1;
}

TESSERA_CPU_END
