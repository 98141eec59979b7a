// Sharded models on fiber devices, whose kernels are the GPU's.

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "comm/sharding/sharded_model.h"
#include "core/autograd/autograd.h"
#include "core/ops/linear.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/comm/ranks.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using namespace tessera::test;

namespace {

struct Layer : nn::Module {
  Parameter weight, bias;
  Layer(nn::Module& parent, std::string_view name)
      : Module(parent, name), weight(*this, "weight", {8, 8}, {}), bias(*this, "bias", {8}, {}) {}
  Tensor operator()(const Tensor& x) const { return ops::linear(x, weight, bias); }
};

struct Layers : nn::Module {
  nn::List<Layer> h{*this, "h", 2};
  Tensor operator()(Tensor x) {
    for (Layer& layer : h) x = nn::unit(layer, x);
    return x;
  }
};

// Halves: all gradients below are integers of few bits.
void fill(const Parameter&, std::int64_t begin, std::int64_t end, float* out) {
  for (std::int64_t i = begin; i < end; ++i) out[i - begin] = i % 3 == 0 ? 0.5F : 0.0F;
}

void micro_batches(Layers& model, comm::ShardedModel& sharded,
                   const std::shared_ptr<Context>& context, int rank) {
  for (int m = 0; m < 2; ++m) {
    sharded.begin_micro_batch(m == 0, m == 1);
    const Tensor y = model(Tensor::full(context, {2, 8}, DType::F32, rank + 1));
    autograd::backward(y, Tensor::full(context, {2, 8}, DType::F32, 1.0));
    sharded.end_micro_batch();
  }
}

// Gradient segments of rank 1 of two, over fake NCCL.
std::vector<std::vector<float>> gradients_over_nccl(const comm::ShardSpec& spec) {
  std::vector<std::vector<float>> result;
  FakeRanks ranks(2);
  ranks.timeout = 20s;
  for (const RankResult& each : run_ranks(2, [&](int rank) {
         const auto world = ranks.join(rank);
         const comm::Mesh mesh(*world);
         Layers model;
         comm::ShardedModel sharded(model, mesh, spec, device_context());
         sharded.load(fill);
         micro_batches(model, sharded, device_context(), rank);
         if (rank == 0) return;
         for (const auto& unit : sharded.units())
           result.push_back(unit->gradient().to_vector<float>());
       }))
    CHECK(each.error == "");
  return result;
}

}  // namespace

TEST_CASE("gradients that bf16 can hold arrive alike over NCCL in bf16 and in float32") {
  for (const std::string mode : {"full", "gradients", "optimizer"}) {
    CAPTURE(mode);
    comm::ShardSpec spec = spec_of(mode);
    const auto exact = gradients_over_nccl(spec);
    REQUIRE(exact.size() == 2);
    CHECK(std::any_of(exact[0].begin(), exact[0].end(), [](float x) { return x != 0; }));
    spec.reduction = DType::BF16;
    CHECK(gradients_over_nccl(spec) == exact);
    spec.gradient = DType::BF16;
    CHECK(gradients_over_nccl(spec) == exact);
  }
}
