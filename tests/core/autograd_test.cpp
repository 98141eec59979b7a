#include "core/autograd/autograd.h"

#include <doctest/doctest.h>

#include "core/base/memory.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "core/ops/view.h"
#include "kernels/elementwise.h"
#include "tests/support/gradcheck.h"
#include "tests/support/recorded.h"

namespace tessera::test {
namespace {

using autograd::InputGradients;
using Values = std::vector<double>;

Tensor vector_of(const std::shared_ptr<Context>& context, const Values& values) {
  return Tensor::from<double>(context, {static_cast<std::int64_t>(values.size())}, values);
}

Tensor leaf(const std::shared_ptr<Context>& context, const Values& values) {
  Tensor x = vector_of(context, values);
  x.set_requires_grad(true);
  return x;
}

// y = factor * x, as a user-defined operation.
Tensor scaled(const Tensor& x, double factor) {
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  kernels::cast(*x.context(), x.view(), {y.view(), false, true}, factor);
  autograd::record("scaled", y, {x}, [factor](const Tensor& grad_y, InputGradients& into) {
    kernels::cast(*grad_y.context(), grad_y.view(), into.target(0), factor);
  });
  return y;
}

// y = x, with a backward that keeps x alive.
Tensor keeping(const Tensor& x) {
  Tensor y = scaled(x.detach(), 1.0);
  autograd::record("keeping", y, {x},
                   [x = autograd::SavedTensor(x)](const Tensor& grad_y, InputGradients& into) {
                     x.get("keeping");
                     into.pass(0, grad_y);
                   });
  return y;
}

TEST_CASE("a leaf accumulates its gradient over passes until it is zeroed") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  autograd::backward(scaled(x, 3.0), vector_of(context, {1, 10}));
  CHECK(values_of(x.grad()) == Values{3, 30});
  autograd::backward(scaled(x, 2.0), vector_of(context, {1, 1}));
  CHECK(values_of(x.grad()) == Values{5, 32});
  x.zero_grad();
  CHECK_FALSE(x.grad().defined());
  autograd::backward(scaled(x, 2.0), vector_of(context, {1, 1}));
  CHECK(values_of(x.grad()) == Values{2, 2});
}

TEST_CASE("a gradient buffer is overwritten, then accumulated into, and survives zero_grad") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  Tensor buffer = Tensor::full(context, {2}, DType::F32, 99.0);
  x.set_grad_buffer(buffer);
  CHECK_FALSE(x.grad().defined());
  autograd::backward(scaled(x, 3.0), vector_of(context, {1, 2}));
  CHECK(buffer.to_vector<float>() == std::vector<float>{3, 6});
  autograd::backward(scaled(x, 3.0), vector_of(context, {1, 2}));
  CHECK(buffer.to_vector<float>() == std::vector<float>{6, 12});
  CHECK(x.grad().impl() == buffer.impl());
  x.zero_grad();
  CHECK(buffer.to_vector<float>() == std::vector<float>{6, 12});
  autograd::backward(scaled(x, 1.0), vector_of(context, {1, 2}));
  CHECK(buffer.to_vector<float>() == std::vector<float>{1, 2});
  x.set_grad_buffer(Tensor());
  autograd::backward(scaled(x, 1.0), vector_of(context, {5, 5}));
  CHECK(x.grad().dtype() == DType::F64);
  CHECK(buffer.to_vector<float>() == std::vector<float>{1, 2});
}

TEST_CASE("a bf16 leaf's gradient is f32 unless its buffer has another dtype") {
  const auto context = Context::create();
  Tensor x = Tensor::full(context, {3}, DType::BF16, 1.0);
  x.set_requires_grad(true);
  const Tensor one = Tensor::full(context, {3}, DType::BF16, 1.0);
  autograd::backward(scaled(x, 256.0), one);
  autograd::backward(scaled(x, 1.0), one);
  CHECK(x.grad().dtype() == DType::F32);
  CHECK(values_of(x.grad()) == Values{257, 257, 257});  // bf16 would give 256
}

TEST_CASE(
    "a residual addition shares its gradient; writes through one input do not reach the other") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  // Both inputs of the addition receive the same gradient tensor; a second user then adds to a's.
  const Tensor a = scaled(x, 1.0), b = scaled(x, 10.0);
  const Tensor more = scaled(a, 100.0);
  const Tensor sum = ops::add(ops::add(a, b), more);
  const Tensor seed = vector_of(context, {1, 2});
  autograd::backward(sum, seed);
  CHECK(values_of(x.grad()) == Values{111, 222});
  CHECK(values_of(seed) == Values{1, 2});
}

TEST_CASE("a gradient that an operation passes on unchanged is copied before it is written to") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1}), y = leaf(context, {1});
  const Tensor a = scaled(x, 1.0), b = scaled(y, 1.0);
  // The order of recording makes both a and b accumulate.
  const Tensor a2 = scaled(a, 2.0), b3 = scaled(b, 3.0);
  const Tensor ab = ops::add(a, b);
  autograd::backward(ops::add(ab, ops::add(a2, b3)), vector_of(context, {1}));
  CHECK(values_of(x.grad()) == Values{3});
  CHECK(values_of(y.grad()) == Values{4});
}

TEST_CASE("a tensor that is used twice in one operation") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  autograd::backward(ops::add(x, x), vector_of(context, {1, 1}));
  CHECK(values_of(x.grad()) == Values{2, 2});
  x.zero_grad();
  const Tensor h = scaled(x, 3.0);
  autograd::backward(ops::add(h, h), vector_of(context, {1, 5}));
  CHECK(values_of(x.grad()) == Values{6, 30});

  // Both destinations are requested before either is written; one is written, one passed on.
  for (const bool via_node : {false, true}) {
    for (const bool pass_second : {false, true}) {
      CAPTURE(via_node);
      CAPTURE(pass_second);
      x.zero_grad();
      const Tensor in = via_node ? scaled(x, 1.0) : x;
      Tensor y = Tensor::full(context, {2}, DType::F64, 0.0);
      autograd::record("twice", y, {in, in}, [&](const Tensor& grad_y, InputGradients& into) {
        const GradientView first = into.target(0);
        if (pass_second) {
          into.pass(1, grad_y);
        } else {
          const GradientView second = into.weight_target(1);
          kernels::cast(*context, grad_y.view(), second, 1.0);
        }
        kernels::cast(*context, grad_y.view(), first, 4.0);
      });
      autograd::backward(y, vector_of(context, {1, 2}));
      CHECK(values_of(x.grad()) == Values{5, 10});
    }
  }
}

TEST_CASE("an operation with several outputs gets their gradients together") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  std::vector<bool> reached;
  const auto twofold = [&](const Tensor& in) {
    std::vector<Tensor> y = {Tensor::full(context, {2}, DType::F64, 1.0),
                             Tensor::full(context, {2}, DType::F64, 2.0)};
    autograd::record("twofold", y, {in}, [&](std::span<const Tensor> grads, InputGradients& into) {
      reached = {grads[0].defined(), grads[1].defined()};
      const Tensor& first = grads[0].defined() ? grads[0] : grads[1];
      into.pass(0, reached[0] && reached[1] ? ops::sub(first, grads[1]) : first);
    });
    return y;
  };
  std::vector<Tensor> y = twofold(x);
  autograd::backward(ops::add(scaled(y[0], 10.0), ops::add(y[1], y[1])),
                     vector_of(context, {1, 2}));
  CHECK(values_of(x.grad()) == Values{8, 16});
  CHECK(reached == std::vector{true, true});
  x.zero_grad();
  y = twofold(scaled(x, 3.0));
  autograd::backward(scaled(y[1], 10.0), vector_of(context, {1, 2}));
  CHECK(values_of(x.grad()) == Values{30, 60});
  CHECK(reached == std::vector{false, true});
  CHECK_THROWS_AS(autograd::backward(y[0], vector_of(context, {1, 2})), InvalidArgument);
}

TEST_CASE("tied weights: one leaf in several operations") {
  const auto context = Context::create();
  Tensor w = random_tensor(context, {3, 3}, DType::F64, 1).set_requires_grad(true);
  const Tensor x = random_tensor(context, {2, 3}, DType::F64, 2);
  const auto twice = [&](const std::vector<Tensor>& in) {
    return ops::linear(ops::linear(x, in[0], {}), in[0], {}, ops::WeightLayout::InOut);
  };
  CHECK(gradcheck(twice, {w}) == "");
  const auto itself = [&](const std::vector<Tensor>& in) {
    return ops::linear(in[0], in[0], {});  // both input and weight
  };
  CHECK(gradcheck(itself, {w}) == "");
}

TEST_CASE("a deep graph of diamonds: 2^40 paths, one visit per node") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1});
  Tensor y = scaled(x, 1.0);
  for (int i = 0; i < 40; ++i) y = ops::add(scaled(y, 1.0), y);
  autograd::backward(y);
  CHECK(values_of(x.grad()) == Values{static_cast<double>(std::int64_t{1} << 40)});
}

TEST_CASE("a chain of 200,000 nodes is traversed and destroyed without recursion") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1});
  const auto chain = [&] {
    Tensor y = x;
    for (int i = 0; i < 200'000; ++i) y = recorded(y);
    return y;
  };
  autograd::backward(chain());
  CHECK(values_of(x.grad()) == Values{1});
  chain();  // destroyed without backward
  CHECK(values_of(x.grad()) == Values{1});
}

TEST_CASE("inputs without requires_grad get no gradient and are not visited") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1});
  const Tensor constant = vector_of(context, {5});
  const Tensor frozen = scaled(constant, 2.0);
  CHECK_FALSE(frozen.requires_grad());
  CHECK(frozen.is_leaf());
  autograd::backward(ops::add(scaled(x, 2.0), frozen));
  CHECK(values_of(x.grad()) == Values{2});
  CHECK_FALSE(constant.grad().defined());
  CHECK_FALSE(frozen.grad().defined());
}

TEST_CASE("a leaf as the root") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  autograd::backward(x, vector_of(context, {7, 8}));
  autograd::backward(x, vector_of(context, {1, 1}));
  CHECK(values_of(x.grad()) == Values{8, 9});
  // Uses the leaf's own gradient as the root's.
  autograd::backward(ops::add(scaled(x, 1.0), x), x.grad());
  CHECK(values_of(x.grad()) == Values{24, 27});
}

TEST_CASE("backward refuses invalid roots and gradients") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  const Tensor y = scaled(x, 1.0);
  CHECK_THROWS_WITH_AS(autograd::backward(y), doctest::Contains("[2]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(autograd::backward(y, vector_of(context, {1, 2, 3})),
                       doctest::Contains("must be [2] f64, got [3] f64"), InvalidArgument);
  CHECK_THROWS_AS(autograd::backward(y, Tensor::full(context, {2}, DType::F32, 1.0)),
                  InvalidArgument);
  const Tensor strided = Tensor::full(context, {4}, DType::F64, 1.0).alias({2}, {2}, 0);
  CHECK_THROWS_AS(autograd::backward(y, strided), InvalidArgument);
  CHECK_THROWS_AS(autograd::backward(vector_of(context, {1})), InvalidArgument);
  CHECK_THROWS_AS(autograd::backward(Tensor()), InvalidArgument);
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("a second backward over a freed subgraph is refused before any gradient is written") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1}), z = leaf(context, {1});
  const Tensor shared = scaled(x, 2.0);
  const Tensor one = scaled(shared, 1.0), other = ops::add(shared, z);
  autograd::backward(one);
  CHECK(values_of(x.grad()) == Values{2});
  CHECK_THROWS_WITH_AS(autograd::backward(one), doctest::Contains("a second time"),
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(autograd::backward(other), doctest::Contains("scaled"), InvalidArgument);
  CHECK(values_of(x.grad()) == Values{2});
  CHECK_FALSE(z.grad().defined());
}

TEST_CASE("nothing is recorded under NoGradGuard or during backward") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1});
  {
    const NoGradGuard off(*context);
    const Tensor y = scaled(x, 2.0);
    CHECK_FALSE(y.requires_grad());
    CHECK_FALSE(autograd::needs_grad({&x}));
  }
  CHECK(autograd::needs_grad({&x}));
  bool was_enabled = true;
  const Tensor y = recorded(scaled(x, 2.0), [&] { was_enabled = context->grad_enabled(); });
  autograd::backward(y);
  CHECK_FALSE(was_enabled);
  CHECK(context->grad_enabled());
}

TEST_CASE("grad mode is restored when backward throws") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1});
  const Tensor y = recorded(x, [] { throw Unsupported("no"); });
  CHECK_THROWS_AS(autograd::backward(y), Unsupported);
  CHECK(context->grad_enabled());
}

namespace {

struct MarkedScope final : autograd::Scope {
  MarkedScope(std::vector<std::string>& calls, std::string name)
      : calls_(calls), name_(std::move(name)) {}
  void before_backward() override { calls_.push_back("+" + name_); }
  void after_backward() override { calls_.push_back("-" + name_); }

 private:
  std::vector<std::string>& calls_;
  std::string name_;
};

}  // namespace

TEST_CASE("backward enters and leaves scopes in reverse order, nested ones within their parents") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1}), w = leaf(context, {1});
  std::vector<std::string> calls;
  const auto open = [&](const char* name) { return std::make_shared<MarkedScope>(calls, name); };
  const auto mark = [&](const char* name) { return [&calls, name] { calls.emplace_back(name); }; };
  const auto first = open("first"), second = open("second"), inner = open("inner");
  const auto unused = open("unused"), empty = open("empty");
  Tensor h = vector_of(context, {1});  // needs no gradient
  {
    const autograd::ScopeGuard guard(*context, first);
    h = ops::add(scaled(h, 1.0), w);
  }
  h = recorded(h, mark("between"));
  {
    const autograd::ScopeGuard guard(*context, second);
    h = recorded(h, mark("in second"));
    Tensor side;
    {
      const autograd::ScopeGuard nested(*context, inner);
      side = recorded(scaled(h, 2.0), mark("in inner"));
    }
    h = recorded(ops::add(ops::add(h, x), side), mark("end of second"));
  }
  {
    const autograd::ScopeGuard guard(*context, unused);
    scaled(h, 1.0);
  }
  { const autograd::ScopeGuard guard(*context, empty); }
  CHECK(context->scope() == nullptr);
  CHECK(inner->operations() == 2);
  CHECK(second->operations() == 6);
  CHECK(unused->operations() == 1);
  CHECK(empty->operations() == 0);
  autograd::backward(h);
  CHECK(calls == std::vector<std::string>{"+second", "end of second", "+inner", "in inner",
                                          "-inner", "in second", "-second", "between", "+first",
                                          "-first"});
  CHECK(values_of(w.grad()) == Values{3});
}

TEST_CASE(
    "whatever completes a gradient may sum it over rows for the operation that wants the sums") {
  const auto context = Context::create();
  const auto rows_of = [&](const Values& values) {
    return Tensor::from<double>(context, {2, 2}, values);
  };
  Tensor x = rows_of({1, 2, 3, 5}), weight = leaf(context, {2, 3}), bias = leaf(context, {1, 1});
  x.set_requires_grad(true);
  // Gradient of h = x, and the sums that h's backward gets.
  Tensor grad, sums;
  const auto wanting = [&](bool wants = true) {
    Tensor h = rows_of({1, 2, 3, 5});
    autograd::record("wanting", h, {x}, [&](const Tensor& grad_h, InputGradients& into) {
      grad = grad_h;
      sums = into.gradient_sums();
      into.pass(0, grad_h);
    });
    if (wants) autograd::want_gradient_sums(h);
    return h;
  };
  const auto run = [&](const Tensor& y) {
    grad = sums = Tensor();
    autograd::backward(y, rows_of({1, 10, 100, 1000}));
  };
  const auto check_sums = [&] {
    REQUIRE(sums.defined());
    const Values of = values_of(grad), got = values_of(sums);
    CHECK(got[0] == doctest::Approx(of[0] + of[2]));
    CHECK(got[1] == doctest::Approx(of[1] + of[3]));
  };
  const auto norm = [&](const Tensor& h) { return ops::layer_norm(h, weight, bias, 1e-5); };

  run(norm(wanting()));
  check_sums();
  run(ops::rms_norm(wanting(), weight, 1e-5));
  check_sums();
  {  // the residual's part comes first
    const Tensor h = wanting();
    run(ops::add(norm(h), h));
    check_sums();
  }
  {  // through the addition that is part of a norm
    const Tensor h = wanting(), other = rows_of({4, 3, 1, 0});
    const auto [sum, y] = ops::add_layer_norm(other, h, weight, bias, 1e-5);
    run(ops::add(sum, y));
    check_sums();
  }
  {  // the norm's part comes first
    const Tensor h = wanting(), other = scaled(h, 2.0);
    run(ops::add(other, norm(h)));
    CHECK_FALSE(sums.defined());
  }
  {  // an addition, whose sums are known, passes its gradient on after another part
    const Tensor h = wanting();
    const auto [sum, y] = ops::add_layer_norm(h, rows_of({4, 3, 1, 0}), weight, bias, 1e-5);
    run(ops::add(y, scaled(h, 2.0)));
    CHECK_FALSE(sums.defined());
  }
  {  // twice an input of one operation
    const Tensor h = wanting();
    run(ops::add_layer_norm(h, h, weight, bias, 1e-5).y);
    CHECK_FALSE(sums.defined());
  }
  run(norm(wanting(false)));
  CHECK_FALSE(sums.defined());
  run(scaled(wanting(), 2.0));
  CHECK_FALSE(sums.defined());
}

TEST_CASE("a node that receives no gradient runs on zeros, and calls its backward") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  int called = 0;
  const Tensor h = recorded(x, [&] { ++called; });
  Tensor y = vector_of(context, {0});
  autograd::record("silent", y, {h}, [](const Tensor&, InputGradients&) {});
  autograd::backward(y);
  CHECK(called == 1);
  CHECK(values_of(x.grad()) == Values{0, 0});
}

TEST_CASE("a saved tensor that was modified in place is refused, with operation and shape") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  const Tensor y = keeping(x);
  const std::array<double, 2> other = {3, 4};
  x.copy_from_host(other.data());
  CHECK_THROWS_WITH_AS(autograd::backward(y, vector_of(context, {1, 1})),
                       doctest::Contains("keeping: a tensor of shape [2]"), InvalidArgument);
}

TEST_CASE("a saved tensor may be released and restored") {
  const auto context = Context::create();
  auto storage = Storage::allocate(context, 16, MemoryCategory::Gathered, "unit");
  Tensor w = Tensor::unbound({2}, DType::F64);
  w.bind(storage, 0, DType::F64);
  w.set_requires_grad(true);
  const Tensor y = keeping(w), z = keeping(w);
  storage->release();
  CHECK_THROWS_WITH_AS(w.view(), doctest::Contains("unit"), InternalError);
  storage->materialize();
  autograd::backward(y, vector_of(context, {1, 2}));
  CHECK(values_of(w.grad()) == Values{1, 2});
  w.bind(Storage::allocate(context, 16, MemoryCategory::Gathered, "unit"), 0, DType::F64);
  CHECK_THROWS_WITH_AS(autograd::backward(z, vector_of(context, {1, 2})),
                       doctest::Contains("bound to other memory"), InvalidArgument);
}

TEST_CASE("requesting a leaf's gradient buffer counts as an accumulation") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  const GradientView place = autograd::leaf_target(x);
  CHECK(place);
  CHECK_FALSE(place.accumulate);
  kernels::fill(*context, place.view, 4.0);
  CHECK(values_of(x.grad()) == Values{4, 4});
  CHECK(autograd::leaf_target(x).accumulate);
  CHECK_FALSE(autograd::leaf_target(vector_of(context, {1})));
  CHECK_THROWS_WITH_AS(autograd::leaf_target(scaled(x, 1.0)), doctest::Contains("[2]"),
                       InvalidArgument);
}

TEST_CASE("backward functions that break the contract are reported") {
  const auto context = Context::create();
  Tensor x = leaf(context, {1, 2});
  const auto run = [&](const autograd::Backward& backward) {
    Tensor y = vector_of(context, {0, 0});
    autograd::record("broken", y, {x}, backward);
    autograd::backward(y, vector_of(context, {1, 1}));
  };
  CHECK_THROWS_WITH_AS(
      run([](const Tensor&, InputGradients& into) { into.target(1); }),
      doctest::Contains("broken: its backward requests the gradient of input 1, but "
                        "record() was given 1 inputs"),
      InvalidArgument);
  CHECK_THROWS_WITH_AS(run([&](const Tensor&, InputGradients& into) {
                         into.pass(0, vector_of(context, {1, 2, 3}));
                       }),
                       doctest::Contains("its backward must give input 0 a dense gradient of the "
                                         "input's shape [2], got [3]"),
                       InvalidArgument);
  Tensor y = scaled(x, 1.0);
  CHECK_THROWS_AS(autograd::record("again", y, {x}, [](const Tensor&, InputGradients&) {}),
                  InvalidArgument);
}

TEST_CASE("memory: saved tensors and gradients are freed during backward, and none remain") {
  const auto context = Context::create();
  const std::int64_t n = 1 << 12;
  const auto bytes = static_cast<std::int64_t>(n * sizeof(double));
  {
    Tensor x = Tensor::full(context, {n}, DType::F64, 1.0);
    x.set_requires_grad(true);
    const auto chain = [&] {
      Tensor y = x;
      for (int i = 0; i < 20; ++i) y = keeping(scaled(y, 1.0));
      return y;
    };
    context->ledger().reset_peaks();
    Tensor y = chain();
    const std::int64_t after_forward = context->ledger().total().current;
    CHECK(after_forward >= 20 * bytes);
    Tensor seed = Tensor::full(context, {n}, DType::F64, 1.0);
    context->ledger().reset_peaks();
    autograd::backward(y, seed);
    seed = Tensor();
    // At most two gradients exist at a time on top of forward's memory, not one per node.
    CHECK(context->ledger().total().peak <= after_forward + 5 * bytes);
    // x, y and x's gradient: y is still referenced, its graph is freed.
    CHECK(context->ledger().total().current == 3 * bytes);
    y = chain();
    CHECK(context->ledger().total().current > 10 * bytes);
    y = Tensor();
    CHECK(context->ledger().total().current == 2 * bytes);
    x.zero_grad();
    CHECK(context->ledger().total().current == bytes);
  }
  CHECK(context->ledger().total().current == 0);
}

}  // namespace
}  // namespace tessera::test
