#include "kernels/embedding.h"

#include <set>

#include "kernels/cuda/launch/embedding.h"
#include "tests/kernels/kernel_support.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kVocab = 11, kPositions = 9;
// Odd widths, and one with rows aligned to 16 bytes.
constexpr std::int64_t kWidths[] = {1, 3, 31, 33, 257, 264};

std::vector<std::int32_t> make_tokens(std::int64_t count) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<std::int32_t>((i * i + i / 3) % (kVocab - 1)));
  return tokens;
}

TensorView token_view(std::vector<std::int32_t>& tokens, std::int64_t rows) {
  return dense_view(tokens.data(), DType::I32,
                    {rows, static_cast<std::int64_t>(tokens.size()) / rows});
}

TEST_CASE("embedding adds token and position rows") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool positions : {false, true}) {
        for (const std::int64_t width : kWidths) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(positions);
          CAPTURE(width);
          const std::int64_t rows = 3, columns = 5, first = 2;
          const auto tokens = make_tokens(rows * columns);
          const IndexBuffer indices({rows, columns}, tokens);
          const Buffer wte(dtype, {kVocab, width}, Buffer::normal(kVocab * width, 1));
          const Buffer wpe(dtype, {kPositions, width}, Buffer::normal(kPositions * width, 2));
          const Buffer y(dtype, {rows, columns, width}, 99.0);
          kernels::EmbeddingForward args{.tokens = indices.view(),
                                         .token_weight = wte.view(),
                                         .first_position = first,
                                         .y = y.view()};
          if (positions) args.position_weight = wpe.view();
          kernels::embedding_forward(context, args);
          const auto token_rows = wte.values(), position_rows = wpe.values();
          std::vector<double> want;
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            for (std::int64_t c = 0; c < width; ++c) {
              const std::int64_t token = tokens[static_cast<std::size_t>(i)];
              const std::int64_t position = first + i % columns;
              want.push_back(token_rows[static_cast<std::size_t>(token * width + c)]);
              if (positions)
                want.back() += position_rows[static_cast<std::size_t>(position * width + c)];
            }
          }
          check_close(y.values(), want, tolerance(dtype));
        }
      }
    }
  });
}

TEST_CASE("embedding backward sums by token and by position") {
  for_each_context([](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const bool accumulate : {false, true}) {
        for (const std::int64_t width : kWidths) {
          CAPTURE(dtype_name(dtype));
          CAPTURE(accumulate);
          CAPTURE(width);
          const std::int64_t rows = 60, columns = 6, first = 1;
          const auto tokens = make_tokens(rows * columns);
          const IndexBuffer indices({rows, columns}, tokens);
          const DType sum_dtype = accumulator_dtype(dtype);
          const Buffer grad_y(dtype, {rows, columns, width},
                              Buffer::normal(rows * columns * width, 3));
          const Buffer token_grad(sum_dtype, {kVocab, width}, 2.0);
          const Buffer position_grad(sum_dtype, {kPositions, width}, 2.0);
          kernels::embedding_backward(
              context, {indices.view(), grad_y.view(), token_grad.gradient(accumulate),
                        position_grad.gradient(accumulate), first});
          const double start = accumulate ? 2.0 : 0.0;
          std::vector<double> want_tokens(static_cast<std::size_t>(kVocab * width), start);
          std::vector<double> want_positions(static_cast<std::size_t>(kPositions * width), start);
          const auto values = grad_y.values();
          for (std::int64_t i = 0; i < rows * columns; ++i) {
            for (std::int64_t c = 0; c < width; ++c) {
              const std::int64_t token = tokens[static_cast<std::size_t>(i)];
              const std::int64_t position = first + i % columns;
              const double value = values[static_cast<std::size_t>(i * width + c)];
              want_tokens[static_cast<std::size_t>(token * width + c)] += value;
              want_positions[static_cast<std::size_t>(position * width + c)] += value;
            }
          }
          check_close(token_grad.values(), want_tokens, tolerance(sum_dtype), 10.0);
          check_close(position_grad.values(), want_positions, tolerance(sum_dtype), 10.0);
        }
      }
    }
  });
}

TEST_CASE("embedding gradients are bit-identical for any number of threads") {
  const std::int64_t rows = 40, columns = 8, width = 129;
  auto tokens = make_tokens(rows * columns);
  const Buffer grad_y(DType::F32, {rows, columns, width},
                      Buffer::normal(rows * columns * width, 4));
  check_same_for_any_threads([&](Context& context) {
    const Buffer token_grad(DType::F32, {kVocab, width});
    const Buffer position_grad(DType::F32, {kPositions, width});
    kernels::embedding_backward(
        context, {token_view(tokens, rows), grad_y.view(), token_grad.gradient(false),
                  position_grad.gradient(false), 0});
    return std::pair(token_grad.bytes(), position_grad.bytes());
  });
}

struct TokenSums {
  std::vector<double> got, want;
};

/// Token gradients and their float64 reference. @param vocab  tokens outside of it are ignored
TokenSums sum_by_token(Context& context, const std::vector<std::int32_t>& tokens,
                       std::int64_t vocab, std::int64_t width) {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const IndexBuffer indices({1, count}, tokens);
  const Buffer grad_y(DType::F32, {1, count, width}, Buffer::normal(count * width, 5));
  const Buffer grad(DType::F32, {vocab, width}, 7.0), again(DType::F32, {vocab, width}, 8.0);
  for (const Buffer* to : {&grad, &again})
    kernels::embedding_backward(context,
                                {indices.view(), grad_y.view(), to->gradient(false), {}, 0});
  CHECK(grad.bytes() == again.bytes());
  TokenSums result{grad.values(), std::vector<double>(static_cast<std::size_t>(vocab * width))};
  const auto values = grad_y.values();
  for (std::int64_t i = 0; i < count * width; ++i) {
    const std::int64_t token = tokens[static_cast<std::size_t>(i / width)];
    if (token >= 0 && token < vocab)
      result.want[static_cast<std::size_t>(token * width + i % width)] +=
          values[static_cast<std::size_t>(i)];
  }
  return result;
}

TEST_CASE("embedding backward sums frequent and rare tokens of a large vocabulary") {
  constexpr std::int64_t kLarge = 50257;
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < 2111; ++i) {
    // Runs of one token exceed the range that a block or warp sums at once.
    const std::int32_t rare = (i * 7919 + i * i) % static_cast<std::int32_t>(kLarge);
    tokens.push_back(i % 3 == 0 ? 13 : i % 7 == 0 ? 50256 : rare);
  }
  for_each_context([&](Context& context) {
    const TokenSums sums = sum_by_token(context, tokens, kLarge, 4);
    check_close(sums.got, sums.want, tolerance(DType::F32), 100.0);
  });
}

TEST_CASE("embedding backward sorts tokens of one, two and three digits") {
  for_each_context([](Context& context) {
    for (const std::int64_t vocab : {3, 255, 256, 257, 65600}) {
      CAPTURE(vocab);
      for (const std::int64_t count : {1, 31, 257, 1025}) {
        if (vocab > 1000 && count != 1025) continue;
        CAPTURE(count);
        std::vector<std::int32_t> tokens;
        for (std::int64_t i = 0; i < count; ++i)
          tokens.push_back(static_cast<std::int32_t>((vocab - 1) - i * i * 37 % vocab));
        const TokenSums sums = sum_by_token(context, tokens, vocab, 1);
        check_close(sums.got, sums.want, tolerance(DType::F32), 100.0);
      }
    }
  });
}

TEST_CASE("embedding backward writes zeros for absent tokens") {
  for_each_context([](Context& context) {
    const TokenSums sums = sum_by_token(context, {}, 5, 3);
    CHECK(sums.got == std::vector<double>(15, 0.0));
  });
}

TEST_CASE("embedding on a device: tokens outside of the vocabulary give NaN, and no gradient") {
  for_each_context([](Context& context) {
    if (context.device().type == DeviceType::CPU) return;
    const std::vector<std::int32_t> tokens = {4, 5, -1, 0, 2147483647, 4, 256, 1};
    const IndexBuffer indices({2, 4}, tokens);
    const Buffer weight(DType::F32, {5, 8}, 1.0), y(DType::F32, {2, 4, 8});
    kernels::embedding_forward(
        context, {.tokens = indices.view(), .token_weight = weight.view(), .y = y.view()});
    const auto values = y.values();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int32_t token = tokens[i / 8];
      CHECK(std::isnan(values[i]) == (token < 0 || token >= 5));
    }
    const TokenSums sums = sum_by_token(context, tokens, 5, 8);
    check_close(sums.got, sums.want, tolerance(DType::F32), 10.0);
  });
}

TEST_CASE("the token sort starts few tiles, and sorts all digits of the largest key") {
  using Shape = kernels::cuda::TokenSortShape;
  CHECK(Shape::tiles(1) == 1);
  CHECK(Shape::tiles(1024) == 1);
  CHECK(Shape::tiles(1025) == 2);
  CHECK(Shape::tiles(65536) == 64);
  for (const std::int64_t tokens : {std::int64_t{300000}, std::int64_t{1} << 30}) {
    CHECK(Shape::tiles(tokens) <= Shape::kMostTiles);
    CHECK(std::int64_t{Shape::tiles(tokens)} * Shape::rounds(tokens) * Shape::kThreads >= tokens);
  }
  CHECK(Shape::passes(0) == 1);
  CHECK(Shape::passes(255) == 1);
  CHECK(Shape::passes(256) == 2);
  CHECK(Shape::passes(50257) == 2);
  CHECK(Shape::passes(65536) == 3);
}

TEST_CASE("embedding backward: rows have the bits of the whole gradient, and so has their sum") {
  constexpr std::int64_t kLarge = 300, kFirst = 7, kCount = 200;
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < 900; ++i) tokens.push_back(i % 2 == 0 ? 13 : i * i % 290);
  const auto count = static_cast<std::int64_t>(tokens.size()), n = count + 5;
  for_each_context([&](Context& context) {
    for (const DType dtype : kComputingDTypes) {
      for (const std::int64_t width : kWidths) {
        CAPTURE(dtype_name(dtype));
        CAPTURE(width);
        const IndexBuffer indices({2, count / 2}, tokens);
        const Buffer grad_y(dtype, {2, count / 2, width}, Buffer::normal(count * width, 6));
        const DType sum = accumulator_dtype(dtype);
        const Buffer whole(sum, {kLarge, width}, 7.0), part(sum, {kCount, width}, 7.0);
        const Buffer rows(sum, {1, n, width}, 7.0), ids(DType::I32, {1, n});
        const auto flat = [&](const Buffer& buffer, const Shape& shape) {
          return dense_view(buffer.view().data, buffer.view().dtype, shape, buffer.view().device);
        };
        kernels::embedding_backward(context,
                                    {indices.view(), grad_y.view(), whole.gradient(false)});
        kernels::embedding_backward_rows(context, {indices.view(), grad_y.view(), kLarge,
                                                   flat(rows, {n, width}), flat(ids, {n})});
        const auto* const id = reinterpret_cast<const std::int32_t*>(ids.bytes().data());
        std::multiset<std::int32_t> used(id, id + n);
        used.erase(-1);
        const std::set<std::int32_t> distinct(tokens.begin(), tokens.end());
        CHECK(std::equal(used.begin(), used.end(), distinct.begin(), distinct.end()));

        kernels::embedding_backward(context, {.tokens = ids.view(),
                                              .grad_y = rows.view(),
                                              .grad_token_weight = part.gradient(false),
                                              .first_token = kFirst});
        const auto from = whole.bytes().begin() + std::ssize(part.bytes()) / kCount * kFirst;
        CHECK(std::equal(part.bytes().begin(), part.bytes().end(), from));
      }
    }
  });
}

TEST_CASE("embedding backward skips unrequested gradients") {
  const auto context = Context::create();
  auto tokens = make_tokens(4);
  const Buffer grad_y(DType::F32, {1, 4, 3}, 1.0), grad(DType::F32, {kPositions, 3}, 7.0);
  kernels::embedding_backward(*context,
                              {token_view(tokens, 1), grad_y.view(), {}, grad.gradient(false), 0});
  CHECK(grad.values()[0] == 1.0);
  CHECK(grad.values()[4 * 3] == 0.0);
}

}  // namespace
}  // namespace tessera::test
