// Captured work, on the CUDA kernels as fibers.
#include "core/base/replay.h"

#include <doctest/doctest.h>

#include <utility>

#include "core/autograd/autograd.h"
#include "core/base/error.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "kernels/elementwise.h"

namespace tessera {
namespace {

std::shared_ptr<Context> device() {
  return Context::create({.device = {DeviceType::CUDA, 0}, .plugin = TESSERA_FIBER_PLUGIN});
}

void set(const Tensor& x, std::vector<float> values) { x.copy_from_host(values.data()); }

TEST_CASE("captured work runs when it is told to, on what its inputs hold then") {
  const auto context = device();
  const Tensor x = Tensor::empty(context, {2}, DType::F32);
  Tensor y;
  {
    Replay replay(context, [&] { y = ops::add(ops::add(x, x), x); });
    CHECK(replay.memory_bytes() > 0);
    CHECK(context->ledger().usage(MemoryCategory::Workspace).current ==
          static_cast<std::int64_t>(replay.memory_bytes()));
    set(x, {1, 2});
    replay.run();
    CHECK(y.to_vector<float>() == std::vector<float>{3, 6});
    // What is made in between does not touch its memory.
    const Tensor other = Tensor::full(context, {2}, DType::F32, 9.0);
    set(x, {-1, 0.5F});
    replay.run();
    replay.run();
    CHECK(y.to_vector<float>() == std::vector<float>{-3, 1.5F});
    CHECK(other.to_vector<float>() == std::vector<float>{9, 9});
  }
  CHECK(y.to_vector<float>() == std::vector<float>{-3, 1.5F});
  CHECK(context->ledger().usage(MemoryCategory::Workspace).current == 0);
}

TEST_CASE("work that runs at other times shares memory; the ledger counts it once") {
  const auto context = device();
  const Tensor x = Tensor::empty(context, {2}, DType::F32);
  const Tensor sum = Tensor::empty(context, {2}, DType::F32);
  const auto adds = [&](int times) {
    return [&, times] {
      Tensor y = x;
      for (int i = 1; i < times; ++i) y = ops::add(y, x);
      kernels::cast(*context, y.view(), {sum.view(), false, true});
    };
  };
  auto one = std::make_unique<Replay>(context, adds(3));
  auto two = std::make_unique<Replay>(context, adds(4), one.get());
  CHECK(two->memory_bytes() == 0);
  CHECK(context->ledger().usage(MemoryCategory::Workspace).current ==
        static_cast<std::int64_t>(one->memory_bytes()));
  set(x, {1, 2});
  one->run();
  CHECK(sum.to_vector<float>() == std::vector<float>{3, 6});
  one.reset();  // its memory stays
  two->run();
  CHECK(sum.to_vector<float>() == std::vector<float>{4, 8});
  const auto elsewhere = device();
  CHECK_THROWS_AS(Replay(
                      elsewhere, [] {}, two.get()),
                  InternalError);
}

TEST_CASE("a captured backward pass writes the gradients of its leaves again") {
  const auto context = device();
  Tensor weight = Tensor::full(context, {3, 2}, DType::F32, 0.5);
  weight.set_requires_grad(true);
  const Tensor x = Tensor::full(context, {1, 2}, DType::F32, 1.0);
  const Tensor seed = Tensor::full(context, {1, 3}, DType::F32, 1.0);
  const auto pass = [&] {
    weight.zero_grad();
    autograd::backward(ops::linear(x, weight, {}), seed);
  };
  pass();
  CHECK(weight.grad().to_vector<float>() == std::vector<float>(6, 1.0F));
  Replay replay(context, pass);
  CHECK(weight.grad().defined());
  set(x, {2, -1});
  replay.run();
  CHECK(weight.grad().to_vector<float>() == std::vector<float>{2, -1, 2, -1, 2, -1});
}

TEST_CASE("what the host does between parts is done at its place of each run") {
  const auto context = device();
  const Tensor x = Tensor::full(context, {2}, DType::F32, 1.0);
  std::vector<float> seen;
  const auto look = [&](const Tensor& t) {
    Replay::between(*context, [&seen, t] {
      const auto values = t.to_vector<float>();
      seen.insert(seen.end(), values.begin(), values.end());
    });
  };
  look(x);  // nothing is captured
  CHECK(std::exchange(seen, {}) == std::vector<float>{1, 1});

  bool fails = false;
  Tensor y;
  const auto work = [&] {
    Replay::between(*context, [&] { set(x, {3, 4}); });
    const Tensor twice = ops::add(x, x);
    look(twice);
    look(x);  // with nothing between the two
    Replay::between(*context, [&] { require<IoError>(!fails, "no"); });
    y = ops::add(twice, x);
  };
  const auto one = std::make_unique<Replay>(context, work);
  CHECK(context->capture() == nullptr);
  CHECK(seen.empty());
  CHECK(one->parts() == 2);
  CHECK(one->memory_bytes() > 0);
  const Tensor of_one = y;
  CHECK(Replay(context, work, one.get()).memory_bytes() == 0);
  y = of_one;
  for (int i = 0; i < 2; ++i) {
    set(x, {0, 0});
    one->run();
    CHECK(std::exchange(seen, {}) == std::vector<float>{6, 8, 3, 4});
    CHECK(y.to_vector<float>() == std::vector<float>{9, 12});
    set(y, {0, 0});
  }
  fails = true;
  CHECK_THROWS_AS(one->run(), IoError);
  CHECK(y.to_vector<float>() == std::vector<float>{0, 0});
  fails = false;
  one->run();
  CHECK(y.to_vector<float>() == std::vector<float>{9, 12});

  // A capture that fails leaves no part behind.
  seen.clear();
  CHECK_THROWS_AS(Replay(context,
                         [&] {
                           look(x);
                           ops::add(x, x).to_vector<float>();
                         }),
                  InternalError);
  CHECK(context->capture() == nullptr);
  CHECK(seen.empty());
  look(x);
  CHECK(seen == std::vector<float>{3, 4});
}

TEST_CASE("what cannot be captured is an error, and the context works on") {
  const auto context = device();
  const Tensor x = Tensor::full(context, {2}, DType::F32, 1.0);
  const auto reads = [&] { ops::add(x, x).to_vector<float>(); };
  CHECK_THROWS_AS(Replay(context, reads), InternalError);
  const auto writes = [&] { set(x, {5, 6}); };
  CHECK_THROWS_AS(Replay(context, writes), InternalError);
  const auto captures = [&] { const Replay inner(context, [] {}); };
  CHECK_THROWS_AS(Replay(context, captures), InternalError);
  CHECK(ops::add(x, x).to_vector<float>() == std::vector<float>{2, 2});

  const auto cpu = Context::create();
  CHECK_THROWS_WITH_AS(Replay(cpu, [] {}), "work of cpu cannot be captured; only a GPU's can",
                       Unsupported);
}

}  // namespace
}  // namespace tessera
