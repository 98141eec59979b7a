// Gradients of an embedding sent as rows have the bits of whole gradients.

#include <doctest/doctest.h>

#include <map>
#include <mutex>

#include "comm/planned.h"
#include "comm/sharding/sharded_model.h"
#include "core/autograd/autograd.h"
#include "core/base/memory.h"
#include "core/base/rng.h"
#include "core/nn/layers.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/linear.h"
#include "tests/comm/fake_nccl_ranks.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using namespace std::chrono_literals;
using comm::ShardedModel;

namespace {

constexpr std::int64_t kVocab = 300, kWidth = 20, kTokens = 24;  // segments begin within rows

// How the embedding's weight is used: once, by two passes, as head too, or as positions too.
enum class Use : std::uint8_t { Once, Twice, Tied, Positions };

struct Net : nn::Module {
  nn::Embedding embed{*this, "embed", kVocab, kWidth};
  nn::Linear layer{*this, "layer", {.in = kWidth, .out = kWidth}};
  Tensor operator()(const Tensor& tokens, Use use) {
    Tensor x = use == Use::Positions
                   ? nn::unit(
                         {&embed},
                         [&](const Tensor& ids) {
                           return ops::embedding(ids, embed.weight, embed.weight, 3);
                         },
                         tokens)
                   : nn::unit(embed, tokens);
    if (use == Use::Twice) x = x + nn::unit(embed, tokens);
    x = nn::unit(layer, x);
    if (use != Use::Tied) return x;
    const auto head = [&](const Tensor& in) { return ops::linear(in, embed.weight, {}); };
    return nn::unit({&embed}, head, x);
  }
};

struct Setting {
  std::string backend, mode;
  int world = 1, micro_batches = 1;
  DType compute = DType::F32;
  Use use = Use::Once;
  DType reduction = DType::F32;
  bool observed = false;

  comm::ShardSpec spec(bool sends_rows) const {
    comm::ShardSpec spec = test::spec_of(mode, compute);
    spec.reduction = reduction;
    spec.tokens = sends_rows ? kTokens : 0;
    return spec;
  }
};

struct Outcome {
  std::map<std::string, std::vector<float>> gradients, observed;
  std::int64_t peak = 0, scratch = 0, reduced = 0, gathered = 0;  // bytes of rank 0
};

Tensor random(const std::shared_ptr<Context>& context, const Shape& shape, DType dtype,
              std::uint64_t seed) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < numel(shape); ++i)
    values.push_back(
        normal_at(RngKey::make(seed, RngPurpose::Test, 0), static_cast<std::uint64_t>(i)));
  return ops::cast(Tensor::from<float>(context, shape, values), dtype);
}

// Two steps; all ranks have tokens in common, and the last one has fewer.
Outcome run_rank(const Setting& s, bool sends_rows, comm::Communicator& world,
                 const std::shared_ptr<Context>& context) {
  Outcome result;
  const comm::Mesh mesh = test::mesh_of(s.mode, world);
  Net net;
  ShardedModel model(net, mesh, s.spec(sends_rows), context);
  model.initialize(7);
  const int rank = world.rank();
  const std::string prefix = fmt::format("rank {} ", rank);
  if (s.observed && rank == 0)
    model.observe_gradients([&](const comm::FlatUnit& unit) {
      result.observed[unit.name()] = unit.parameters().front()->tensor.grad().to_vector<float>();
    });
  for (int step = 0; step < 2; ++step) {
    for (int m = 0; m < s.micro_batches; ++m) {
      const std::int64_t columns = rank > 0 && rank + 1 == s.world ? kTokens / 2 - 1 : kTokens / 2;
      std::vector<std::int32_t> ids;
      for (std::int64_t i = 0; i < 2 * columns; ++i)
        ids.push_back(
            static_cast<std::int32_t>(i % 3 == 0 ? 102 : (i * i * 7 + rank * m) % kVocab));
      model.begin_micro_batch(m == 0, m + 1 == s.micro_batches);
      const Tensor y = net(Tensor::from<std::int32_t>(context, {2, columns}, ids), s.use);
      autograd::backward(
          y, random(context, y.shape(), y.dtype(), std::uint64_t{1} + rank * 10 + m + step * 100));
      model.end_micro_batch();
    }
    if (context->device().type == DeviceType::Meta) continue;
    for (const auto& unit : model.units())
      result.gradients[fmt::format("rank {} step {} {}", rank, step, unit->name())] =
          unit->gradient().to_vector<float>();
  }
  result.peak = context->ledger().usage(MemoryCategory::Gradients).peak;
  result.scratch = context->ledger().usage(MemoryCategory::Workspace).peak;
  result.reduced = mesh.shard().traffic().reduce_scatter;
  result.gathered = mesh.shard().traffic().all_gather;
  return result;
}

Outcome run(const Setting& s, bool sends_rows) {
  Outcome result;
  std::mutex mutex;
  test::FakeRanks nccl(s.world);
  nccl.timeout = 20s;
  const test::Group group(s.backend, s.world);
  for (const test::RankResult& each : test::run_ranks(s.world, [&](int rank) {
         const auto world = s.backend == "nccl" ? nccl.join(rank) : group.join(rank);
         const auto context =
             test::device_context() ? test::device_context() : Context::create({.threads = 2});
         Outcome own = run_rank(s, sends_rows, *world, context);
         const std::lock_guard lock(mutex);
         own.gradients.merge(result.gradients);
         if (rank == 0)
           result = own;
         else
           result.gradients = own.gradients;
       }))
    CHECK(each.error == "");
  return result;
}

void compare(const Setting& s) {
  CAPTURE(s.backend);
  CAPTURE(s.mode);
  CAPTURE(s.world);
  CAPTURE(s.micro_batches);
  CAPTURE(dtype_name(s.compute));
  CAPTURE(static_cast<int>(s.use));
  const Outcome whole = run(s, false), rows = run(s, true);
  CHECK(whole.gradients.size() == static_cast<std::size_t>(4 * s.world));
  CHECK((rows.gradients == whole.gradients));
  CHECK((rows.observed == whole.observed));
  const bool splits = s.mode != "optimizer" && s.world > 1;
  if (splits && s.use == Use::Once && s.reduction == DType::F32) {
    const int group = comm::shard_group_size(s.mode, s.world, 2);
    const std::int64_t others = group - 1, times = 2 * s.micro_batches;
    // Rows in place of the table, padded to 64 elements for each rank.
    const std::int64_t padded = (kVocab * kWidth + 64 * group - 1) / (64 * group) * 64 * group;
    CHECK(whole.reduced - rows.reduced == times * 4 * padded / group * others);
    CHECK(rows.gathered - whole.gathered == times * 4 * kTokens * (kWidth + 1) * others);
    if (!s.observed) CHECK(rows.peak < whole.peak);
  } else {
    CHECK(rows.reduced == whole.reduced);
    CHECK(rows.gathered == whole.gathered);
  }
  if (s.backend == "threads") return;
  const auto planned =
      Context::create({.device = {DeviceType::Meta, 0}, .planned = {DeviceType::CUDA, 0}});
  const auto world = comm::make_planned_communicator(planned, s.backend, 0, s.world);
  const Outcome plan = run_rank(s, true, *world, planned);
  CHECK(plan.peak == rows.peak);
  CHECK(plan.scratch == rows.scratch);
}

}  // namespace

TEST_CASE("gradients sent as rows have the bits of whole gradients") {
  for (const std::string mode : {"full", "gradients", "hybrid"}) {
    for (const int world : {1, 2, 3, 4}) {
      if (mode == "hybrid" && world % 2 != 0) continue;
      for (const int micro_batches : {1, 3})
        for (const DType compute : {DType::F32, DType::BF16})
          compare({"threads", mode, world, micro_batches, compute});
    }
  }
  for (const DType compute : {DType::F32, DType::BF16})
    for (const std::string backend : {"threads, staged", "nccl"})
      compare({backend, "full", 2, 2, compute});
  compare({"threads", "full", 2, 2, DType::F32, Use::Once, DType::F32, true});
}

TEST_CASE("other uses of the weight, another reduction or whole gradients are not sent as rows") {
  for (const Use use : {Use::Twice, Use::Tied, Use::Positions})
    compare({"threads", "full", 3, 2, DType::F32, use});
  compare({"threads", "full", 3, 2, DType::BF16, Use::Once, DType::BF16});
  compare({"threads", "optimizer", 3, 2});
}

TEST_CASE("more tokens than were announced are refused") {
  const Setting s{"threads", "full", 2};
  const test::Group group(s.backend, s.world);
  for (const test::RankResult& each : test::run_ranks(2, [&](int rank) {
         const auto world = group.join(rank);
         const auto context = Context::create();
         const comm::Mesh mesh(*world);
         Net net;
         ShardedModel model(net, mesh, s.spec(true), context);
         model.initialize(7);
         model.begin_micro_batch(true, true);
         const std::vector<std::int32_t> ids(kTokens + 1);
         const Tensor y = net(Tensor::from<std::int32_t>(context, {1, kTokens + 1}, ids), s.use);
         autograd::backward(y, Tensor::full(context, y.shape(), DType::F32, 1.0));
       }))
    CHECK_MESSAGE(test::holds(each.error,
                              "unit 'embed' got the gradient of 25 tokens in a micro-batch, but "
                              "ShardSpec::tokens is 24"),
                  each.error);
}
