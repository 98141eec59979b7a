#include "models/decoder.h"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/nn/recompute.h"
#include "core/nn/units.h"

using namespace tessera;
using models::Arch;
using models::Decoder;

namespace {

const Arch kSmall{.n_layer = 2, .n_head = 3, .n_embd = 24, .vocab_size = 31, .seq_len = 16};

std::shared_ptr<Context> make_model(Decoder& model, DType dtype = DType::F32) {
  auto context = Context::create({.threads = 2});
  materialize(model, context, dtype,
              [](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                initialize_range(p, 5, begin, end, out);
              });
  return context;
}

Tensor make_tokens(const std::shared_ptr<Context>& context, const Shape& shape) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>((i * 7 + 3) % 31);
  return Tensor::from<std::int32_t>(context, shape, ids);
}

}  // namespace

TEST_CASE("the 124M model has its published number of parameters") {
  CHECK(Decoder(Arch{}).parameter_count() == 124439808);
  Decoder model(kSmall);
  std::int64_t count = 0;
  for (const Parameter* p : model.parameters()) count += p->tensor.numel();
  CHECK(count == Decoder(kSmall).parameter_count());
  std::string names;
  for (const Unit& unit : units_of(model)) names += unit.name + " ";
  CHECK(names == "wte wpe h.0 h.1 ln_f ");
  CHECK(model.parameters()[4]->name == "h.0.attn.c_attn.weight");
}

TEST_CASE("initialization has GPT-2's standard deviations and can be done range by range") {
  Decoder model({.n_layer = 8, .n_head = 2, .n_embd = 64, .vocab_size = 512, .seq_len = 8});
  for (const Parameter* p : model.parameters()) {
    const auto n = p->tensor.numel();
    std::vector<float> whole(static_cast<std::size_t>(n));
    std::vector<float> parts(whole.size());
    initialize_range(*p, 9, 0, n, whole.data());
    const std::int64_t cut = n / 3;
    initialize_range(*p, 9, 0, cut, parts.data());
    initialize_range(*p, 9, cut, n, parts.data() + cut);
    CHECK(whole == parts);
    double sum = 0;
    for (const float v : whole) sum += static_cast<double>(v) * static_cast<double>(v);
    const double rms = std::sqrt(sum / static_cast<double>(n));
    CAPTURE(p->name);
    if (p->name.ends_with("ln_1.weight") || p->name.ends_with("ln_f.weight")) CHECK(rms == 1.0);
    if (p->name.ends_with(".bias")) CHECK(rms == 0.0);
    if (p->name == "wte.weight") CHECK(rms == doctest::Approx(0.02).epsilon(0.02));
    if (p->name.ends_with("c_proj.weight")) CHECK(rms == doctest::Approx(0.005).epsilon(0.05));
  }
  std::vector<float> a(64);
  std::vector<float> b(64);
  initialize_range(*model.parameters()[0], 9, 0, 64, a.data());
  initialize_range(*model.parameters()[0], 10, 0, 64, b.data());
  CHECK(a != b);
}

TEST_CASE("an untrained model's loss is close to that of a uniform guess") {
  Decoder model(kSmall);
  const auto context = make_model(model);
  const NoGradGuard no_grad(*context);
  const Tensor tokens = make_tokens(context, {2, 16});
  // Targets differ from the inputs: a tied head predicts the inputs.
  std::vector<std::int32_t> ids = tokens.to_vector<std::int32_t>();
  for (auto& id : ids) id = (id + 11) % 31;
  const Tensor targets =
      Tensor::from<std::int32_t>(context, {2, 16}, std::span<const std::int32_t>(ids));
  const double loss = model.loss(tokens, targets, 1.0 / 32).item();
  CHECK(loss == doctest::Approx(std::log(31.0)).epsilon(0.02));
}

TEST_CASE("cached decoding gives the full forward pass's logits, token by token or in chunks") {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    Decoder model(kSmall);
    const auto context = make_model(model, dtype);
    const NoGradGuard no_grad(*context);
    const std::int64_t length = 11;
    const Tensor tokens = make_tokens(context, {1, length});
    const Tensor all = model.logits(tokens);
    Tensor last = Tensor::empty(context, {31}, DType::F32);
    const std::vector<std::int32_t> ids = tokens.to_vector<std::int32_t>();
    for (const std::int64_t first : {1, 4, 11}) {
      nn::KvCache cache(16);
      Tensor logits;
      std::int64_t at = 0;
      while (at < length) {
        const std::int64_t count = at == 0 ? first : 1;
        logits = model.decode(
            Tensor::from<std::int32_t>(context, {1, count},
                                       std::span(ids).subspan(static_cast<std::size_t>(at),
                                                              static_cast<std::size_t>(count))),
            cache);
        at += count;
      }
      CHECK(cache.past == length);
      for (int v = 0; v < 31; ++v) {
        const auto row = static_cast<std::size_t>((length - 1) * 31 + v);
        const double expected =
            dtype == DType::F32
                ? static_cast<double>(all.to_vector<float>()[row])
                : static_cast<double>(static_cast<float>(all.to_vector<BFloat16>()[row]));
        const double actual =
            static_cast<double>(logits.to_vector<float>()[static_cast<std::size_t>(v)]);
        CHECK(std::abs(actual - expected) < (dtype == DType::F32 ? 1e-5 : 2e-2));
      }
    }
  }
}

TEST_CASE(
    "dropout depends on step and sample only: half a batch gets the same masks as in the whole "
    "batch") {
  Arch config = kSmall;
  config.dropout = 0.3F;
  Decoder model(config);
  const auto context = make_model(model);
  const NoGradGuard no_grad(*context);
  const Tensor tokens = make_tokens(context, {4, 8});
  const auto loss = [&](std::int64_t begin, std::int64_t rows, std::uint64_t step, bool training) {
    const Tensor part = tokens.alias({rows, 8}, {8, 1}, begin * 8);
    context->set_rng_step({3, step, static_cast<std::uint64_t>(begin)});
    model.set_training(training);
    return model.loss(part, part, 1.0).item();
  };
  const double whole = loss(0, 4, 1, true);
  CHECK(loss(0, 1, 1, true) + loss(1, 3, 1, true) == doctest::Approx(whole).epsilon(1e-5));
  CHECK(std::abs(loss(0, 4, 2, true) - whole) > 1e-4);
  CHECK(std::abs(loss(0, 4, 1, false) - whole) > 1e-4);
}

TEST_CASE("packed documents have the loss and gradients of the documents one by one") {
  const std::vector<std::int64_t> lengths{5, 7, 3};  // and a position of padding
  const models::Sizes sizes{.n_layer = 2,
                            .n_head = 4,
                            .n_kv_head = 2,
                            .n_embd = 32,
                            .n_inner = 48,
                            .vocab_size = 31,
                            .seq_len = 16};
  for (const char* family : {"gpt2", "llama", "qwen3", "gemma3", "smollm3"}) {
    for (const char* recompute : {"none", "cheap", "block"}) {
      CAPTURE(family);
      CAPTURE(recompute);
      models::Sizes own = sizes;
      if (std::string_view(family) == "gpt2") own.n_kv_head = own.n_inner = 0;
      Arch arch = models::arch_of_family(family, own);
      if (arch.window > 0) arch.window = 4;
      // Sums a loss of each document, or one of the packed row.
      const auto run = [&](bool packed) {
        Decoder model(arch);
        model.set_recompute(nn::parse_recompute(recompute));
        const auto context = make_model(model);
        const std::vector<std::int32_t> ids =
            make_tokens(context, {1, 16}).to_vector<std::int32_t>();
        std::vector<std::int32_t> targets(16, -1), documents(16, 3), positions(16, 0);
        std::int64_t at = 0;
        double loss = 0;
        for (std::size_t d = 0; d < lengths.size(); ++d) {
          const auto first = static_cast<std::ptrdiff_t>(at);
          for (std::int64_t i = 0; i < lengths[d]; ++i, ++at) {
            const auto t = static_cast<std::size_t>(at);
            documents[t] = static_cast<std::int32_t>(d);
            positions[t] = static_cast<std::int32_t>(i);
            if (i > 0) targets[t] = (ids[t] + 1) % 31;
          }
          if (packed) continue;
          const auto part = [&](const std::vector<std::int32_t>& all) {
            return Tensor::from<std::int32_t>(
                context, {1, lengths[d]},
                std::span(all).subspan(static_cast<std::size_t>(first),
                                       static_cast<std::size_t>(lengths[d])));
          };
          const Tensor sum = model.loss(part(ids), part(targets), 0.1);
          loss += sum.item();
          autograd::backward(sum);
        }
        if (packed) {
          const auto whole = [&](const std::vector<std::int32_t>& all) {
            return Tensor::from<std::int32_t>(context, {1, 16}, std::span(all));
          };
          const Tensor sum =
              model.loss(whole(ids), whole(targets), 0.1, {whole(documents), whole(positions)});
          loss = sum.item();
          autograd::backward(sum);
        }
        std::vector<float> gradients;
        for (const Parameter* p : model.parameters())
          for (const float g : p->tensor.grad().to_vector<float>()) gradients.push_back(g);
        return std::pair(loss, gradients);
      };
      const auto [loss, gradients] = run(false);
      const auto [packed_loss, packed_gradients] = run(true);
      CHECK(std::abs(packed_loss - loss) < 1e-6);
      REQUIRE(gradients.size() == packed_gradients.size());
      float most = 0;
      for (std::size_t i = 0; i < gradients.size(); ++i)
        most = std::max(most, std::abs(gradients[i] - packed_gradients[i]));
      CHECK(most < 1e-6F);
    }
  }
}

TEST_CASE("the meta device runs a training step without allocating memory") {
  Decoder model(kSmall);
  const auto context = Context::create({.device = {DeviceType::Meta}});
  materialize(model, context, DType::F32, {});
  const Tensor tokens = Tensor::empty(context, {2, 16}, DType::I32);
  model.set_training(true);
  autograd::backward(model.loss(tokens, tokens, 1.0));
  CHECK(context->ledger().usage(MemoryCategory::Activations).peak > 0);
  CHECK(context->allocator().reserved_bytes() == 0);
}

TEST_CASE("wrong shapes and options are refused with their values") {
  CHECK_THROWS_WITH_AS(Decoder({.n_head = 5, .n_embd = 24}),
                       "model.n_embd 24 is not divisible by model.n_head 5", InvalidArgument);
  CHECK_THROWS_AS(Decoder({.n_layer = 0}), InvalidArgument);
  Decoder model(kSmall);
  const auto context = make_model(model);
  const Tensor tokens = make_tokens(context, {1, 17});
  CHECK_THROWS_WITH_AS(model.logits(tokens),
                       "17 tokens are more than the model's 16 positions (model.seq_len)",
                       InvalidArgument);
  nn::KvCache cache(16);
  cache.past = 16;
  CHECK_THROWS_AS(model.decode(make_tokens(context, {1, 1}), cache), InvalidArgument);
}
