#include <doctest/doctest.h>

#include <array>

#include "core/base/product_tuning.h"

namespace tessera {
namespace {

const std::string kGpu = "GPU, library 1.0.0";

TunedProduct kernel(const std::string& algorithm, double microseconds) {
  return {algorithm, 0, microseconds};
}

bool accepts_all(const TunedProduct&) { return true; }

TEST_CASE("the fastest kernel is taken; those that can't run are left out") {
  const std::array<TunedProduct, 4> kernels{{{"0a", 1}, {"0b", 2}, {"0c", 3}, {"0d", 4}}};
  const std::array<std::optional<double>, 4> times{std::nullopt, 7.0, 5.0, 5.0};
  CHECK(fastest(kernels, [&](std::size_t i) { return times[i]; }) == TunedProduct{"0c", 3, 5.0});
  CHECK_FALSE(fastest(kernels, [](std::size_t) { return std::optional<double>(); }));
}

TEST_CASE("an algorithm's bytes as hexadecimal text") {
  const std::array bytes{std::byte{0}, std::byte{0x7f}, std::byte{0xe1}};
  CHECK(to_hex(bytes) == "007fe1");
  std::array<std::byte, 3> back{};
  CHECK(from_hex("007fe1", back));
  CHECK(back == bytes);
  for (const char* text : {"", "007fe", "007fe100", "007fxx", "0x7fe1", "-07fe1"})
    CHECK_FALSE(from_hex(text, back));
}

TEST_CASE("results are used when all ranks have them, not before") {
  ProductTuning tuning(kGpu);
  CHECK_FALSE(tuning.is_to_time("a"));
  CHECK(tuning.find("a", accepts_all) == nullptr);

  const TunedProducts file = {{kGpu, {{"a", kernel("01", 3)}}},
                              {"other", {{"b", kernel("02", 3)}}}};
  tuning.use(file, 10);
  const int before = tuning.generation();
  CHECK_FALSE(tuning.is_to_time("a"));
  REQUIRE(tuning.find("a", accepts_all) != nullptr);
  CHECK(tuning.find("a", accepts_all)->algorithm == "01");
  CHECK(tuning.is_to_time("b"));  // the entry is another GPU's
  tuning.add("b", kernel("03", 2));
  tuning.add("c", std::nullopt);
  CHECK_FALSE(tuning.is_to_time("b"));
  CHECK(tuning.is_to_time("c"));
  CHECK(tuning.find("b", accepts_all) == nullptr);

  const TunedProducts timed = tuning.take_timed();
  CHECK(timed == TunedProducts{{kGpu, {{"b", kernel("03", 2)}}}});
  TunedProducts all = file;
  merge(all, timed);
  CHECK(all.at("other") == file.at("other"));
  tuning.use(all, 0);
  CHECK(tuning.generation() != before);
  REQUIRE(tuning.find("b", accepts_all) != nullptr);
  CHECK_FALSE(tuning.is_to_time("c"));
  CHECK(tuning.take_timed().empty());

  tuning.use({}, 10);
  CHECK(tuning.spend(4));
  CHECK(tuning.is_to_time("c"));
  CHECK_FALSE(tuning.spend(7));
  CHECK_FALSE(tuning.is_to_time("c"));
}

TEST_CASE("an algorithm that the library refuses is timed again") {
  ProductTuning tuning(kGpu);
  for (const bool times : {true, false}) {
    tuning.use({{kGpu, {{"a", kernel("01", 3)}}}}, times ? 10 : 0);
    CHECK(tuning.find("a", [](const TunedProduct&) { return false; }) == nullptr);
    CHECK(tuning.find("a", accepts_all) == nullptr);
    CHECK(tuning.is_to_time("a") == times);
  }
}

TEST_CASE("an epilogue runs in a kernel of its own where that is faster, or the only way") {
  ProductTuning tuning(kGpu);
  tuning.use({{kGpu, {{"plain", kernel("01", 10)}}}}, 10);
  tuning.add("fused", kernel("02", 14));
  tuning.compare_apart("fused", "plain", 5);
  tuning.add("slow", kernel("03", 16));
  tuning.compare_apart("slow", "plain", 5);
  tuning.compare_apart("refused", "plain", 5);
  tuning.compare_apart("without", "a plain product that can't run", 5);
  const TunedProduct apart{"", 0, 15, true};
  const TunedProducts timed = tuning.take_timed();
  CHECK(timed ==
        TunedProducts{{kGpu, {{"fused", kernel("02", 14)}, {"slow", apart}, {"refused", apart}}}});
  tuning.use(timed, 0);
  const auto refuse = [](const TunedProduct&) { return false; };
  REQUIRE(tuning.find("slow", refuse) != nullptr);  // has no algorithm to refuse
  CHECK(tuning.find("slow", refuse)->apart);
}

}  // namespace
}  // namespace tessera
