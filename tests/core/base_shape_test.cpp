#include <doctest/doctest.h>

#include <vector>

#include "core/base/shape.h"
#include "core/base/tensor_view.h"

namespace tessera {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 62;

TEST_CASE("dims store up to eight values") {
  Dims dims{4, 24, 48};
  CHECK(dims.size() == 3);
  CHECK(dims.at(-1) == 48);
  CHECK(dims.back() == 48);
  CHECK(dims.at(0) == 4);
  CHECK(dims.str() == "[4, 24, 48]");
  CHECK(fmt::format("{}", dims) == "[4, 24, 48]");
  dims.push_back(1);
  CHECK(dims == Dims{4, 24, 48, 1});
  CHECK_FALSE(dims == Dims{4, 24, 48});
  CHECK_FALSE(dims == Dims{4, 24, 48, 2});
  CHECK(Dims().str() == "[]");
  CHECK(Dims() == Dims(std::vector<std::int64_t>{}));
}

TEST_CASE("dims refuse a ninth value and an index out of range") {
  Dims dims(std::vector<std::int64_t>(8, 1));
  CHECK_THROWS_WITH_AS(dims.push_back(2), "a tensor has at most 8 dims", InvalidArgument);
  CHECK_THROWS_WITH_AS(Dims(std::vector<std::int64_t>(9, 1)), "a tensor has at most 8 dims, got 9",
                       InvalidArgument);
  CHECK_THROWS_WITH_AS(Dims({2, 3}).at(2), "dim 2 is out of range for [2, 3]", InvalidArgument);
  CHECK_THROWS_WITH_AS(Dims({2, 3}).at(-3), "dim -3 is out of range for [2, 3]", InvalidArgument);
  CHECK_THROWS_AS(Dims().back(), InvalidArgument);
}

TEST_CASE("numel multiplies, and refuses negative and overflowing shapes") {
  CHECK(numel({}) == 1);
  CHECK(numel({7}) == 7);
  CHECK(numel({2, 3, 5}) == 30);
  CHECK(numel({2, 0, 5}) == 0);
  CHECK(numel({kHuge, 1}) == kHuge);
  CHECK_THROWS_WITH_AS(numel({2, -3}), "shape [2, -3] has a negative dim", InvalidArgument);
  CHECK_THROWS_AS(numel({0, -3}), InvalidArgument);
  CHECK_THROWS_AS(numel({kHuge, 2}), InvalidArgument);
  CHECK_THROWS_AS(numel({kHuge, 4}), InvalidArgument);  // 2^64 wraps to 0
}

TEST_CASE("strides of a dense tensor are row-major") {
  CHECK(contiguous_strides({2, 3, 4}) == Strides{12, 4, 1});
  CHECK(contiguous_strides({}) == Strides{});
  CHECK(contiguous_strides({2, 0, 4}) == Strides{4, 4, 1});
  CHECK_THROWS_AS(contiguous_strides({0, kHuge, 4}), InvalidArgument);
}

TEST_CASE("a view reports whether it is dense") {
  float numbers[24] = {};
  TensorView view = dense_view(numbers, DType::F32, {2, 3, 4});
  CHECK(view.is_contiguous());
  CHECK(view.numel() == 24);
  CHECK(view.bytes() == 96);
  view.strides = {4, 8, 1};
  CHECK_FALSE(view.is_contiguous());
  view.shape = {1, 3, 4};
  view.strides = {999, 4, 1};
  CHECK(view.is_contiguous());
  CHECK(view.as<float>() == numbers);
  CHECK_THROWS_WITH_AS(view.as<double>(), "expected dtype f64, got f32", InvalidArgument);
  CHECK_FALSE(TensorView{}.defined());
  CHECK(dense_view(nullptr, DType::F32, {0}).defined());
}

}  // namespace
}  // namespace tessera
