#include "comm/sharding/finite_check.h"

#include <doctest/doctest.h>

#include <cmath>

#include "comm/single.h"
#include "kernels/elementwise.h"
#include "tests/support/shard_modes.h"

using namespace tessera;

TEST_CASE("non-finite values are counted per parameter, with the position of the first") {
  for (const DType master : {DType::F32, DType::BF16}) {
    CAPTURE(dtype_name(master));
    const auto context = Context::create();
    const auto communicator = comm::make_single_communicator();
    nn::Module root_module;
    const Parameter a(root_module, "a", {4, 6}, {});
    const Parameter b(root_module, "b", {7}, {});
    const Parameter c(root_module, "c", {2}, {});
    const comm::Mesh mesh(*communicator);
    comm::ShardedModel model(root_module, mesh, test::spec_of("full", master, master), context);
    const auto load = [&](bool bad) {
      model.load([&](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
        for (std::int64_t i = begin; i < end; ++i) {
          const bool here =
              bad && ((p.name == "a" && i >= 15 && i % 2 == 1) || (p.name == "c" && i == 0));
          // Their squares overflow float32, not float64.
          *out++ = !here ? 3e38F : p.name == "a" ? NAN : -INFINITY;
        }
      });
    };
    load(false);
    CHECK(comm::non_finite_weights(model).empty());
    model.begin_micro_batch(true, true);
    model.end_micro_batch();
    comm::FlatUnit& root = *model.units().front();
    CHECK(comm::non_finite_sums(model).empty());
    CHECK(comm::non_finite_gradients(root).empty());
    const std::int64_t spoilt = root.layout().slots()[1].offset + 3;
    kernels::fill(*context, root.gradient().alias({1}, {1}, spoilt).view(), INFINITY);
    const auto sums = comm::non_finite_sums(model);
    REQUIRE(sums.size() == 1);
    CHECK(sums[0].parameter == "b");
    CHECK(sums[0].count == 1);
    CHECK(sums[0].numel == 7);
    CHECK(sums[0].first == "[3]");
    CHECK(sums[0].value == "inf");
    load(true);
    const auto found = comm::non_finite_weights(model);
    REQUIRE(found.size() == 2);
    CHECK(found[0].parameter == "a");
    CHECK(found[0].count == 5);
    CHECK(found[0].numel == 24);
    CHECK(found[0].first == "[2, 3]");
    CHECK(found[0].value == "nan");
    CHECK(found[1].parameter == "c");
    CHECK(found[1].first == "[0]");
    CHECK(found[1].value == "-inf");
  }
}
