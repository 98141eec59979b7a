#include <doctest/doctest.h>

#include "core/autograd/autograd.h"
#include "core/base/rng.h"
#include "core/nn/layers.h"
#include "tests/support/gradcheck.h"

using namespace tessera;
using nn::NormKind;
using nn::QueryKeyNorm;

namespace {

using Over = QueryKeyNorm::Over;

const QueryKeyNorm kNone{};
const QueryKeyNorm kNorms[] = {
    {.over = Over::Head},
    {.over = Over::Head, .norm = {.offset = 1.0}},
    {.over = Over::Head, .norm = {.kind = NormKind::Layer}},
    {.over = Over::All},
    {.over = Over::Head, .norm = {.kind = NormKind::PlainRms}, .after_rotary = true}};

struct Model : nn::Module {
  nn::Attention attention;
  explicit Model(const QueryKeyNorm& norm)
      : attention(*this, "attn",
                  {.width = 12,
                   .heads = 4,
                   .kv_heads = 2,
                   .head_dim = 4,
                   .rotary = {.base = 100},
                   .qk_norm = norm}) {}
};

// Random values of standard deviation 0.5, norms around 1; `q_scale` multiplies the queries'.
void fill(const nn::Module& model, const std::shared_ptr<Context>& context, DType dtype,
          float q_scale = 1) {
  materialize(model, context, dtype,
              [&](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
                const RngKey key = RngKey::make(1, RngPurpose::Test, hash_text(p.name));
                const std::int64_t queries = p.name.find("qkv") == p.name.npos
                                                 ? 0
                                                 : p.tensor.numel() / 2;  // of 4 + 2 + 2 heads
                for (std::int64_t i = begin; i < end; ++i)
                  out[i - begin] = (p.name.find("norm.weight") == p.name.npos ? 0.0F : 1.0F) +
                                   (i < queries ? q_scale : 1.0F) * 0.5F *
                                       normal_at(key, static_cast<std::uint64_t>(i));
              });
}

}  // namespace

TEST_CASE("attention with norms of queries and keys passes the gradient check") {
  const auto context = Context::create();
  for (const QueryKeyNorm& norm : kNorms) {
    Model model(norm);
    fill(model, context, DType::F64);
    const NormKind kind = norm.norm.kind;
    CHECK(model.parameters().size() == (kind == NormKind::PlainRms ? 4
                                        : kind == NormKind::Rms    ? 6
                                                                   : 8));
    if (kind != NormKind::PlainRms) {
      CHECK(model.parameters()[4]->name == "attn.q_norm.weight");
      CHECK(model.parameters()[4]->tensor.numel() == (norm.over == Over::All ? 16 : 4));
    }
    std::vector<Tensor> inputs = {
        test::random_tensor(context, {2, 3, 12}, DType::F64, 7).set_requires_grad(true)};
    for (const Parameter* p : model.parameters()) inputs.push_back(p->tensor);
    CHECK(test::gradcheck([&](const auto& in) { return model.attention(in[0]); }, inputs,
                          {.tolerance = 1e-6, .leaves_only = true}) == "");
  }
}

TEST_CASE("norms remove the scale of queries") {
  const auto context = Context::create();
  const NoGradGuard no_grad(*context);
  const Tensor x = test::random_tensor(context, {2, 5, 12}, DType::F64, 8);
  const auto outcome = [&](const QueryKeyNorm& norm, float scale) {
    Model model(norm);
    fill(model, context, DType::F64, scale);
    return test::values_of(model.attention(x));
  };
  const auto difference = [&](const QueryKeyNorm& norm) {
    const auto once = outcome(norm, 1), scaled = outcome(norm, 8);
    double most = 0;
    for (std::size_t i = 0; i < once.size(); ++i)
      most = std::max(most, std::abs(once[i] - scaled[i]));
    return most;
  };
  CHECK(difference(kNone) > 1e-4);
  for (const QueryKeyNorm& norm : kNorms) CHECK(difference(norm) < 1e-4);
}

TEST_CASE("decoding with normed queries and keys gives the results of the whole sequence") {
  const auto context = Context::create();
  const NoGradGuard no_grad(*context);
  std::vector<QueryKeyNorm> norms(std::begin(kNorms), std::end(kNorms));
  norms.push_back(kNone);
  for (const QueryKeyNorm& norm : norms) {
    Model model(norm);
    fill(model, context, DType::F64);
    const Tensor x = test::random_tensor(context, {1, 5, 12}, DType::F64, 9);
    const auto whole = test::values_of(model.attention(x));
    nn::KvCache cache(5);
    std::vector<double> stepwise;
    for (std::int64_t t = 0; t < 5; ++t) {
      const Tensor token = x.alias({1, 1, 12}, {12, 12, 1}, 12 * t);
      for (const double v : test::values_of(model.attention(token, &cache))) stepwise.push_back(v);
      ++cache.past;
    }
    REQUIRE(stepwise.size() == whole.size());
    for (std::size_t i = 0; i < whole.size(); ++i)
      CHECK(stepwise[i] == doctest::Approx(whole[i]).epsilon(1e-9));
  }
}
