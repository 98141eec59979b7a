#include "core/tensor.h"

#include <doctest/doctest.h>

#include <array>

#include "core/base/memory.h"
#include "core/ops/elementwise.h"

namespace tessera {
namespace {

std::shared_ptr<Context> meta_context() {
  return Context::create({.device = {DeviceType::Meta, 0}});
}

Tensor counting(const std::shared_ptr<Context>& context, const Shape& shape) {
  std::vector<float> values(static_cast<std::size_t>(numel(shape)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  return Tensor::from<float>(context, shape, values);
}

TEST_CASE("values are written and read back") {
  const auto context = Context::create();
  const Tensor x = counting(context, {2, 3});
  CHECK(x.shape() == Shape{2, 3});
  CHECK(x.strides() == Strides{3, 1});
  CHECK(x.dtype() == DType::F32);
  CHECK(x.bytes() == 24);
  CHECK(x.to_vector<float>() == std::vector<float>{0, 1, 2, 3, 4, 5});
  CHECK(Tensor::full(context, {3}, DType::F64, 2.5).to_vector<double>() ==
        std::vector<double>{2.5, 2.5, 2.5});
  CHECK(Tensor::full(context, {1}, DType::BF16, -1.5).item() == -1.5);
  CHECK(Tensor::empty(context, {0, 4}, DType::F32).to_vector<float>().empty());
}

TEST_CASE("copies are handles to the same tensor") {
  const auto context = Context::create();
  const Tensor x = counting(context, {2});
  const Tensor y = x;  // NOLINT(performance-unnecessary-copy-initialization): under test
  y.data<float>()[0] = 7.0F;
  CHECK(x.data<float>()[0] == 7.0F);
  CHECK(x.impl() == y.impl());
}

TEST_CASE("misuse is reported with values") {
  const auto context = Context::create();
  const Tensor x = counting(context, {2, 3});
  CHECK_THROWS_WITH_AS(x.item(), doctest::Contains("[2, 3]"), InvalidArgument);
  CHECK_THROWS_WITH_AS(x.data<double>(), doctest::Contains("expected dtype f64, got f32"),
                       InvalidArgument);
  const std::array<float, 3> three{};
  CHECK_THROWS_WITH_AS(Tensor::from<float>(context, {2, 2}, std::span<const float>(three)),
                       doctest::Contains("needs 4 values, got 3"), InvalidArgument);
  CHECK_THROWS_AS(Tensor().shape(), InvalidArgument);
  CHECK_THROWS_AS(Tensor::empty(nullptr, {1}, DType::F32), InvalidArgument);
  CHECK_THROWS_AS(Tensor::empty(context, {-1}, DType::F32), InvalidArgument);
  CHECK_THROWS_AS(Tensor::empty(context, {std::int64_t{1} << 62}, DType::F32), InvalidArgument);
  Tensor tokens = Tensor::empty(context, {2}, DType::I32);
  CHECK_THROWS_WITH_AS(tokens.set_requires_grad(true), doctest::Contains("i32"), InvalidArgument);
}

TEST_CASE("a window shares the storage and must fit") {
  const auto context = Context::create();
  auto storage = Storage::allocate(context, 40, MemoryCategory::Parameters, "flat");
  Tensor all = Tensor::window(storage, 0, {10}, DType::F32);
  for (int i = 0; i < 10; ++i) all.data<float>()[i] = static_cast<float>(i);
  const Tensor part = Tensor::window(storage, 4, {2, 3}, DType::F32);
  CHECK(part.to_vector<float>() == std::vector<float>{4, 5, 6, 7, 8, 9});
  CHECK_THROWS_WITH_AS(Tensor::window(storage, 5, {2, 3}, DType::F32),
                       doctest::Contains("at element 5 does not fit into a storage of 10 elements"),
                       InvalidArgument);
  CHECK_THROWS_AS(Tensor::window(storage, -1, {1}, DType::F32), InvalidArgument);
  CHECK_THROWS_AS(Tensor::window(storage, 0, {6}, DType::F64), InvalidArgument);
}

TEST_CASE("an alias is strided and must stay inside") {
  const auto context = Context::create();
  const Tensor x = counting(context, {2, 3});
  const Tensor column = x.alias({2}, {3}, 1);
  CHECK_FALSE(column.is_contiguous());
  CHECK(column.data<float>()[3] == 4.0F);
  CHECK_THROWS_WITH_AS(column.to_vector<float>(), doctest::Contains("[3]"), InvalidArgument);
  CHECK_THROWS_AS(x.alias({3}, {3}, 1), InvalidArgument);
  CHECK_THROWS_AS(x.alias({2}, {-1}, 3), InvalidArgument);
  CHECK_THROWS_AS(x.alias({2}, {1, 1}, 0), InvalidArgument);
  CHECK(x.alias({0, 9}, {9, 1}, 6).numel() == 0);
}

TEST_CASE("an unbound parameter has a shape; bind gives it memory and keeps its identity") {
  const auto context = Context::create();
  Tensor weight = Tensor::unbound({2, 2}, DType::F32);
  weight.set_requires_grad(true);
  CHECK(weight.shape() == Shape{2, 2});
  CHECK_THROWS_WITH_AS(weight.view(), doctest::Contains("[2, 2] was used before it had memory"),
                       InvalidArgument);
  CHECK_THROWS_AS(weight.context(), InvalidArgument);

  Tensor same = weight;
  auto storage = Storage::allocate(context, 64, MemoryCategory::Gathered, "unit");
  weight.bind(storage, 4, DType::BF16);
  CHECK(same.dtype() == DType::BF16);
  CHECK(same.requires_grad());
  CHECK(same.view().data == static_cast<std::byte*>(storage->data()) + 8);
  CHECK_THROWS_AS(weight.bind(storage, 14, DType::F32), InvalidArgument);
  CHECK_THROWS_AS(weight.bind(nullptr, 0, DType::F32), InvalidArgument);
  CHECK_THROWS_WITH_AS(weight.bind(storage, 0, DType::I32), doctest::Contains("i32"),
                       InvalidArgument);
}

TEST_CASE("reading released memory throws an error that names its owner") {
  const auto context = Context::create();
  auto storage = Storage::allocate(context, 16, MemoryCategory::Gathered, "h.3");
  const Tensor weight = Tensor::window(storage, 0, {4}, DType::F32);
  storage->release();
  CHECK(weight.shape() == Shape{4});
  CHECK_THROWS_WITH_AS(weight.view(), doctest::Contains("h.3"), InternalError);
}

TEST_CASE("a gradient buffer must match the leaf") {
  const auto context = Context::create();
  Tensor weight = counting(context, {4});
  weight.set_requires_grad(true);
  CHECK_FALSE(weight.grad().defined());
  CHECK_THROWS_WITH_AS(weight.set_grad_buffer(Tensor::empty(context, {5}, DType::F32)),
                       doctest::Contains("must have shape [4], got [5]"), InvalidArgument);
  CHECK_THROWS_AS(weight.set_grad_buffer(Tensor::empty(context, {4}, DType::I32)), InvalidArgument);
  const Tensor wide = Tensor::empty(context, {8}, DType::F32);
  CHECK_THROWS_AS(weight.set_grad_buffer(wide.alias({4}, {2}, 0)), InvalidArgument);
  const Tensor result = ops::add(weight, weight);
  CHECK_THROWS_AS(Tensor(result).set_grad_buffer(Tensor()), InvalidArgument);
  CHECK_THROWS_AS(Tensor(result).set_requires_grad(false), InvalidArgument);
  CHECK_THROWS_AS(Tensor(result).bind(wide.storage(), 0, DType::F32), InvalidArgument);
}

TEST_CASE("contexts do not mix") {
  const auto one = Context::create(), other = meta_context();
  const Tensor a = counting(one, {2}), b = Tensor::empty(other, {2}, DType::F32);
  CHECK_THROWS_WITH_AS(common_context("mix", {&a, &b}),
                       doctest::Contains("mix: tensors of different contexts (cpu and meta)"),
                       InvalidArgument);
  const Tensor none;
  CHECK(common_context("mix", {&none, &a}) == one);
  CHECK_THROWS_AS(common_context("mix", {&none}), InvalidArgument);
}

TEST_CASE("a meta tensor has no contents, and its bytes are booked") {
  const auto context = meta_context();
  const Tensor x = Tensor::full(context, {1024, 1024, 1024}, DType::F32, 1.0);
  CHECK(x.view().data == nullptr);
  CHECK(context->ledger().total().current == std::int64_t{4} << 30);
  CHECK_THROWS_WITH_AS(x.to_vector<float>(), doctest::Contains("meta"), Unsupported);
  CHECK_THROWS_AS(Tensor::full(context, {1}, DType::F32, 1.0).item(), Unsupported);
  const std::vector<float> values(3);
  CHECK(Tensor::from<float>(context, {3}, values).numel() == 3);
}

}  // namespace
}  // namespace tessera
