#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/attention.h"
#include "core/ops/view.h"
#include "tests/support/gradcheck.h"

namespace tessera::test {
namespace {

using ops::AttentionOptions;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Attention of q [B, T, H, D] to k and v [B, S, Hkv, D] by definition, in double.
std::vector<double> reference(const Tensor& q, const Tensor& k, const Tensor& v,
                              const AttentionOptions& options) {
  const std::int64_t batch = q.dim(0), queries = q.dim(1), keys = k.dim(1);
  const std::int64_t heads = q.dim(2), kv_heads = k.dim(2), head_dim = q.dim(3);
  const std::vector<double> qs = values_of(q), ks = values_of(k), vs = values_of(v);
  const std::vector<std::int32_t> ids = options.documents.defined()
                                            ? options.documents.to_vector<std::int32_t>()
                                            : std::vector<std::int32_t>(at(batch * keys), 0);
  const double scale =
      options.scale == 0.0 ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : options.scale;
  std::vector<double> out;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t i = 0; i < queries; ++i)
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t position = i + keys - queries;
        std::vector<double> sums(at(head_dim), 0.0);
        double total = 0.0;
        for (std::int64_t j = 0; j < keys; ++j) {
          const bool hidden = (options.causal && j > position) ||
                              (options.window > 0 && j <= position - options.window) ||
                              (options.documents.defined() &&
                               ids[at(b * keys + j)] != ids[at(b * keys + position)]);
          if (hidden) continue;
          const std::int64_t from = ((b * queries + i) * heads + h) * head_dim;
          const std::int64_t to = ((b * keys + j) * kv_heads + h * kv_heads / heads) * head_dim;
          double score = 0.0;
          for (std::int64_t d = 0; d < head_dim; ++d) score += qs[at(from + d)] * ks[at(to + d)];
          score *= scale;
          if (options.softcap > 0.0) score = options.softcap * std::tanh(score / options.softcap);
          total += std::exp(score);
          for (std::int64_t d = 0; d < head_dim; ++d)
            sums[at(d)] += std::exp(score) * vs[at(to + d)];
        }
        for (const double sum : sums) out.push_back(sum / total);
      }
  return out;
}

// Heads [first, first + count) of a packed projection as [B, T, count, D].
Tensor part(const Tensor& qkv, std::int64_t first, std::int64_t count, std::int64_t head_dim) {
  const std::int64_t rows = qkv.dim(0) * qkv.dim(1), width = qkv.dim(2);
  const std::vector<double> values = values_of(qkv);
  Tensor out = Tensor::empty(qkv.context(), {qkv.dim(0), qkv.dim(1), count, head_dim}, DType::F64);
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t d = 0; d < count * head_dim; ++d)
      out.data<double>()[row * count * head_dim + d] =
          values[at(row * width + first * head_dim + d)];
  return convert(out, qkv.dtype());
}

struct Parts {
  Tensor q, k, v;
};
Parts parts_of(const Tensor& qkv, const AttentionOptions& options) {
  const std::int64_t heads = options.heads;
  const std::int64_t kv_heads = options.kv_heads == 0 ? heads : options.kv_heads;
  const std::int64_t head_dim = qkv.dim(2) / (heads + 2 * kv_heads);
  return {part(qkv, 0, heads, head_dim), part(qkv, heads, kv_heads, head_dim),
          part(qkv, heads + kv_heads, kv_heads, head_dim)};
}

std::vector<double> reference(const Tensor& qkv, const AttentionOptions& options) {
  const auto [q, k, v] = parts_of(qkv, options);
  return reference(q, k, v, options);
}

// Documents of 3, 4, 3, 4, ... tokens; those of sequence b begin b tokens earlier.
Tensor documents_of(const std::shared_ptr<Context>& context, std::int64_t batch,
                    std::int64_t time) {
  std::vector<std::int32_t> ids;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 0; t < time; ++t)
      ids.push_back(static_cast<std::int32_t>((t + b) * 2 / 7));
  return Tensor::from<std::int32_t>(context, {batch, time}, ids);
}

// Every combination of mask, cap, scale and documents.
std::vector<AttentionOptions> variants(const std::shared_ptr<Context>& context, std::int64_t batch,
                                       std::int64_t time, std::int64_t heads, std::int64_t kv_heads,
                                       bool causal_alone = false) {
  std::vector<AttentionOptions> all;
  for (const bool documents : {false, true})
    for (const double softcap : {0.0, 1.5})
      for (const int mask : {0, 1, 2}) {
        if (mask == 0 && causal_alone) continue;
        AttentionOptions options{.heads = heads, .kv_heads = kv_heads};
        options.causal = mask != 0;
        options.window = mask == 2 ? 3 : 0;
        options.softcap = softcap;
        options.scale = softcap > 0.0 ? 0.75 : 0.0;
        if (documents) options.documents = documents_of(context, batch, time);
        all.push_back(options);
      }
  return all;
}

std::string text_of(const AttentionOptions& o) {
  return fmt::format("heads {} kv_heads {} causal {} window {} softcap {} scale {} documents {}",
                     o.heads, o.kv_heads, o.causal, o.window, o.softcap, o.scale,
                     o.documents.defined());
}

void check_near(const std::vector<double>& found, const std::vector<double>& expected,
                double tolerance) {
  REQUIRE(found.size() == expected.size());
  double error = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double difference = std::abs(found[i] - expected[i]);
    error = difference <= error ? error : difference;  // a NaN persists
  }
  CHECK(error <= tolerance);
}

struct Case {
  std::int64_t batch, time, heads, head_dim;
  Shape shape() const { return {batch, time, 3 * heads * head_dim}; }
};

TEST_CASE("attention: matches its definition, over odd shapes and tile borders") {
  const auto context = Context::create();
  for (const Case& c :
       {Case{1, 1, 1, 1}, Case{2, 7, 3, 5}, Case{1, 65, 2, 8}, Case{1, 130, 1, 3}}) {
    const Tensor qkv = random_tensor(context, c.shape(), DType::F64, 1);
    CAPTURE(qkv.shape().str());
    const std::vector<double> expected = reference(qkv, {.heads = c.heads});
    const Tensor out = ops::attention(qkv, {.heads = c.heads});
    CHECK(out.shape() == Shape{c.batch, c.time, c.heads * c.head_dim});
    // Tolerance: the scale 1 / sqrt(D) is a float.
    check_near(values_of(out), expected, 1e-6);
    check_near(values_of(ops::attention(convert(qkv, DType::F32), {.heads = c.heads})), expected,
               1e-5);
  }
}

TEST_CASE("attention: large scores do not overflow") {
  const auto context = Context::create();
  const Tensor qkv = random_tensor(context, {1, 9, 12}, DType::F32, 1, 100.0);
  for (const double value : values_of(ops::attention(qkv, {.heads = 2})))
    CHECK(std::isfinite(value));
}

TEST_CASE("attention: later positions have no influence") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 6, 12}, DType::F32, 1);
  const std::vector<double> before = values_of(ops::attention(qkv, {.heads = 2}));
  for (int i = 4 * 12; i < 6 * 12; ++i) qkv.data<float>()[i] = 9.0F;
  const std::vector<double> after = values_of(ops::attention(qkv, {.heads = 2}));
  CHECK(std::equal(before.begin(), before.begin() + 4 * 4, after.begin()));
  CHECK(before != after);
}

TEST_CASE("attention: gradients") {
  const auto context = Context::create();
  for (const Case& c : {Case{1, 1, 1, 2}, Case{2, 3, 1, 1}, Case{2, 5, 2, 3}, Case{1, 9, 3, 2}}) {
    Tensor qkv = random_tensor(context, c.shape(), DType::F64, 1).set_requires_grad(true);
    CAPTURE(qkv.shape().str());
    CHECK(gradcheck([&](const auto& t) { return ops::attention(t[0], {.heads = c.heads}); },
                    {qkv}) == "");
  }
}

TEST_CASE("attention: bf16 matches f32") {
  const auto context = Context::create();
  CHECK(compare_bf16([](const auto& t) { return ops::attention(t[0], {.heads = 2}); },
                     {random_tensor(context, {2, 19, 48}, DType::BF16, 1)}, 0.02) == "");
}

TEST_CASE("attention: keeps its result without a reference cycle") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 4, 12}, DType::F32, 1).set_requires_grad(true);
  { const Tensor out = ops::attention(qkv, {.heads = 2}); }
  CHECK(context->ledger().total().current == static_cast<std::int64_t>(qkv.bytes()));
}

TEST_CASE("attention: variants match their definition, packed and separate") {
  const auto context = Context::create();
  for (const auto& [batch, time, heads, kv_heads, head_dim] :
       {std::array<std::int64_t, 5>{2, 7, 4, 2, 5}, {1, 67, 3, 1, 3}, {2, 1, 2, 2, 1}})
    for (const AttentionOptions& options : variants(context, batch, time, heads, kv_heads)) {
      CAPTURE(text_of(options));
      const Shape shape{batch, time, (heads + 2 * kv_heads) * head_dim};
      for (const DType dtype : {DType::F64, DType::F32, DType::BF16}) {
        CAPTURE(dtype_name(dtype));
        const Tensor qkv = random_tensor(context, shape, dtype, 1);
        const Tensor out = ops::attention(qkv, options);
        CHECK(out.shape() == Shape{batch, time, heads * head_dim});
        const double tolerance = dtype == DType::F64   ? 1e-6  // the scale is a float
                                 : dtype == DType::F32 ? 1e-5
                                                       : 0.02;
        check_near(values_of(out), reference(qkv, options), tolerance);
        const auto [q, k, v] = parts_of(qkv, options);
        CHECK(values_of(ops::attention(q, k, v, options)) == values_of(out));
      }
    }
}

TEST_CASE("attention: a window that holds all keys changes nothing") {
  const auto context = Context::create();
  const Tensor qkv = random_tensor(context, {1, 9, 12}, DType::F32, 1);
  CHECK(values_of(ops::attention(qkv, {.heads = 2, .window = 9})) ==
        values_of(ops::attention(qkv, {.heads = 2})));
}

TEST_CASE("attention: other numbers of keys than of queries") {
  const auto context = Context::create();
  const Tensor q = random_tensor(context, {2, 5, 4, 3}, DType::F64, 1);
  for (const std::int64_t keys : {1, 4, 5, 70}) {
    CAPTURE(keys);
    const Tensor k = random_tensor(context, {2, keys, 2, 3}, DType::F64, 2);
    const Tensor v = random_tensor(context, {2, keys, 2, 3}, DType::F64, 3);
    std::vector<AttentionOptions> all{{.causal = false}, {.causal = false, .softcap = 2.0}};
    if (keys >= 5) {
      all.push_back({});
      all.push_back({.window = 2, .documents = documents_of(context, 2, keys)});
      all.push_back({.causal = false, .documents = documents_of(context, 2, keys)});
    }
    for (const AttentionOptions& options : all) {
      CAPTURE(text_of(options));
      check_near(values_of(ops::attention(q, k, v, options)), reference(q, k, v, options), 1e-6);
    }
  }
}

TEST_CASE("attention: gradients of variants") {
  const auto context = Context::create();
  for (const AttentionOptions& options : variants(context, 2, 6, 4, 2)) {
    CAPTURE(text_of(options));
    Tensor qkv = random_tensor(context, {2, 6, 8 * 3}, DType::F64, 1).set_requires_grad(true);
    CHECK(gradcheck([&](const auto& t) { return ops::attention(t[0], options); }, {qkv}) == "");
  }
}

TEST_CASE("attention: gradients of separate queries, keys and values") {
  const auto context = Context::create();
  Tensor q = random_tensor(context, {2, 3, 4, 3}, DType::F64, 1).set_requires_grad(true);
  for (const std::int64_t keys : {2, 7}) {
    CAPTURE(keys);
    Tensor k = random_tensor(context, {2, keys, 2, 3}, DType::F64, 2).set_requires_grad(true);
    Tensor v = random_tensor(context, {2, keys, 2, 3}, DType::F64, 3).set_requires_grad(true);
    for (const bool causal : {false, true}) {
      if (causal && keys < 3) continue;
      CAPTURE(causal);
      AttentionOptions options{.causal = causal, .softcap = 2.0};
      if (causal) options.window = 4;
      const auto operation = [&](const auto& t) {
        return ops::attention(t[0], t[1], t[2], options);
      };
      CHECK(gradcheck(operation, {q, k, v}) == "");
      CHECK(gradcheck(operation, {q.detach(), k, v.detach()}) == "");
      CHECK(gradcheck(operation, {q, k.detach(), v.detach()}) == "");
    }
  }
  Tensor x = random_tensor(context, {1, 4, 2, 3}, DType::F64, 1).set_requires_grad(true);
  CHECK(gradcheck([](const auto& t) { return ops::attention(t[0], t[0], t[0]); }, {x}) == "");
}

TEST_CASE("attention: variants in bf16 match f32") {
  const auto context = Context::create();
  for (const AttentionOptions& options : variants(context, 2, 19, 4, 2)) {
    CAPTURE(text_of(options));
    CHECK(compare_bf16([&](const auto& t) { return ops::attention(t[0], options); },
                       {random_tensor(context, {2, 19, 64}, DType::BF16, 1)}, 0.02) == "");
  }
}

TEST_CASE("attention: backward refuses documents that changed in place") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 4, 12}, DType::F32, 1).set_requires_grad(true);
  const Tensor documents = documents_of(context, 1, 4);
  const Tensor out = ops::attention(qkv, {.heads = 2, .documents = documents});
  documents.storage()->bump_version();
  CHECK_THROWS_AS(autograd::backward(out, Tensor::full(context, out.shape(), DType::F32, 1.0)),
                  InvalidArgument);
}

TEST_CASE("attention: refuses invalid arguments") {
  const auto context = Context::create();
  const auto random = [&](const Shape& shape, DType dtype = DType::F32) {
    return random_tensor(context, shape, dtype, 1);
  };
  const Tensor qkv = random({1, 4, 12});
  const auto refuses = [](const auto& run, const std::string& message) {
    CHECK_THROWS_WITH_AS(run(), doctest::Contains(message.c_str()), InvalidArgument);
  };
  const auto packed = [&](const AttentionOptions& options, const std::string& message) {
    refuses([&] { ops::attention(qkv, options); }, message);
  };
  for (const std::int64_t heads : {0, 3, -1, 13})
    packed({.heads = heads},
           fmt::format("got shape [1, 4, 12] with heads {} and kv_heads {}", heads, heads));
  for (const std::int64_t kv_heads : {-1, 3, 8})
    packed({.heads = 4, .kv_heads = kv_heads},
           fmt::format("attention: the last dim of qkv must be (heads + 2 * kv_heads) * head_dim "
                       "with heads a multiple of kv_heads, got shape [1, 4, 12] with heads 4 and "
                       "kv_heads {}",
                       kv_heads));
  refuses([&] { ops::attention(random({1, 4, 11}), {.heads = 1}); }, "got shape [1, 4, 11]");
  refuses(
      [&] {
        ops::attention(random({4, 12}), {.heads = 2});
      },
      "qkv must be [B, T, (H + 2 * Hkv) * D], got shape [4, 12]");
  packed({.heads = 2, .window = -1},
         "attention: window must be 0, or positive with causal, got window -1 with causal true");
  packed({.heads = 2, .causal = false, .window = 3}, "got window 3 with causal false");
  for (const double bad : {-1.0, 1e-60, 1e60, std::numeric_limits<double>::quiet_NaN()}) {
    packed({.heads = 2, .softcap = bad},
           fmt::format("attention: softcap must be 0, or positive and finite in f32, got {}", bad));
    packed({.heads = 2, .scale = bad},
           fmt::format("attention: scale must be 0, or positive and finite in f32, got {}", bad));
  }
  packed({.heads = 2, .documents = documents_of(context, 1, 5)},
         "attention: documents must have shape [1, 4], got [1, 5]");
  packed({.heads = 2, .documents = random({1, 4})},
         "attention: documents must have dtype i32, got f32");

  const Tensor q = random({1, 4, 2, 3}), k = random({1, 6, 2, 3});
  const auto separate = [&](const Tensor& keys, const Tensor& values,
                            const AttentionOptions& options, const std::string& message) {
    refuses([&] { ops::attention(q, keys, values, options); }, message);
  };
  refuses([&] { ops::attention(qkv, k, k); }, "q must be [B, T, H, D], got shape [1, 4, 12]");
  separate(qkv, k, {}, "k must be [B, S, Hkv, D], got shape [1, 4, 12]");
  separate(random({2, 6, 2, 3}), k, {}, "k must have shape [1, 6, 2, 3], got [2, 6, 2, 3]");
  separate(random({1, 6, 2, 4}), k, {}, "k must have shape [1, 6, 2, 3], got [1, 6, 2, 4]");
  separate(random({1, 6, 2, 3}, DType::F64), k, {}, "k must have dtype f32, got f64");
  separate(k, random({1, 5, 2, 3}), {}, "v must have shape [1, 6, 2, 3], got [1, 5, 2, 3]");
  const Tensor three = random({1, 6, 3, 3});
  separate(three, three, {},
           "the heads of q must be a multiple of those of k, got q of shape [1, 4, 2, 3] and k of "
           "shape [1, 6, 3, 3]");
  separate(
      k, k, {.heads = 4},
      "q of shape [1, 4, 2, 3] and k of shape [1, 6, 2, 3] do not have heads 4 and kv_heads 0");
  separate(k, k, {.kv_heads = 1}, "do not have heads 0 and kv_heads 1");
  const Tensor few = random({1, 3, 2, 3}), none = Tensor::empty(context, {1, 0, 2, 3}, DType::F32);
  separate(few, few, {},
           "attention: 4 queries need at least as many keys with causal or documents, got 3");
  separate(few, few, {.causal = false, .documents = documents_of(context, 1, 3)},
           "with causal or documents, got 3");
  separate(none, none, {.causal = false}, "attention: 4 queries need at least one key, got none");
}

// A copy of rows [begin, end) of the time dim.
Tensor slice_time(const Tensor& qkv, std::int64_t begin, std::int64_t end) {
  const std::int64_t batch = qkv.dim(0), time = qkv.dim(1), width = qkv.dim(2);
  std::vector<float> values;
  for (std::int64_t b = 0; b < batch; ++b) {
    const float* first = qkv.data<float>() + (b * time + begin) * width;
    values.insert(values.end(), first, first + (end - begin) * width);
  }
  return Tensor::from<float>(qkv.context(), {batch, end - begin, width}, values);
}

TEST_CASE("cached_attention: prompt, then token by token, equals attention") {
  const auto context = Context::create();
  const std::int64_t batch = 2, time = 7, heads = 2, head_dim = 3, width = heads * head_dim;
  const Tensor qkv = random_tensor(context, {batch, time, 3 * width}, DType::F32, 1);
  const std::vector<float> whole = ops::attention(qkv, {.heads = heads}).to_vector<float>();
  Tensor k = Tensor::full(context, {batch, 9, heads, head_dim}, DType::F32, 77.0);
  Tensor v = Tensor::full(context, {batch, 9, heads, head_dim}, DType::F32, 77.0);
  const std::uint64_t version = k.storage()->version();
  std::int64_t past = 0;
  for (const std::int64_t count : {4, 1, 1, 1}) {
    const Tensor out =
        ops::cached_attention(slice_time(qkv, past, past + count), {.heads = heads}, k, v, past);
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t i = 0; i < count * width; ++i)
        CHECK(out.data<float>()[b * count * width + i] ==
              doctest::Approx(whole[static_cast<std::size_t>((b * time + past) * width + i)])
                  .epsilon(1e-5));
    past += count;
  }
  CHECK(k.storage()->version() > version);
  CHECK(k.data<float>()[7 * width] == 77.0F);
}

// Rows [begin, end) of x [B, T, H, D].
Tensor slice_heads(const Tensor& x, std::int64_t begin, std::int64_t end) {
  const Tensor rows = slice_time(
      x.alias({x.dim(0), x.dim(1), x.dim(2) * x.dim(3)}, {x.strides()[0], x.strides()[1], 1}, 0),
      begin, end);
  return rows.alias({x.dim(0), end - begin, x.dim(2), x.dim(3)},
                    {(end - begin) * x.strides()[1], x.strides()[1], x.strides()[2], 1}, 0);
}

TEST_CASE("cached_attention: variants equal attention, packed and separate") {
  const auto context = Context::create();
  const std::int64_t batch = 2, time = 9, heads = 4, kv_heads = 2, head_dim = 3;
  const std::int64_t width = heads * head_dim;
  const Tensor qkv =
      random_tensor(context, {batch, time, (heads + 2 * kv_heads) * head_dim}, DType::F32, 1);
  for (const AttentionOptions& options : variants(context, batch, time, heads, kv_heads, true))
    for (const bool separate : {false, true}) {
      CAPTURE(text_of(options));
      CAPTURE(separate);
      const std::vector<float> whole = ops::attention(qkv, options).to_vector<float>();
      const Tensor k = Tensor::full(context, {batch, 11, kv_heads, head_dim}, DType::F32, 77.0);
      const Tensor v = Tensor::full(context, {batch, 11, kv_heads, head_dim}, DType::F32, 77.0);
      const auto [qs, ks, vs] = parts_of(qkv, options);
      std::int64_t past = 0;
      for (const std::int64_t count : {2, 4, 1, 1, 1}) {
        const std::int64_t end = past + count;
        AttentionOptions step = options;
        if (options.documents.defined()) {  // of the tokens so far
          std::vector<std::int32_t> ids;
          for (std::int64_t b = 0; b < batch; ++b)
            for (std::int64_t t = 0; t < end; ++t)
              ids.push_back(options.documents.data<std::int32_t>()[b * time + t]);
          step.documents = Tensor::from<std::int32_t>(context, {batch, end}, ids);
        }
        const Tensor out =
            separate ? ops::cached_attention(slice_heads(qs, past, end), slice_heads(ks, past, end),
                                             slice_heads(vs, past, end), step, k, v, past)
                     : ops::cached_attention(slice_time(qkv, past, end), step, k, v, past);
        REQUIRE(out.shape() == Shape{batch, count, width});
        for (std::int64_t b = 0; b < batch; ++b)
          for (std::int64_t i = 0; i < count * width; ++i)
            CHECK(out.data<float>()[b * count * width + i] ==
                  doctest::Approx(whole[at((b * time + past) * width + i)]).epsilon(1e-5));
        past = end;
      }
      CHECK(k.data<float>()[9 * kv_heads * head_dim] == 77.0F);
    }
}

TEST_CASE("cached_attention: a window does not read the keys before it") {
  const auto context = Context::create();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor k = Tensor::full(context, {1, 9, 1, 2}, DType::F32, 0.5);
  for (int i = 0; i < 5 * 2; ++i) k.data<float>()[i] = static_cast<float>(nan);
  const Tensor qkv = random_tensor(context, {1, 1, 6}, DType::F32, 1);
  for (const double value :
       values_of(ops::cached_attention(qkv, {.heads = 1, .window = 3}, k, k, 7)))
    CHECK(std::isfinite(value));
}

TEST_CASE("cached_attention: refuses invalid arguments") {
  const auto context = Context::create();
  Tensor qkv = random_tensor(context, {1, 2, 12}, DType::F32, 1);
  const Tensor cache = Tensor::full(context, {1, 4, 2, 2}, DType::F32, 0.0);
  CHECK_THROWS_WITH_AS(ops::cached_attention(qkv, {.heads = 2}, cache, cache, 3),
                       doctest::Contains("3 past and 2 new tokens do not fit"), InvalidArgument);
  CHECK_THROWS_AS(ops::cached_attention(qkv, {.heads = 2}, cache, cache, -1), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, {.heads = 2}, cache,
                            Tensor::full(context, {1, 4, 1, 4}, DType::F32, 0.0), 0),
      doctest::Contains("cache_v must have shape [1, 4, 2, 2], got [1, 4, 1, 4]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, {.heads = 2}, cache,
                            Tensor::full(context, {1, 5, 2, 2}, DType::F32, 0.0), 0),
      doctest::Contains("cache_k has shape [1, 4, 2, 2], cache_v [1, 5, 2, 2]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, {.heads = 2}, convert(cache, DType::F64), cache, 0),
      doctest::Contains("cache_k must have dtype f32, got f64"), InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, {.heads = 2, .causal = false}, cache, cache, 0),
      doctest::Contains("causal must be true, because the cache holds earlier tokens alone"),
      InvalidArgument);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(qkv, {.heads = 2, .documents = documents_of(context, 1, 2)}, cache,
                            cache, 1),
      doctest::Contains("documents must have shape [1, 3], got [1, 2]"), InvalidArgument);
  const Tensor q = random_tensor(context, {1, 2, 2, 2}, DType::F32, 1);
  const Tensor k = random_tensor(context, {1, 3, 2, 2}, DType::F32, 1);
  CHECK_THROWS_WITH_AS(
      ops::cached_attention(q, k, k, {}, cache, cache, 0),
      doctest::Contains("q has shape [1, 2, 2, 2], k [1, 3, 2, 2]; give the new tokens alone"),
      InvalidArgument);
  qkv.set_requires_grad(true);
  CHECK_THROWS_AS(ops::cached_attention(qkv, {.heads = 2}, cache, cache, 0), Unsupported);
  const NoGradGuard off(*context);
  CHECK(ops::cached_attention(qkv, {.heads = 2}, cache, cache, 0).shape() == Shape{1, 2, 4});
}

}  // namespace
}  // namespace tessera::test
