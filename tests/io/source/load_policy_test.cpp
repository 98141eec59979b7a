#include "io/source/load_policy.h"

#include <doctest/doctest.h>

#include "core/base/error.h"
#include "tests/support/check_throws.h"

namespace tessera::io {
namespace {

using Names = std::vector<std::string>;

const std::vector<TensorInfo> kModel = {
    {"a", {2, 3}, DType::F32}, {"b", {4}, DType::F32}, {"c", {5}, DType::F32}};

TEST_CASE("a matching source loads with any policy, without a message") {
  const auto same = compare_tensors(kModel, kModel);
  CHECK(same.usable == std::set<std::string>{"a", "b", "c"});
  for (const char* text : {"exact", "ignore-extra", "partial"}) {
    CHECK(apply_policy(same, parse_load_policy(text), "x", "zeros").empty());
  }
  CHECK_THROWS_HOLDING(InvalidArgument, "got loose", parse_load_policy("loose"));
}

TEST_CASE("tensors that the model lacks are left out if allowed") {
  auto found = kModel;
  found.push_back({"score.weight", {7, 2}, DType::BF16});
  const auto comparison = compare_tensors(kModel, found);
  CHECK_THROWS_HOLDING(InvalidArgument,
                       "the tensors of x do not match the model; to skip tensors that the model "
                       "lacks, use --checkpoint.load_policy ignore-extra:\n  unexpected: "
                       "score.weight [7, 2]",
                       apply_policy(comparison, LoadPolicy::Exact, "x", "zeros"));
  const Names note = {
      "note: 1 tensor of x is skipped, since the model lacks it: score.weight [7, 2]"};
  CHECK(apply_policy(comparison, LoadPolicy::IgnoreExtra, "x", "zeros") == note);
  CHECK(apply_policy(comparison, LoadPolicy::Partial, "x", "zeros") == note);
}

TEST_CASE("all mismatches are listed at once, and a partial load reports each kind") {
  const auto comparison = compare_tensors(
      kModel, {{"a", {3, 2}, DType::F32}, {"c", {5}, DType::F32}, {"d", {}, DType::F32}});
  const std::string list =
      "to load the 1 tensor that fits, and keep zeros for the others, use --checkpoint.load_policy "
      "partial:\n  missing: b [4]\n  shape: a is [3, 2], expected [2, 3]\n  unexpected: d []";
  for (const auto policy : {LoadPolicy::Exact, LoadPolicy::IgnoreExtra}) {
    CHECK_THROWS_HOLDING(InvalidArgument, list, apply_policy(comparison, policy, "x", "zeros"));
  }
  CHECK(apply_policy(comparison, LoadPolicy::Partial, "x", "zeros") ==
        Names{"note: 1 tensor of x is skipped, since the model lacks it: d []",
              "note: 1 tensor is missing in x, and keeps zeros: b [4]",
              "note: 1 tensor of x does not fit, and keeps zeros: a is [3, 2], expected [2, 3]"});
  CHECK(comparison.usable == std::set<std::string>{"c"});
}

TEST_CASE("integer tensors are no weights, and long lists of names are counted") {
  auto found = kModel;
  found[1].dtype = DType::I32;
  CHECK(apply_policy(compare_tensors(kModel, found), LoadPolicy::Partial, "x", "zeros") ==
        Names{"note: 1 tensor of x has an unsupported dtype, and keeps zeros: b is i32, "
              "expected f32, bf16 or f16"});
  for (int i = 0; i < 10; ++i) found.push_back({fmt::format("x{}", i), {}, DType::F32});
  found[1].dtype = DType::F32;
  CHECK(apply_policy(compare_tensors(kModel, found), LoadPolicy::Partial, "x", "zeros") ==
        Names{"note: 10 tensors of x are skipped, since the model lacks them: x0 [], x1 [], x2 "
              "[], x3 [], x4 [], x5 [], x6 [], x7 [] and 2 more"});
}

TEST_CASE("a source without any matching tensor is refused") {
  const auto comparison = compare_tensors(kModel, {{"other", {1}, DType::F32}});
  CHECK_THROWS_HOLDING(InvalidArgument, "none of its tensors fits: choose another source",
                       apply_policy(comparison, LoadPolicy::Partial, "x", "zeros"));
}

}  // namespace
}  // namespace tessera::io
