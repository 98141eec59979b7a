#include "core/tensor_print.h"

#include <doctest/doctest.h>

#include <sstream>

#include "tests/support/paths.h"

namespace tessera {
namespace {

TEST_CASE("tensors are made from nested braces") {
  const auto context = Context::create();
  const Tensor x = Tensor::from(context, {{1, 2}, {3, 4.5}, {5, 6}});
  CHECK(x.shape() == Shape{3, 2});
  CHECK(x.dtype() == DType::F32);
  CHECK(x.to_vector<float>() == std::vector<float>{1, 2, 3, 4.5, 5, 6});
  CHECK(Tensor::from(context, {1, 2, 3}).shape() == Shape{3});
  CHECK(Tensor::from(context, {{1}, {2}}).shape() == Shape{2, 1});
  CHECK(Tensor::from(context, {{1, 2}}).shape() == Shape{1, 2});
  CHECK(Tensor::from(context, {{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}}).shape() == Shape{2, 2, 2});
  CHECK(Tensor::from(context, {{{1}}}).shape() == Shape{1, 1, 1});
  CHECK(Tensor::from(context, 3.0).shape() == Shape{});
  CHECK(Tensor::from(context, {2, 5}, DType::I32).to_vector<std::int32_t>() ==
        std::vector<std::int32_t>{2, 5});
  CHECK(Tensor::from(context, {-1}, DType::I64).to_vector<std::int64_t>()[0] == -1);
  CHECK(Tensor::from(context, {0.1}, DType::F64).item() == 0.1);
  CHECK(Tensor::from(context, {0.5}, DType::BF16).item() == 0.5);

  CHECK_THROWS_WITH_AS(
      Tensor::from(context, {{1, 2}, {3}}),
      "Tensor::from: braces at one level must hold as many numbers each, got shapes [2] and [1]",
      InvalidArgument);
  CHECK_THROWS_WITH_AS(Tensor::from(context, {1.5}, DType::I32),
                       "Tensor::from: 1.5 is no i32 integer", InvalidArgument);
  CHECK_THROWS_AS(Tensor::from(context, {2147483648.0}, DType::I32), InvalidArgument);
  CHECK_THROWS_AS(Tensor::from(context, {1}, DType::U8), InvalidArgument);
}

TEST_CASE("tensors print with shape, dtype and device") {
  const auto context = Context::create();
  const Tensor x = Tensor::from(context, {{0.5, -1, 3.25}, {2, 0, 1e-5}});
  CHECK(fmt::format("{}", x) == "[[0.5, -1, 3.25],\n [2, 0, 1e-05]] ([2, 3] f32 cpu)");
  std::ostringstream out;
  out << x.alias({3, 2}, {1, 3}, 0);
  CHECK(out.str() == "[[0.5, 2],\n [-1, 0],\n [3.25, 1e-05]] ([3, 2] f32 cpu)");
  CHECK(to_string(Tensor::from(context, {{{1}, {2}}, {{3}, {4}}}, DType::I32)) ==
        "[[[1],\n  [2]],\n [[3],\n  [4]]] ([2, 2, 1] i32 cpu)");
  CHECK(to_string(Tensor::full(context, {}, DType::BF16, 1.5)) == "1.5 ([] bf16 cpu)");
  CHECK(to_string(Tensor::empty(context, {0, 3}, DType::F64)) == "[] ([0, 3] f64 cpu)");
  CHECK(to_string(Tensor()) == "undefined tensor");
  const auto meta = Context::create({.device = {DeviceType::Meta, 0}});
  CHECK(to_string(Tensor::empty(meta, {2}, DType::F32)).find("no values ([2] f32 ") == 0);
  const auto device =
      Context::create({.device = {DeviceType::CUDA, 0}, .plugin = test::fiber_plugin()});
  CHECK(to_string(Tensor::full(device, {2}, DType::F32, 2.0)) == "[2, 2] ([2] f32 cuda:0)");
}

TEST_CASE("long tensors are abbreviated") {
  const auto context = Context::create();
  const Tensor ones = Tensor::full(context, {1001}, DType::F32, 1.0);
  CHECK(to_string(ones) == "[1, 1, 1, ..., 1, 1, 1] ([1001] f32 cpu)");
  const Tensor wide = Tensor::full(context, {2, 600}, DType::F32, 2.0);
  CHECK(to_string(wide) ==
        "[[2, 2, 2, ..., 2, 2, 2],\n [2, 2, 2, ..., 2, 2, 2]] ([2, 600] f32 cpu)");
  const Tensor tall = Tensor::full(context, {600, 2}, DType::F32, 3.0);
  CHECK(to_string(tall) ==
        "[[3, 3],\n [3, 3],\n [3, 3],\n ...,\n [3, 3],\n [3, 3],\n [3, 3]] ([600, 2] f32 cpu)");
}

}  // namespace
}  // namespace tessera
