// Sharded models on fiber devices, whose kernels are the GPU's.

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "comm/planned.h"
#include "comm/sharding/replica_check.h"
#include "comm/sharding/sharded_model.h"
#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/ops/linear.h"
#include "core/optim/adamw.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/comm/ranks.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using namespace tessera::test;

namespace {

constexpr std::int64_t kWidth = 12;

struct Layer : nn::Module {
  Parameter weight, bias;
  Layer(nn::Module& parent, std::string_view name)
      : Module(parent, name),
        weight(*this, "weight", {kWidth, kWidth}, {}),
        bias(*this, "bias", {kWidth}, {}) {}
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
                   const std::shared_ptr<Context>& context, int rank, DType compute = DType::F32) {
  for (int m = 0; m < 2; ++m) {
    sharded.begin_micro_batch(m == 0, m == 1);
    const Tensor y = model(Tensor::full(context, {2, kWidth}, compute, rank + 1));
    autograd::backward(y, Tensor::full(context, {2, kWidth}, compute, 1.0));
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

namespace {

constexpr MemoryCategory kCategories[] = {MemoryCategory::Parameters, MemoryCategory::Gradients,
                                          MemoryCategory::OptimizerState, MemoryCategory::Gathered,
                                          MemoryCategory::Staging};

struct Trained {
  std::map<std::string, std::vector<float>> values;
  std::vector<std::int64_t> on_device, on_host;  // peaks of kCategories; without offload the same
  std::int64_t parameters = 0;                   // of the segments
};

std::vector<std::int64_t> peaks(const Context& context) {
  std::vector<std::int64_t> result;
  for (const MemoryCategory category : kCategories)
    result.push_back(context.ledger().usage(category).peak);
  return result;
}

// Three steps; with NaN instead of a clipping factor in the second.
Trained train_rank(const comm::ShardSpec& spec, const comm::Mesh& mesh,
                   const std::shared_ptr<Context>& context) {
  Trained result;
  Layers model;
  comm::ShardedModel sharded(model, mesh, spec, context);
  sharded.load(fill);
  for (int step = 1; step <= 3; ++step) {
    micro_batches(model, sharded, context, mesh.world().rank(), spec.compute);
    const double factor = step == 2 ? std::numeric_limits<double>::quiet_NaN() : 0.5;
    sharded.step(
        optim::AdamW(),
        {.lr = 0.1, .step = step, .factor = Tensor::full(context, {1}, DType::F32, factor)});
  }
  for (const auto& unit : sharded.units()) result.parameters += unit->segment_size();
  result.on_device = peaks(*context);
  result.on_host = peaks(*sharded.state_context());
  const NoGradGuard no_grad(*context);
  sharded.begin_evaluation();
  const Tensor y = model(Tensor::full(context, {2, kWidth}, spec.compute, 1.0));
  sharded.end_evaluation();
  if (context->device().type == DeviceType::Meta) return result;
  // Masters, and what the model computes with their copies.
  for (const auto& piece : sharded.owned_pieces())
    result.values[fmt::format("{} {}", piece.parameter->name, piece.begin)] =
        piece.master.to_vector<float>();
  if (spec.compute == DType::F32) {
    result.values["y"] = y.to_vector<float>();
  } else {
    for (const BFloat16 x : y.to_vector<BFloat16>())
      result.values["y"].push_back(static_cast<float>(x));
  }
  return result;
}

// Rank 1 of two.
Trained train_on(const std::string& backend, const std::string& mode, const comm::ShardSpec& spec) {
  Trained result;
  const Group group(backend, 2);
  for (const RankResult& each : run_ranks(2, [&](int rank) {
         const auto world = group.join(rank);
         const comm::Mesh mesh = mesh_of(mode, *world);
         const auto context = device_context() ? device_context() : Context::create();
         const Trained trained = train_rank(spec, mesh, context);
         if (rank == 1) result = trained;
       }))
    CHECK(each.error == "");
  return result;
}

}  // namespace

TEST_CASE("offloaded masters and moments leave the device, and train alike") {
  for (const std::string mode : {"full", "gradients", "optimizer", "none"}) {
    for (const DType compute : {DType::F32, DType::BF16}) {
      CAPTURE(mode);
      CAPTURE(dtype_name(compute));
      comm::ShardSpec spec = spec_of(mode, compute);
      const Trained resident = train_on("threads, staged", mode, spec);
      const Trained on_cpu = train_on("threads", mode, spec);
      spec.offload = true;
      const Trained offloaded = train_on("threads, staged", mode, spec);
      REQUIRE(offloaded.values.size() == resident.values.size());
      for (const auto& each : resident.values) {
        const std::string& name = each.first;
        CAPTURE(name);
        for (std::size_t i = 0; i < each.second.size(); ++i)
          CHECK(offloaded.values.at(name)[i] == doctest::Approx(each.second[i]).epsilon(1e-6));
      }
      const auto at = [](const std::vector<std::int64_t>& bytes, MemoryCategory category) {
        return bytes[static_cast<std::size_t>(
            std::find(std::begin(kCategories), std::end(kCategories), category) - kCategories)];
      };
      const auto copy = static_cast<std::int64_t>(dtype_size(compute));
      CHECK(at(offloaded.on_host, MemoryCategory::Parameters) == 4 * offloaded.parameters);
      CHECK(at(offloaded.on_host, MemoryCategory::OptimizerState) == 8 * offloaded.parameters);
      CHECK(at(offloaded.on_device, MemoryCategory::OptimizerState) == 0);
      CHECK(at(offloaded.on_device, MemoryCategory::Parameters) ==
            (mode == "full" ? copy * offloaded.parameters : 0));
      CHECK(at(offloaded.on_device, MemoryCategory::Gradients) ==
            at(resident.on_device, MemoryCategory::Gradients));
      // The plan's ledgers are equal to those of the run.
      const auto planned =
          Context::create({.device = {DeviceType::Meta, 0}, .planned = {DeviceType::CUDA, 0}});
      const auto world = comm::make_planned_communicator(planned, "threads", 1, 2);
      const comm::Mesh mesh = mesh_of(mode, *world);
      const Trained plan = train_rank(spec, mesh, planned);
      CHECK(plan.on_device == offloaded.on_device);
      CHECK(plan.on_host == offloaded.on_host);
      // On the CPU nothing changes.
      const Trained off_cpu = train_on("threads", mode, spec);
      CHECK(off_cpu.values == on_cpu.values);
      CHECK(off_cpu.on_device == on_cpu.on_device);
    }
  }
}

TEST_CASE("bf16 masters are not offloaded") {
  Layers model;
  const auto context = Context::create();
  const auto world = comm::make_single_communicator();
  const comm::Mesh mesh(*world);
  CHECK_THROWS_WITH_AS(
      comm::ShardedModel(model, mesh,
                         {.compute = DType::BF16, .master = DType::BF16, .offload = true}, context),
      "offloaded master weights are f32, got bf16; turn offload or bf16 masters off",
      InvalidArgument);
}

TEST_CASE("a flipped bit of a replica is found on the device, and in offloaded state") {
  for (const bool offload : {false, true}) {
    CAPTURE(offload);
    FakeRanks ranks(2);
    ranks.timeout = 20s;
    for (const RankResult& each : run_ranks(2, [&](int rank) {
           const auto world = ranks.join(rank);
           const comm::Mesh mesh = mesh_of("none", *world);
           Layers model;
           comm::ShardSpec spec = spec_of("none", DType::BF16);
           spec.offload = offload;
           comm::ShardedModel sharded(model, mesh, spec, device_context());
           sharded.load(fill);
           sharded.create_optimizer_state(optim::AdamW());
           CHECK((sharded.state_context() != device_context()) == offload);
           comm::check_replicas(sharded);
           if (rank == 1)
             *static_cast<unsigned char*>(sharded.held_pieces()[2].state[0].values.view().data) ^=
                 1U;
           comm::check_replicas(sharded);
         }))
      CHECK(holds(
          each.error,
          "weights or optimizer state of 'h.1.weight' on rank 1 differ from those of rank 0"));
  }
}
