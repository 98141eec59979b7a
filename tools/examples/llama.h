// A small Llama of own modules, and text for it: the digits of a counter, as a function of the sample's number.
#pragma once

#include <tessera/tessera.h>

#include <cstdint>
#include <vector>

namespace ts = tessera;
namespace nn = tessera::nn;
namespace ops = tessera::ops;
using ts::Tensor;

struct Block : nn::Module {
  using Module::Module;
  nn::RmsNorm norm1{*this, "norm1", 32}, norm2{*this, "norm2", 32};
  nn::Attention attention{
      *this,
      "attention",
      {.width = 32, .heads = 4, .kv_heads = 2, .rotary = {.base = 1e4}, .bias = false}};
  nn::GatedMlp mlp{*this, "mlp", {.width = 32, .hidden = 64, .bias = false}};
  Tensor operator()(const Tensor& x) const {
    const Tensor h = x + attention(norm1(x));
    return h + mlp(norm2(h));
  }
};

struct Llama : nn::Module {
  nn::Embedding embed{*this, "embed", 10, 32};
  nn::List<Block> blocks{*this, "blocks", 2};
  nn::RmsNorm norm{*this, "norm", 32};
  nn::Linear head{*this, "head", {.in = 32, .out = 10, .bias = false}};
  Tensor operator()(const Tensor& tokens) {
    Tensor x = nn::unit(embed, tokens);  // gathered, run and released as one
    for (Block& block : blocks) x = nn::unit(block, x);
    return nn::unit(
        {&norm, &head}, [this](const Tensor& h) { return head(norm(h)); }, x);
  }
};

/// Sum over samples [first, first + rows) of the mean cross-entropy of their next digits.
inline Tensor loss_of(Llama& net, const std::shared_ptr<ts::Context>& context, std::int64_t first,
                      std::int64_t rows) {
  constexpr std::int64_t kLength = 12;
  std::vector<std::int32_t> inputs, targets;
  for (std::int64_t i = 0; i < rows * kLength; ++i) {
    const auto digit = [&](std::int64_t at) {
      return static_cast<std::int32_t>((at * at + at) % 10);
    };
    inputs.push_back(digit(first + i / kLength + i % kLength));
    targets.push_back(digit(first + i / kLength + i % kLength + 1));
  }
  const Tensor logits = net(Tensor::from<std::int32_t>(context, {rows, kLength}, inputs));
  return ops::cross_entropy(ops::reshape(logits, {rows * kLength, 10}),
                            Tensor::from<std::int32_t>(context, {rows * kLength}, targets),
                            1.0 / kLength);
}
