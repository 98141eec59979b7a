#include "comm/sharding/replica_check.h"

#include <doctest/doctest.h>

#include <atomic>

#include "comm/threads.h"
#include "core/autograd/autograd.h"
#include "core/base/rng.h"
#include "core/nn/layers.h"
#include "core/optim/adamw.h"
#include "core/optim/adamw8bit.h"
#include "tests/support/on_threads.h"
#include "tests/support/shard_modes.h"

using namespace tessera;
using comm::ShardedModel;

namespace {

struct Net : nn::Module {
  nn::Linear first{*this, "first", {.in = 8, .out = 40}};
  nn::Linear second{*this, "second", {.in = 40, .out = 8}};
};

struct Setting {
  int world = 2;
  std::string mode = "none";
  DType compute = DType::F32, master = DType::F32;
  bool freezes_second = false;
  bool in_8_bits = false;  // the moments
};

// Makes a step, checks, lets `fault` change something on a rank, and checks again.
// @return the message of the second check, equal on all ranks; empty: no mismatch
std::string outcome(const Setting& setting,
                    const std::function<void(int rank, Net&, ShardedModel&)>& fault) {
  const auto group = std::make_shared<comm::ThreadGroup>(setting.world);
  std::vector<std::string> messages(static_cast<std::size_t>(setting.world));
  test::on_threads(setting.world, [&](int rank) {
    const auto context = Context::create();
    const auto world = comm::make_threads_communicator(group, rank);
    const comm::Mesh mesh = test::mesh_of(setting.mode, *world);
    Net net;
    if (setting.freezes_second)
      for (Parameter* p : net.second.parameters()) p->tensor.set_requires_grad(false);
    ShardedModel sharded(net, mesh, test::spec_of(setting.mode, setting.compute, setting.master),
                         context);
    sharded.load([](const Parameter& p, std::int64_t begin, std::int64_t end, float* out) {
      initialize_range(p, 5, begin, end, out);
    });
    context->set_rng_step({});
    sharded.begin_micro_batch(true, true);
    Tensor y = nn::unit(net.first, Tensor::full(context, {2, 8}, setting.compute, 0.5 + rank));
    y = nn::unit(net.second, y);
    autograd::backward(y, Tensor::full(context, {2, 8}, setting.compute, 1.0));
    sharded.end_micro_batch();
    const optim::AdamW adamw;
    const optim::AdamW8bit adamw8bit;
    const optim::Optimizer& optimizer =
        setting.in_8_bits ? static_cast<const optim::Optimizer&>(adamw8bit) : adamw;
    sharded.step(optimizer, {0.01, 1, Tensor::full(context, {1}, DType::F32, 1.0)});
    comm::check_replicas(sharded);
    fault(rank, net, sharded);
    try {
      comm::check_replicas(sharded);
    } catch (const comm::ReplicaMismatch& error) {
      messages[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  for (const std::string& message : messages) CHECK(message == messages[0]);
  return messages[0];
}

void flip_last_bit(const Tensor& tensor) {
  auto* const bytes = static_cast<unsigned char*>(tensor.view().data);
  bytes[tensor.bytes() - dtype_size(tensor.dtype())] ^= 1U;
}

bool starts(const std::string& text, const std::string& start) {
  CAPTURE(text);
  CHECK(text.starts_with(start));
  return text.starts_with(start);
}

}  // namespace

TEST_CASE("one flipped bit on one rank is found, with parameter and rank") {
  for (const auto& [compute, master] :
       {std::pair(DType::F32, DType::F32), std::pair(DType::BF16, DType::F32),
        std::pair(DType::BF16, DType::BF16)}) {
    for (const std::string mode : {"none", "hybrid"}) {
      const std::string text =
          outcome({6, mode, compute, master}, [](int rank, Net&, ShardedModel& sharded) {
            for (const auto& piece : sharded.held_pieces())
              if (rank == 3 && piece.parameter->name == "second.weight")
                flip_last_bit(piece.master);
          });
      starts(text, mode == "none"
                       ? "weights or optimizer state of 'second.weight' on rank 3 differ "
                         "from those of rank 0, which should be the same bits; 1 of 4 "
                       : "weights or optimizer state of 'second.weight' on rank 3 differ "
                         "from those of rank 1, which should be the same bits; 1 of 4 ");
    }
  }
}

TEST_CASE("optimizer state is compared, and two replicas have no majority") {
  const std::string text = outcome({2}, [](int rank, Net&, ShardedModel& sharded) {
    if (rank == 0)
      for (const auto& piece : sharded.held_pieces())
        if (piece.parameter->name != "first.weight") flip_last_bit(piece.state[1].values);
  });
  starts(text,
         "weights or optimizer state of 'first.bias' on rank 1 differ from those of rank 0, which "
         "should be the same bits (no majority says which are right); 3 of 4 parameters differ");
}

TEST_CASE("codes and scales of moments in 8 bits are compared") {
  for (const std::size_t state : {0, 1, 2, 3}) {
    CAPTURE(state);
    const auto flip = [state](int rank, Net&, ShardedModel& sharded) {
      for (const auto& piece : sharded.held_pieces())
        if (rank == 1 && piece.parameter->name == "second.weight")
          flip_last_bit(piece.state[state].values);
    };
    Setting setting{2};
    setting.in_8_bits = true;
    starts(outcome(setting, flip),
           "weights or optimizer state of 'second.weight' on rank 1 differ from those of rank 0");
  }
}

TEST_CASE("frozen parameters that stay whole on all ranks are compared") {
  const std::string text = outcome({3, "optimizer", DType::BF16, DType::F32, true},
                                   [](int rank, Net& net, ShardedModel&) {
                                     if (rank == 1) flip_last_bit(net.second.weight.tensor);
                                   });
  starts(text,
         "weights or optimizer state of 'second.weight' on rank 1 differ from those of rank 0");
}

TEST_CASE("ranks that hold nothing alike have nothing to compare") {
  for (const std::string mode : {"full", "gradients", "optimizer"}) {
    CHECK(outcome({2, mode}, [](int rank, Net&, ShardedModel& sharded) {
            if (rank == 0) flip_last_bit(sharded.held_pieces().front().master);
          }) == "");
  }
}
