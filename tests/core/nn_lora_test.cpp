#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/base/rng.h"
#include "core/nn/lora.h"
#include "core/ops/elementwise.h"
#include "tests/support/gradcheck.h"

using namespace tessera;
using ops::WeightLayout;
using test::random_tensor;

namespace {

const nn::LoraOptions kOptions{.rank = 3, .scale = 0.5};

// An MLP with adapters on one part of `up` and on all of `down`.
struct Adapted : nn::Module {
  nn::Mlp mlp;
  nn::GatedMlp gated;
  explicit Adapted(WeightLayout layout)
      : mlp(*this, "mlp", {.width = 5, .hidden = 8, .layout = layout}),
        gated(*this, "gated", {.width = 5, .hidden = 4, .bias = false, .layout = layout}) {
    nn::add_lora(*this,
                 {{"mlp.up", "lora_a", 1, 3},
                  {"mlp.up", "lora_b", 4, 4},
                  {"mlp.down", "lora", 0, 5},
                  {"gated.up", "lora_gate", 0, 4},
                  {"gated.down", "lora", 0, 5}},
                 kOptions);
  }
  Tensor operator()(const Tensor& x) const { return ops::add(mlp(x), gated(x)); }
};

void fill(const nn::Module& model, const std::shared_ptr<Context>& context, DType dtype) {
  materialize(model, context, dtype,
              [](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                const RngKey key = RngKey::make(1, RngPurpose::Test, hash_text(p.name));
                for (std::int64_t i = begin; i < end; ++i)
                  out[i - begin] = 0.5F * normal_at(key, static_cast<std::uint64_t>(i));
              });
}

std::vector<Tensor> trainable(const nn::Module& model) {
  std::vector<Tensor> tensors;
  for (const Parameter* p : model.parameters())
    if (p->tensor.requires_grad()) tensors.push_back(p->tensor);
  return tensors;
}

// Adds the product of an adapter to its layer's weight, and sets its B to zero.
void merge(const nn::Linear& layer, std::int64_t first, const nn::Module& adapter) {
  const Tensor &a = adapter.own_parameters()[0]->tensor, &b = adapter.own_parameters()[1]->tensor;
  const bool out_in = layer.layout == WeightLayout::OutIn;
  auto* const w = layer.weight.tensor.data<double>();
  for (std::int64_t o = 0; o < b.dim(0); ++o)
    for (std::int64_t i = 0; i < a.dim(1); ++i) {
      double sum = 0;
      for (std::int64_t r = 0; r < a.dim(0); ++r)
        sum += b.data<double>()[o * a.dim(0) + r] * a.data<double>()[r * a.dim(1) + i];
      const std::int64_t row = first + o;
      w[out_in ? row * layer.inputs() + i : i * layer.outputs() + row] += kOptions.scale * sum;
    }
  std::fill_n(b.data<double>(), b.numel(), 0.0);
}

}  // namespace

TEST_CASE("adapters of linear layers: gradients, and the same result once merged") {
  const auto context = Context::create();
  for (const WeightLayout layout : {WeightLayout::OutIn, WeightLayout::InOut}) {
    Adapted model(layout);
    fill(model, context, DType::F64);
    Tensor x = random_tensor(context, {2, 3, 5}, DType::F64, 4).set_requires_grad(true);
    std::vector<Tensor> inputs = trainable(model);
    CHECK(inputs.size() == 10);
    inputs.push_back(x);
    CHECK(test::gradcheck([&](const auto& in) { return model(in.back()); }, inputs,
                          {.tolerance = 1e-6, .leaves_only = true}) == "");

    const auto before = model(x).to_vector<double>();
    const auto merge_all = [](const nn::Linear& linear,
                              std::initializer_list<std::int64_t> firsts) {
      std::size_t i = 0;
      for (const std::int64_t first : firsts) merge(linear, first, *linear.children()[i++]);
    };
    merge_all(model.mlp.up, {1, 4});
    merge_all(model.mlp.down, {0});
    merge_all(model.gated.up, {0});
    merge_all(model.gated.down, {0});
    const auto merged = model(x).to_vector<double>();
    for (std::size_t i = 0; i < before.size(); ++i)
      CHECK(before[i] == doctest::Approx(merged[i]).epsilon(1e-12));
  }
}

TEST_CASE("only adapters are trainable; they start without effect, from the usual distribution") {
  Adapted model(WeightLayout::OutIn);
  float largest = 0;
  for (const Parameter* p : model.parameters()) {
    CHECK(p->tensor.requires_grad() == (p->name.find("lora") != p->name.npos));
    std::vector<float> values(static_cast<std::size_t>(p->tensor.numel()));
    initialize_range(*p, 1, 0, p->tensor.numel(), values.data());
    if (p->name.ends_with(".B")) CHECK(values == std::vector<float>(values.size(), 0.0F));
    if (!p->name.ends_with(".A") || p->tensor.dim(1) != 5) continue;
    for (const float v : values) largest = std::max(largest, std::abs(v));
  }
  CHECK(largest <= 1.0F / std::sqrt(5.0F));
  CHECK(largest > 0.9F / std::sqrt(5.0F));
}

TEST_CASE("invalid adapters are refused by name") {
  struct Net : nn::Module {
    nn::Linear layer{*this, "layer", {.in = 4, .out = 6}};
  } net;
  CHECK_THROWS_WITH_AS(nn::add_lora(net, {{"layers", "lora", 0, 6}}, kOptions),
                       "a LoRA adapter is for 'layers', which is no linear layer", InvalidArgument);
  CHECK_THROWS_WITH_AS(net.layer.add_adapter("lora", 2, 5, kOptions),
                       "layer 'layer' has outputs 0 to 5, and adapter 'lora' is for 2 to 6",
                       InvalidArgument);
  CHECK_THROWS_AS(net.layer.add_adapter("lora", 0, 6, {.rank = 0}), InvalidArgument);
  CHECK_THROWS_AS(net.layer.add_adapter("lora", 0, 6, {.dropout = 1.0F}), InvalidArgument);
  CHECK_THROWS_AS(nn::add_lora(net, {}, kOptions), InvalidArgument);
}
